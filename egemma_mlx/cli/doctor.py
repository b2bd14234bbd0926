"""Show what this machine is, and check the kernels on it.

Every Metal kernel runs once and is compared with float64; the exit code is 1 when one fails. The output is Markdown,
for an issue.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from egemma_mlx.cli.arguments import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulator", action="store_true", help="run the kernels on the CPU, without an Apple GPU")
    parser.add_argument(
        "--dump-msl", type=Path, metavar="DIR", help="write the source of every kernel into a new folder"
    )
    add_shared(parser, "--json")
    parser.add_argument(
        "--model", metavar="PATH_OR_REPO", help="check at its widths (default: those of embeddinggemma-2)"
    )
    add_shared(parser, "--revision")


def run(arguments: argparse.Namespace) -> int:
    from egemma_mlx import checkpoint
    from egemma_mlx import doctor as report
    from egemma_mlx.config import Config
    from egemma_mlx.kernels.selfcheck import PUBLISHED, Widths

    widths = PUBLISHED
    if arguments.model is not None:
        folder = checkpoint.resolve(arguments.model, arguments.revision)
        config = Config.from_file(folder / "config.json")
        widths = Widths.of(config.text, config.vision)
    dump: Path | None = arguments.dump_msl
    files = [] if dump is None else report.dump_msl(dump, widths)
    machine, examined = report.facts(), report.examine(widths, simulator=arguments.simulator)
    if arguments.json:
        print(json.dumps(report.as_json(machine, examined, files)))
    else:
        print(report.as_text(machine, examined), end="")
        if dump is not None:
            print(f"{len(files)} kernels are in {dump}. Apple's compiler reads them, where Xcode is, with")
            print(f"    {report.compile_command(dump)}")
    return int(examined is not None and any(verdict.problem for verdict in examined[1]))
