"""The `egemma-mlx` command. Nothing heavy is imported before a command runs: `--help` needs no MLX.

A command is a module here: its docstring is what `--help` says, `add_arguments` and `run` are the rest of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from egemma_mlx import __version__
from egemma_mlx.cli import bench, checkpoint, convert, doctor, embed, export, info, search
from egemma_mlx.cli.arguments import Parser
from egemma_mlx.cli.common import PROGRAM, say
from egemma_mlx.errors import EgemmaError

_COMMANDS = {
    "embed": embed,
    "search": search,
    "info": info,
    "doctor": doctor,
    "export": export,
    "bench": bench,
    "convert": convert,
    "checkpoint": checkpoint,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 when `doctor` finds a kernel wrong, 2 for an error (one line
    on stderr), 130 when interrupted."""
    # MLX gathers a hundred CUDA launches into a graph, which it has to make anew (2 ms, the GPU waits) where products
    # take clusters of thread blocks, as they do on Hopper outside float32.
    os.environ.setdefault("MLX_USE_CUDA_GRAPHS", "0")
    # Raises SystemExit, so that a partial output file is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(f"warning: {message}")
        try:
            arguments = _parser().parse_args(argv)
            code: int | None = arguments.run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read the output has had enough; the interpreter's own flush must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt:
            say("interrupted")
            return 130
        except EgemmaError as error:
            say(f"error: {error}")
            return 2
        except OSError as error:
            say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
            return 2
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Embeddings by EmbeddingGemma 2 on MLX.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        summary, _, details = (command.__doc__ or "").partition("\n")
        subparser = commands.add_parser(name, help=summary, description=f"{summary} {details}")
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
