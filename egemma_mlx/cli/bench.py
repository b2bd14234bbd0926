"""Measure this device: forwards, kernels, memory.

Beside plain MLX operations, the device's ceilings and, where it is installed, mlx-vlm. It takes minutes; the output is
Markdown, for an issue.
"""

from __future__ import annotations

import argparse

from egemma_mlx.cli.arguments import add_shared, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help="32x512 (texts, tokens of each), mixed (1,000 texts of 3 to 512) or mixed:40 (texts)",
    )
    parser.add_argument("--rounds", type=count, metavar="N", help="default: 3 to 20, for ten seconds each")
    parser.add_argument(
        "--backend",
        choices=("auto", "metal", "ops"),
        default="auto",
        help="measured beside ops, MLX's own operations; auto: metal where there is an Apple GPU, else ops",
    )
    parser.add_argument(
        "--compute-precision",
        choices=("float32", "bfloat16"),
        nargs="+",
        help="of this package (default: both; on a CPU float32)",
    )
    parser.add_argument(
        "--model", metavar="PATH_OR_REPO", help="checkpoint (default: random weights in the published sizes)"
    )
    add_shared(parser, "--json")


def run(arguments: argparse.Namespace) -> None:
    from egemma_mlx.bench import device

    device.run(arguments)
