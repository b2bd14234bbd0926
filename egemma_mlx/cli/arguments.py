"""Arguments that several commands take, and how an argument is read."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from egemma_mlx.errors import EgemmaError


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EgemmaError(f"{message} (see {self.prog} --help)")


def count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a positive integer but got {text!r}")
    return int(text)


SHARED: dict[str, dict[str, Any]] = {
    "--prompt-name": {"metavar": "NAME", "help": "one of the checkpoint's prompts (default for search: query)"},
    "--batch-tokens": {"type": count, "metavar": "N", "help": "most tokens of one forward: memory goes with it"},
    "--max-soft-tokens": {
        "type": int,
        "choices": (70, 140, 280, 560, 1120),
        "help": "of an image: its resolution, and most of its cost (default: the checkpoint's, 280)",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
    "--backend": {
        "choices": ("auto", "metal", "ops", "simulator"),
        "default": "auto",
        "help": "metal: this package's kernels; ops: MLX's own operations; simulator: the kernels on the CPU, slowly, "
        "with every check; auto: metal where there is an Apple GPU, else ops",
    },
    "--compute-precision": {
        "choices": ("float32", "bfloat16"),
        "default": "float32",
        "help": "of products with weights: float32 (default, exact) or bfloat16 (for GPUs with matrix units)",
    },
    "--model": {
        "metavar": "PATH_OR_REPO",
        "help": "a folder, a hub id or mini, the small stand-in in this package (default: $EGEMMA_MODEL, else "
        "google/embeddinggemma-2 if the hub's cache has it, else mini)",
    },
    "--revision": {"help": "branch, tag or commit of the hub repository"},
}


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add these of `SHARED`, in this order, which is that of `--help`."""
    for name in names:
        parser.add_argument(name, **SHARED[name])
