"""Show a checkpoint's configuration, towers and sizes, and what would run it.

No weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from egemma_mlx import __version__
from egemma_mlx.cli.arguments import add_shared

if TYPE_CHECKING:
    from egemma_mlx.config import LayerConfig, VisionConfig
    from egemma_mlx.quantized import Quantization


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "--json", "--backend", "--model", "--revision")


def run(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict
    from importlib.metadata import version

    from egemma_mlx import blas, checkpoint
    from egemma_mlx.config import Config
    from egemma_mlx.kernels.approx import on_cpu
    from egemma_mlx.kernels.backend import picked
    from egemma_mlx.tokenizer import Tokenizer

    folder = checkpoint.resolve(arguments.model, arguments.revision)
    config = Config.from_file(folder / "config.json")
    tokenizer = Tokenizer.from_folder(folder, config)
    library, device = blas.current(), "cpu" if on_cpu() else "gpu"
    facts: dict[str, Any] = {
        "version": __version__,
        "model": str(folder),
        "config": asdict(config),
        "parameters": checkpoint.tower_sizes(folder, config),
        "files": {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))},
        "vocabulary": len(tokenizer),
        "max_tokens": tokenizer.max_length,
        "prompts": dict(tokenizer.prompts),
        "default_prompt_name": tokenizer.default_prompt_name,
        "mlx": version("mlx"),
        "device": device,
        "kernels": picked(arguments.backend),
        "blas": asdict(library),
    }
    if arguments.json:
        print(json.dumps(facts))
        return
    text = config.text
    rows = [
        ("model", str(folder)),
        ("files", _listed(f"{name} {size / 1e6:,.1f} MB" for name, size in facts["files"].items())),
        ("parameters", _listed(f"{tower} {count:,}" for tower, count in facts["parameters"].items())),
        ("quantised", _quantised(config.quantization)),
        ("text", f"{text.num_hidden_layers} layers of width {text.hidden_size}, vectors of {text.embedding_dim}"),
        *(("attention", _attention(layer, count)) for layer, count in Counter(text.layers).items()),
        ("images", _tower(config.vision)),
        ("tokens", f"at most {tokenizer.max_length:,} a text, vocabulary {len(tokenizer):,}"),
        ("prompts", f"{_listed(tokenizer.prompts)} (default: {tokenizer.default_prompt_name or 'none'})"),
        ("runs on", f"MLX {version('mlx')} on the {device}, kernels {facts['kernels']}"),
        ("BLAS", f"{library.name}, {library.path or 'no library loaded'} ({library.reason})"),
    ]
    sys.stdout.writelines(f"{name:<12}{value}\n" for name, value in rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _quantised(quantization: Quantization | None) -> str:
    if quantization is None:
        return "no"
    own = Counter(str(scheme or "not") for scheme in quantization.overrides.values())
    return _listed([str(quantization.default), *(f"{count} layers {scheme}" for scheme, count in own.items())])


def _tower(vision: VisionConfig | None) -> str:
    if vision is None:
        return "none: this checkpoint has no such tower"
    side = vision.patch_size * vision.pooling_kernel_size
    return (
        f"{vision.num_hidden_layers} layers of width {vision.hidden_size}, {vision.num_attention_heads} heads of "
        f"{vision.head_dim}; a token for {side}×{side} pixels"
    )


def _attention(layer: LayerConfig, count: int) -> str:
    reach = "full" if layer.window is None else f"within ±{layer.window} tokens"
    return f"{count} layers {reach}: {layer.heads} heads over {layer.kv_heads} of {layer.head_dim}"
