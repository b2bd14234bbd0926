"""From a folder or a hub id to a model and its tokenizer, and the one-call `generate`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx

from egemma_mlx import blas, checkpoint, quantized
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.heap import keep_pages
from egemma_mlx.kernels import Kernels
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.backend import Backend, select
from egemma_mlx.kernels.bfloat16 import bfloat16
from egemma_mlx.models.encoder import EmbeddingGemma2, EmbeddingOutput
from egemma_mlx.quantized import Scheme
from egemma_mlx.tokenizer import Tokenizer

Precision = Literal["float32", "bfloat16"]

# Few rows of these are read.
_EMBEDDINGS = ("language_model.embed_tokens.", "vision_tower.patch_embedder.position_embedding_table")
_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""What products may be off by, of the greatest value."""


def load(
    path_or_hf_repo: str | Path | None = None,
    *,
    revision: str | None = None,
    modalities: Iterable[str] = ("text",),
    precision: Precision = "float32",
    backend: Backend = "auto",
    compiled: bool | None = None,
) -> tuple[EmbeddingGemma2, Tokenizer]:
    """Load a checkpoint, which may be quantised (`egemma_mlx.quantized`).

    Quantised layers stay packed and go through `mx.quantized_matmul`, in float32, beside the same kernels as others.
    Where MLX does that badly they are unpacked when loaded, which a warning says: with plain operations on a CPU, and
    on a device where a check of its products fails. An embedding table stays packed there too.

    Args:
        path_or_hf_repo: a folder, a hub id, or "mini", the small stand-in in this package; None: $EGEMMA_MODEL, else
            google/embeddinggemma-2 where the hub's local cache has it, else "mini", with a line on stderr.
        revision: of the hub repository.
        modalities: the towers to load beside the text model: ("text", "image") for images.
        precision: of products with weights: "float32", or "bfloat16" for operands and results (`kernels/bfloat16.py`:
            faster on GPUs with matrix units, half the memory on the CPU). All else is float32. "float32" also keeps
            TF32 out of products (`MLX_ENABLE_TF32=0`, unless that variable is set already), with a warning if it is
            too late for that; with "bfloat16" MLX may use it for those that stay in float32.
        backend: what the kernel functions run on: "metal", the package's own kernels, each checked against float64
            first and replaced by plain MLX operations, with a warning, where it fails; "ops", plain MLX operations;
            "simulator", the Metal kernels on the CPU with every access checked, a thousand times slower; "auto",
            metal where there is a Metal GPU, else ops.
        compiled: whether the whole forward is compiled; None: on a GPU.

    Returns:
        The model with its weights evaluated, and the tokenizer.

    Raises:
        EgemmaError: the checkpoint cannot be had, or a file in it is not what it should be.
    """
    _check_precision(precision)
    if precision == "float32":
        exact_products()
    if on_cpu():
        blas.warn_if_slow()
        keep_pages()
    folder = checkpoint.resolve(path_or_hf_repo, revision)
    config = Config.from_file(folder / "config.json")
    towers = checkpoint.check_modalities(config, modalities)
    if "audio" in towers:
        raise EgemmaError("modalities: audio is not in this version; expected some of text, image")
    tokenizer = Tokenizer.from_folder(folder, config)
    kernels = select(backend, config.text, config.vision if "image" in towers else None)
    return load_model(folder, config, kernels, compiled, precision, towers), tokenizer


def load_model(
    folder: Path,
    config: Config,
    kernels: Kernels,
    compiled: bool | None = None,
    precision: Precision = "float32",
    modalities: Iterable[str] = ("text",),
) -> EmbeddingGemma2:
    """The model of a checkpoint folder over a set of kernel functions, its weights evaluated."""
    rounded = precision == "bfloat16"
    model = EmbeddingGemma2(config, bfloat16(kernels) if rounded else kernels, compiled, modalities)
    weights = checkpoint.load_tensors(folder, config, modalities)
    shapes = checkpoint.tensor_shapes(config, modalities)
    layers = _packed(weights, quantized.packed_layers(config.quantization, shapes, weights), kernels, precision)
    if layers:
        quantized.pack(model, layers)
    dtype = mx.bfloat16 if rounded else mx.float32 if kernels.name == "ops" else None
    model.load_weights([(name, resident(name, weights.pop(name), dtype)) for name in list(weights)])
    mx.eval(model.parameters())
    return model


