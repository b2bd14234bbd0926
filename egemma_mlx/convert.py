"""A quantised copy of a checkpoint, in the layout that mlx-embeddings, mlx-vlm and this package load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from egemma_mlx import checkpoint
from egemma_mlx.config import Config, read_json_object
from egemma_mlx.errors import EgemmaError
from egemma_mlx.quantized import AFFINE, PARTS, Scheme

# What is packed: the towers stay as they are stored, as with mlx-vlm's converter.
_TEXT = "language_model."


def convert(
    source: str | Path | None,
    target: str | Path,
    *,
    bits: int = 8,
    mode: str = AFFINE,
    group_size: int | None = None,
    revision: str | None = None,
) -> Path:
    """Write a checkpoint whose text model is packed: its linear layers and its embedding table.

    Layers whose width is no multiple of the group size stay as they are; so do the other towers, and every other file
    of the folder is copied.

    Args:
        source: as in `load`; unquantised.
        target: a new or empty folder, which is complete or absent.
        bits: a value: 8, 6 or 4 with "affine", 8 with "mxfp8".
        mode: "affine" or "mxfp8".
        group_size: values to a scale; None: 64 with "affine", 32 with "mxfp8".

    Returns:
        `target`.

    Raises:
        EgemmaError: a scheme that is none of these; a source that is not a checkpoint, is quantised, or has no layer of
            such a width; a target that is in use, inside the source, or cannot be written.
    """
    if mode not in (AFFINE, "mxfp8") or bits not in (8, 6, 4):
        raise EgemmaError(f"convert: expected 8, 6 or 4 bits of 'affine' or 8 of 'mxfp8' but got {bits} of {mode!r}")
    scheme = Scheme.of("convert", group_size, bits, mode)
    folder, target = checkpoint.resolve(source, revision), Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise EgemmaError(f"{target}: expected a new or empty folder")
    if target.resolve().is_relative_to(folder.resolve()):
        raise EgemmaError(f"{target}: expected a folder outside of {folder}, which is copied")
    config = Config.from_file(folder / "config.json")
    if config.quantization is not None:
        raise EgemmaError(f"{folder}: expected an unquantised checkpoint but got {config.quantization.default}")
    towers = [name for name, tower in (("image", config.vision), ("audio", config.audio)) if tower is not None]
    weights = checkpoint.load_tensors(folder, config, towers)
    packed = _packed(weights, scheme)
    if packed.keys() == weights.keys():
        raise EgemmaError(f"{folder}: expected layers with a multiple of {scheme.group_size} inputs but got none")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as beside:
            made = Path(beside) / target.name
            shutil.copytree(folder, made, ignore=partial(_left_out, folder))
            mx.save_safetensors(str(made / checkpoint.WEIGHTS_FILE), packed, metadata={"format": "mlx"})
            (made / "config.json").write_text(json.dumps(_described(folder, scheme), indent=2), encoding="utf-8")
            made.rename(target)
    except (OSError, RuntimeError) as error:  # MLX's own file writer raises the latter
        raise EgemmaError(f"{target}: cannot be written ({error})") from error
    return target


def _packed(weights: Mapping[str, mx.array], scheme: Scheme) -> dict[str, mx.array]:
    """The tensors with those of the text model's layers packed."""
    packed: dict[str, mx.array] = {}
    for name, weight in weights.items():
        is_layer = name.startswith(_TEXT) and name.endswith(".weight") and weight.ndim == 2
        if not is_layer or weight.shape[1] % scheme.group_size:
            packed[name] = weight
            continue
        # Widened for float32 scales: rounded to bfloat16 they would double the error of 8 bits, but not of fewer.
        parts = mx.quantize(weight.astype(mx.float32) if scheme.bits == 8 else weight, **asdict(scheme))
        names = [name.removesuffix("weight") + part for part in PARTS]
        packed |= zip(names, parts, strict=False)
    return packed


def _described(folder: Path, scheme: Scheme) -> dict[str, Any]:
    """The folder's `config.json` with the scheme in it, under both names that tools read."""
    # mlx-embeddings reads into a section without asking whether it is null.
    raw = {key: value for key, value in read_json_object(folder / "config.json").items() if value is not None}
    return {**raw, "quantization": asdict(scheme), "quantization_config": asdict(scheme)}


def _left_out(folder: Path, directory: str, names: list[str]) -> set[str]:
    """What is written anew, and what a version control or a downloader keeps beside a checkpoint."""
    written = [name for name in names if name == "config.json" or ".safetensors" in Path(name).suffixes]
    return {name for name in names if name.startswith(".")} | set(written if Path(directory) == folder else ())
