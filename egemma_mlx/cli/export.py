"""Write the compiled forward, weights included, as a file for MLX in Swift, C++ and Python.

The function in it takes int32 arrays tokens [N], positions [N] (-1: no token) and segments [S, 2] (start, length), and
returns unit vectors [S, dim]. The file is complete or absent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from egemma_mlx.cli.arguments import add_shared, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT.mlxfn")
    parser.add_argument("--tokens", type=count, metavar="N", required=True, help="rows of the packed batch")
    parser.add_argument("--segments", type=count, metavar="S", default=1, help="texts of the batch (default: 1)")
    parser.add_argument(
        "--backend",
        choices=("metal", "ops"),
        default="metal",
        help="metal (default): this package's kernels, for Apple GPUs; ops: MLX's own operations, for this machine",
    )
    add_shared(parser, "--model", "--revision")


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx import checkpoint
    from egemma_mlx.export import export_forward

    folder = checkpoint.resolve(arguments.model, arguments.revision)
    out, tokens, segments = arguments.out, arguments.tokens, arguments.segments
    export_forward(folder, out, tokens=tokens, segments=segments, backend=arguments.backend)
    size = out.stat().st_size / 1e6
    print(f"{out}: tokens {tokens}, segments {segments}, kernels {arguments.backend}, {size:,.1f} MB")
