"""Benchmarks that anybody can run: `python -m egemma_mlx.bench text`, `… device`, …"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from egemma_mlx.bench import cost, device, image, kernels, precision, quantized, text

_BENCHMARKS = {
    "text": text,
    "image": image,
    "kernels": kernels,
    "cost": cost,
    "device": device,
    "precision": precision,
    "quantized": quantized,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m egemma_mlx.bench")
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for name, benchmark in _BENCHMARKS.items():
        summary = (benchmark.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        benchmark.add_arguments(command)
        command.set_defaults(run=benchmark.run)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
