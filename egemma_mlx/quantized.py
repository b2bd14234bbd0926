"""Quantised checkpoints, as MLX's tools write them: which layers are packed, how, and into which tensors.

A row of `weight` becomes 32-bit words of `bits` a value, and each group of its values shares an entry of `scales`:

    affine         w = scale·q + bias      q unsigned; scale and bias are floats, in `scales` and `biases`
    mxfp8, mxfp4   w = 2^(scale − 127)·q   q a float of 8 bits (e4m3) or 4 (e2m1), in groups of 32
    nvfp4          w = scale·q             scale a float of 8 bits (e4m3), q of 4, in groups of 16

`config.json` has the numbers under "quantization", and under a layer's path there the numbers of that layer, or false.
A layer that has none of its own is packed where the checkpoint holds scales for it. mlx is imported by the functions
that call it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from egemma_mlx.errors import EgemmaError
from egemma_mlx.layouts import official_name

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

Shape = tuple[int, ...]

AFFINE = "affine"
PARTS = ("weight", "scales", "biases")
"""The tensors of a packed layer."""

# Group sizes and bits that MLX has, by mode; the first are its defaults.
_MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    AFFINE: ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp8": ((32,), (8,)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
}
_FLOATS = ("BF16", "F16", "F32")
_WEIGHT = ".weight"


class Stored(NamedTuple):
    """What a header should say of a tensor: its shape, and a dtype of these in safetensors' names."""

    shape: Shape
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Scheme:
    """How a layer is packed: `bits` a value, `group_size` values of a row to a scale."""

    group_size: int
    bits: int
    mode: str = AFFINE

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.mode} in groups of {self.group_size}"

    @classmethod
    def of(cls, source: str, group_size: Any = None, bits: Any = None, mode: Any = AFFINE) -> Scheme:
        """A scheme that MLX has; what is None is MLX's default for the mode.

        Raises:
            EgemmaError: MLX has no such; `source` says where it was asked for.
        """
        if mode not in list(_MODES):
            raise EgemmaError(f"{source}: expected mode {_either(_MODES)} but got {mode!r}")
        asked = {"group_size": group_size, "bits": bits}
        for (name, value), known in zip(asked.items(), _MODES[mode], strict=True):
            if value is None:
                asked[name] = known[0]
            elif type(value) is not int or value not in known:
                some = _either(sorted(known))
                raise EgemmaError(f"{source}: expected {name} {some} for mode {mode!r} but got {value!r}")
        return cls(**asked, mode=mode)

    def tensors(self, layer: str, shape: Shape) -> dict[str, Stored]:
        """Of a layer whose unpacked weight has this shape."""
        rows, width = shape
        scales = Stored((rows, width // self.group_size), _FLOATS if self.mode == AFFINE else ("U8",))
        packed = {layer + _WEIGHT: Stored((rows, width * self.bits // 32), ("U32",)), f"{layer}.scales": scales}
        return packed | ({f"{layer}.biases": scales} if self.mode == AFFINE else {})


@dataclass(frozen=True)
class Quantization:
    """`config["quantization"]`: the scheme of packed layers, and by path those that differ (None: not packed)."""

    default: Scheme
    overrides: Mapping[str, Scheme | None] = field(default_factory=dict)

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], source: str) -> Quantization | None:
        """Of a parsed `config.json`; None where it is not quantised.

        Raises:
            EgemmaError: what is said there is not MLX's, or no scheme that MLX has.
        """
        found, foreign = raw.get("quantization"), raw.get("quantization_config")
        if found is None and foreign is not None:
            method = foreign.get("quant_method") if isinstance(foreign, Mapping) else foreign
            raise EgemmaError(f"{source}: expected MLX's own quantisation but got quantization_config of {method!r}")
        if found is None:
            return None
        where = f"{source}: quantization"
        if not (isinstance(found, Mapping) and {"group_size", "bits"} <= found.keys()):
            raise EgemmaError(f"{where}: expected an object with group_size and bits but got {found!r}")
        default = _scheme(found, where)
        overrides: dict[str, Scheme | None] = {}
        for path, value in found.items():
            if isinstance(value, Mapping):  # what it leaves out is MLX's default, not this checkpoint's
                overrides[official_name(path)] = _scheme(value, f"{where}: {path}")
            elif isinstance(value, bool):
                overrides[official_name(path)] = default if value else None
        return cls(default, overrides)

    def scheme(self, layer: str, stored: Container[str]) -> Scheme | None:
        """How a layer of a checkpoint that has these tensors is packed; None: not at all."""
        # mlx-vlm leaves the tower's name out of some paths.
        for path in (layer, layer.removeprefix("language_model.")):
            if path in self.overrides:
                return self.overrides[path]
        return self.default if f"{layer}.scales" in stored else None


def packed_layers(
    quantization: Quantization | None, shapes: Mapping[str, Shape], stored: Container[str]
) -> dict[str, Scheme]:
    """The packed layers among those whose weights are in `shapes`, by path.

    Args:
        shapes: of unpacked tensors, by official names (`checkpoint.tensor_shapes`).
        stored: official names of the tensors that there are.
    """
    if quantization is None:
        return {}
    # What MLX's tools pack: linear layers and embeddings, whose weights have two axes.
    layers = (
        name.removesuffix(_WEIGHT) for name, shape in shapes.items() if name.endswith(_WEIGHT) and len(shape) == 2
    )
    schemes = ((layer, quantization.scheme(layer, stored)) for layer in layers)
    return {layer: scheme for layer, scheme in schemes if scheme is not None}


def expected_tensors(
    quantization: Quantization | None, shapes: Mapping[str, Shape], stored: Container[str]
) -> dict[str, Stored]:
    """What headers should say of the tensors in `shapes`; arguments as `packed_layers` has them.

    The tensors of a quantised checkpoint that are not packed may be float16 as well, which mlx-embeddings makes of them
    unless it is told otherwise.
    """
    layers = packed_layers(quantization, shapes, stored)
    floats = _FLOATS if quantization else ("BF16", "F32")
    expected: dict[str, Stored] = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(_WEIGHT)
        scheme = layers.get(layer) if name.endswith(_WEIGHT) else None
        expected |= scheme.tensors(layer, shape) if scheme else {name: Stored(shape, floats)}
    return expected


def pack(model: nn.Module, layers: Mapping[str, Scheme]) -> None:
    """Make these layers of a model ones that take packed tensors, whose values are then to be loaded."""
    import mlx.core as mx
    from mlx import nn

    nn.quantize(model, class_predicate=lambda path, _: asdict(layers[path]) if path in layers else False)
    # The new layers drew first weights, as in EmbeddingGemma2.
    mx.eval(mx.random.state)


def unpack(weights: dict[str, mx.array], layer: str, scheme: Scheme) -> mx.array:
    """Take a packed layer's tensors out of `weights`; its weight [M, K] float32, evaluated."""
    import mlx.core as mx

    names = {part: f"{layer}.{part}" for part in PARTS}
    with mx.stream(mx.cpu):  # which has every scheme
        weight = dequantize({part: weights.pop(name) for part, name in names.items() if name in weights}, scheme)
    mx.eval(weight)
    return weight


def dequantize(parts: Mapping[str, mx.array], scheme: Scheme) -> mx.array:
    """The values [..., K] float32 that packed rows stand for, exactly.

    (MLX computes in the dtype of the scales, and in bfloat16 rounds every value.)

    Args:
        parts: by the names in `PARTS`; without biases unless the mode is affine.
    """
    import mlx.core as mx

    wide = {
        part: rows.astype(mx.float32) if mx.issubdtype(rows.dtype, mx.floating) else rows
        for part, rows in parts.items()
    }
    options = asdict(scheme)
    return mx.dequantize(wide["weight"], wide["scales"], wide.get("biases"), **options, dtype=mx.float32)


def fault(scheme: Scheme, tolerance: float) -> str | None:
    """What is wrong with MLX's products of this scheme on the default device, if anything.

    They are compared with float64, for one row and for many, which are different kernels. So is the unpacking of rows.

    Args:
        tolerance: of the greatest value.
    """
    import mlx.core as mx
    import numpy as np

    generator = np.random.default_rng(0)
    x, w = (mx.array(generator.standard_normal((rows, 512)).astype(np.float32)) for rows in (64, 96))
    with mx.stream(mx.cpu):
        packed = mx.quantize(w, **asdict(scheme))
        unpacked = mx.dequantize(*packed, **asdict(scheme), dtype=mx.float32)
    weight, scales, *biases = packed
    exact = np.array(unpacked, np.float64)
    product = np.array(x, np.float64) @ exact.T
    try:
        options: dict[str, Any] = {"scales": scales, "biases": biases[0] if biases else None, **asdict(scheme)}
        found = [(mx.quantized_matmul(x[:rows], weight, **options), product[:rows]) for rows in (1, 64)]
        found.append((mx.dequantize(weight, **options, dtype=mx.float32), exact))
        errors = [np.abs(np.array(y, np.float64) - true).max() / np.abs(true).max() for y, true in found]
    except (RuntimeError, ValueError) as error:  # what MLX raises where it has no such kernel
        return str(error).strip().partition("\n")[0]
    worst = max(errors)
    return None if worst <= tolerance else f"off by {worst:.0e} of the greatest value"


def _scheme(raw: Mapping[str, Any], source: str) -> Scheme:
    return Scheme.of(source, **{key: raw[key] for key in ("group_size", "bits", "mode") if key in raw})


def _either(values: Any) -> str:
    *most, last = map(repr, values)
    return f"{', '.join(most)} or {last}" if most else last
