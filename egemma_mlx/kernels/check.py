"""What a kernel function expects of its arrays: `[linear] expected w of shape (M, 512) but got (4, 3)`."""

from __future__ import annotations

import mlx.core as mx

from egemma_mlx.errors import EgemmaError

WEIGHTS = (mx.float32, mx.bfloat16)


def shape(op: str, name: str, array: mx.array, *dims: int | str) -> None:
    """Raise EgemmaError unless `array` has these dimensions; a name stands for any size."""
    fits = array.ndim == len(dims) and all(isinstance(d, str) or d == n for d, n in zip(dims, array.shape, strict=True))
    if not fits:
        raise EgemmaError(f"[{op}] expected {name} of shape {_tuple(dims)} but got {_tuple(array.shape)}")


def dtype(op: str, name: str, array: mx.array, *dtypes: mx.Dtype) -> None:
    """Raise EgemmaError unless `array` has one of these dtypes."""
    if array.dtype not in dtypes:
        expected = " or ".join(str(d).removeprefix("mlx.core.") for d in dtypes)
        raise EgemmaError(f"[{op}] expected {name} of dtype {expected} but got {_name(array)}")


def multiple(op: str, name: str, size: int, of: int) -> None:
    """Raise EgemmaError unless `size` is a positive multiple of `of`."""
    if size <= 0 or size % of:
        raise EgemmaError(f"[{op}] expected {name} to be a multiple of {of} but got {size}")


def rows(op: str, name: str, array: mx.array, *dims: int | str) -> None:
    """Rows of activations: float32 of this shape."""
    shape(op, name, array, *dims)
    dtype(op, name, array, mx.float32)


def weight(op: str, name: str, array: mx.array, *dims: int | str) -> None:
    """A stored weight: float32 or bfloat16 of this shape."""
    shape(op, name, array, *dims)
    dtype(op, name, array, *WEIGHTS)


def indices(op: str, name: str, array: mx.array, *dims: int | str) -> None:
    """Positions or segments: int32 of this shape."""
    shape(op, name, array, *dims)
    dtype(op, name, array, mx.int32)


def _name(array: mx.array) -> str:
    return str(array.dtype).removeprefix("mlx.core.")


def _tuple(dims: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"