def generate(
    model: EmbeddingGemma2,
    tokenizer: Tokenizer,
    texts: str | Sequence[str],
    images: None = None,
    max_length: int = 512,
    padding: bool = True,
    truncation: bool = True,
    **kwargs: Any,
) -> EmbeddingOutput:
    """Embed texts in one call, with the arguments of `mlx_embeddings.generate`.

    Texts longer than `max_length` are cut with EOS kept, and one warning says how many were.

    Args:
        kwargs: passed to the model; `resize_shape`, which is about images, is ignored.

    Returns:
        The model's output, lazy, one row a text.
    """
    if images is not None:
        raise EgemmaError(
            '[generate] expected images=None: Encoder(..., modalities=("text", "image")).encode embeds images'
        )
    kwargs.pop("resize_shape", None)
    inputs = tokenizer(
        [texts] if isinstance(texts, str) else texts,
        padding=padding,
        truncation=truncation,
        max_length=min(max_length, tokenizer.max_length) if truncation else None,
        return_tensors="mlx",
    )
    return model(**inputs, **kwargs)


def _check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        reason = " (float16 is refused because the residual stream overflows it)" if precision == "float16" else ""
        raise EgemmaError(
            f"expected precision {' or '.join(map(repr, get_args(Precision)))} but got {precision!r}{reason}"
        )


def _packed(
    weights: dict[str, mx.array], layers: dict[str, Scheme], kernels: Kernels, precision: Precision
) -> dict[str, Scheme]:
    """Unpack what is better not multiplied packed here; the layers that stay packed."""
    if any(scheme.bits <= 4 for scheme in layers.values()):
        warnings.warn(
            "this checkpoint has weights of 4 bits or fewer: cosines with the float32 vectors fall to 0.93, where 8 "
            "bits keep 0.9997 (measured on mini)",
            UserWarning,
            stacklevel=4,
        )
    if slow := kernels.name == "ops" and on_cpu():
        reasons = dict.fromkeys(layers.values(), "on a CPU MLX multiplies packed ones 15 to 70 times slower")
    else:
        faults = {scheme: quantized.fault(scheme, _TOLERANCE[precision]) for scheme in set(layers.values())}
        reasons = {scheme: f"MLX's products of them fail here: {fault}" for scheme, fault in faults.items() if fault}
    unpacked = {
        layer: scheme
        for layer, scheme in layers.items()
        if scheme in reasons and not (slow and f"{layer}.".startswith(_EMBEDDINGS))
    }
    for layer, scheme in unpacked.items():
        weights[f"{layer}.weight"] = quantized.unpack(weights, layer, scheme)
    for scheme in dict.fromkeys(unpacked.values()):
        warnings.warn(f"weights of {scheme} are unpacked: {reasons[scheme]}", RuntimeWarning, stacklevel=4)
    return {layer: scheme for layer, scheme in layers.items() if layer not in unpacked}


def resident(name: str, weight: mx.array, dtype: mx.Dtype | None) -> mx.array:
    """A weight as the kernels keep it: as stored (None) where they widen it in registers; float32 for plain operations,
    where widening at every call costs more than a short query's product; bfloat16 where they would round it. The
    embedding tables stay as they are; so do vectors and scalars, no operands of a product. Scales and biases of packed
    weights are float32, as their products are."""
    if name.startswith(_EMBEDDINGS) or not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    if name.endswith((".scales", ".biases")):
        dtype = mx.float32
    elif dtype is None or (dtype == mx.bfloat16 and weight.ndim < 2):
        dtype = mx.float32 if weight.dtype == mx.float16 else weight.dtype  # kernels take no float16
    resident = weight.astype(dtype)
    mx.eval(resident)
    return resident


def exact_products() -> None:
    """Keep TF32 out of float32 products; MLX reads the variable at its first product on a GPU."""
    if os.environ.setdefault("MLX_ENABLE_TF32", "0") != "0" or on_cpu():
        return
    # 1 + 2⁻¹² is a float32 that TF32 rounds to 1. A square large enough to take the matrix units.
    probe = mx.full((256, 256), 1 + 2.0**-12)
    if (probe @ mx.eye(256))[0, 0].item() == 1.0:
        warnings.warn(
            "float32 products run in TF32: something multiplied matrices before egemma_mlx.load. "
            "Set MLX_ENABLE_TF32=0, or load the model first.",
            RuntimeWarning,
            stacklevel=3,
        )
