"""Checkpoints as other tools write them → the official names and axes.

mlx-vlm and mlx-embeddings may put `model.` before every name, and keep the audio tower's convolution weights in MLX's
axis order (channels last) where the official checkpoint has PyTorch's. Everything else is as in the checkpoint.

mlx is not imported: what is decided by names and shapes alone serves headers too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    import mlx.core as mx

Shape = tuple[int, ...]

_PREFIX = "model."
# Of MLX's axes, by the end of the name: [out, height, width, in] and [channels, width, 1] to PyTorch's order.
_TO_OFFICIAL: dict[str, Shape] = {".conv.weight": (0, 3, 1, 2), ".depthwise_conv1d.weight": (0, 2, 1)}
# What a quantised layer keeps beside its packed weight.
_QUANTISED = (".scales", ".biases")


def official_name(name: str) -> str:
    """The checkpoint's name of a tensor: without a leading `model.`."""
    return name.removeprefix(_PREFIX)


def official_shape(name: str, shape: Shape, expected: Shape) -> Shape:
    """The shape of a stored tensor in the official axis order.

    Args:
        name: official.
        shape: as stored.
        expected: what `checkpoint.tensor_shapes` says, which tells the two orders of a convolution apart.

    Returns:
        `expected` where one of the orders fits it; else `shape` as it is.
    """
    order = _order(name, shape, expected)
    return shape if order is None else tuple(shape[axis] for axis in order)


def official_axes(name: str, array: mx.array, expected: Shape) -> mx.array:
    """A stored tensor in the official axis order; lazy. Arguments as `official_shape` has them."""
    order = _order(name, array.shape, expected)
    return array if order is None else array.transpose(order)


def official(
    weights: Mapping[str, mx.array], expected: Mapping[str, Shape], others: Iterable[str] = ()
) -> dict[str, mx.array]:
    """A checkpoint's tensors under the official names and in the official axis order.

    The layers of a quantised checkpoint keep their packed weight, scales and biases.

    Args:
        weights: by any of the known layouts' names.
        expected: name and shape of each tensor that is wanted (`checkpoint.tensor_shapes`).
        others: names of tensors that may be there and are left out: those of other towers.

    Raises:
        EgemmaError: a tensor that no tower has (an `lm_head`, say), or one that comes under two names.
    """
    known, dropped = set(expected), set(others)
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        key = official_name(name)
        parameter = _weight_of(key)
        if parameter in known:
            if key in found:
                raise EgemmaError(f"tensor {key} comes twice, with and without {_PREFIX!r} before its name")
            found[key] = official_axes(key, array, expected[parameter])
        elif parameter not in dropped:
            raise EgemmaError(f"expected the tensors of an EmbeddingGemma 2 checkpoint but got {name} too")
    return found


def _order(name: str, shape: Shape, expected: Shape) -> Shape | None:
    """The axes that make `shape`, in MLX's order, `expected`; None where it already is, or never will be."""
    for suffix, order in _TO_OFFICIAL.items():
        if name.endswith(suffix) and len(shape) == len(order) and shape != expected:
            return order if tuple(shape[axis] for axis in order) == expected else None
    return None


def _weight_of(name: str) -> str:
    """The name of the weight that a quantised layer's scales or biases go with; any other name as it is."""
    for suffix in _QUANTISED:
        if name.endswith(suffix):
            return name.removesuffix(suffix) + ".weight"
    return name
