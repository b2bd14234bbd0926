"""What is done to finished vectors on the host: shorten, normalise, quantise, compare."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from egemma_mlx.errors import EgemmaError

Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[Precision, ...] = ("float32", "int8", "uint8", "binary", "ubinary")
Floats = NDArray[np.float32]


def normalize(vectors: Floats) -> Floats:
    """Unit vectors along the last axis; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Floats = vectors / np.maximum(lengths, np.float32(1e-12))
    return unit


def check(width: int, truncate_dim: int | None, precision: Precision) -> None:
    """Refuse options that `truncate` and `quantize` would, before vectors of `width` are computed.

    Raises:
        EgemmaError: `truncate_dim` is not in 1…width, or an unknown precision.
    """
    integer = isinstance(truncate_dim, (int, np.integer)) and not isinstance(truncate_dim, bool)
    if truncate_dim is not None and not (integer and 1 <= truncate_dim <= width):
        raise EgemmaError(f"expected truncate_dim in 1…{width} but got {truncate_dim!r}")
    if precision not in PRECISIONS:
        raise EgemmaError(f"expected precision to be one of {', '.join(PRECISIONS)} but got {precision!r}")


def truncate(vectors: Floats, dim: int | None) -> Floats:
    """The first `dim` components (Matryoshka), not normalised again; None keeps all.

    Raises:
        EgemmaError: `dim` is not between 1 and the width.
    """
    check(vectors.shape[-1], dim, "float32")
    return vectors if dim is None else vectors[..., :dim]


def quantize(vectors: Floats, precision: Precision, ranges: Floats | None = None) -> NDArray[Any]:
    """Vectors [N, D] at a storage precision, as sentence-transformers' `quantize_embeddings` defines it.

    int8 and uint8 cut [low, high] of each dimension into 255 steps; binary and ubinary pack the signs, eight a byte.

    Args:
        ranges: [2, D], low and high of each dimension. Default: those of `vectors`, so that two corpora quantised
            apart do not compare; give ranges measured once on a sample instead.

    Returns:
        float32 [N, D], int8 or uint8 [N, D], or int8 (binary) or uint8 (ubinary) [N, ⌈D/8⌉].

    Raises:
        EgemmaError: an unknown precision, ranges of another shape, or one vector alone to take ranges from.
    """
    check(vectors.shape[-1], None, precision)
    if precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        # The reference stores signed bytes in excess 128.
        signed: NDArray[Any] = (bits.astype(np.int16) - 128).astype(np.int8)
        return bits if precision == "ubinary" else signed
    if len(vectors) == 0:
        return vectors.astype(precision)
    if ranges is None:
        if len(vectors) < 2:
            raise EgemmaError(f"precision {precision!r} takes its ranges from the vectors: expected two or more")
        ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
    if np.shape(ranges) != (2, vectors.shape[1]):
        raise EgemmaError(f"expected ranges of shape (2, {vectors.shape[1]}) but got {np.shape(ranges)}")
    low, high = np.asarray(ranges, np.float32)
    step = (high - low) / 255
    steps = np.clip(np.floor((vectors - low) / np.where(step == 0, np.float32(1), step)), 0, 255)
    stored: NDArray[Any] = steps.astype(np.uint8) if precision == "uint8" else (steps - 128).astype(np.int8)
    return stored


def similarity(a: Any, b: Any) -> Floats:
    """Cosine of every vector of `a` with every one of `b`: [D] or [N, D] float → [N, M] float32."""
    left, right = (normalize(np.atleast_2d(np.asarray(x, np.float32))) for x in (a, b))
    if left.shape[-1] != right.shape[-1]:
        raise EgemmaError(f"expected vectors of one width but got {left.shape[-1]} and {right.shape[-1]}")
    cosines: Floats = left @ right.T
    return cosines
