"""Write a random checkpoint in the official layout, for tests and benchmarks.

Its vectors mean nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="new or empty folder")
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="full: the published shapes, 1.5 GB")
    parser.add_argument(
        "--modalities", nargs="+", choices=("text", "image", "audio"), default=("text", "image", "audio")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx.random_checkpoint import write_checkpoint

    folder = write_checkpoint(
        arguments.out, arguments.size, modalities=arguments.modalities, seed=arguments.seed, dtype=arguments.dtype
    )
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {arguments.size} random checkpoint, {size / 1e6:,.1f} MB")
