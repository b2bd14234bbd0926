"""Write a quantised copy of a checkpoint, which mlx-vlm and mlx-embeddings load too.

The text model's layers are packed; images' and audio's towers, and all other files, stay as they are. What 8, 6 and 4
bits cost in precision is in the README.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from egemma_mlx.cli.arguments import add_shared, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a folder, a hub id or mini")
    parser.add_argument("target", type=Path, metavar="TARGET", help="new or empty folder")
    parser.add_argument("--bits", type=int, choices=(8, 6, 4), default=8, help="of a weight (default: 8)")
    parser.add_argument(
        "--mode",
        choices=("affine", "mxfp8"),
        default="affine",
        help="affine: a scale and an offset for each group of weights (default); mxfp8: floats of 8 bits",
    )
    parser.add_argument("--group-size", type=count, metavar="N", help="weights to a scale (default: 64, mxfp8 32)")
    add_shared(parser, "--revision")


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx.convert import convert

    folder = convert(
        arguments.source,
        arguments.target,
        bits=arguments.bits,
        mode=arguments.mode,
        group_size=arguments.group_size,
        revision=arguments.revision,
    )
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    print(f"{folder}: {arguments.bits}-bit {arguments.mode}, weights {size / 1e6:,.1f} MB")
