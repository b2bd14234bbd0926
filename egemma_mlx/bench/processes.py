"""Contenders in processes of their own: one's threads, allocator and BLAS are not another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from egemma_mlx.errors import EgemmaError

# What a shell may have set for another program would slow those contenders alone that run on OpenBLAS.
_OPENBLAS_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def serve(start: Callable[[], Callable[[Any], Any]]) -> None:
    """Child process: a JSON question a line in, its JSON answer a line out, until there are no more. What libraries
    print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    answer = start()
    answers.write("null\n")  # ready
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")


@contextmanager
def served(*arguments: str) -> Iterator[Callable[[Any], Any] | str]:
    """The answers of `python -m egemma_mlx.bench …`, which calls `serve`; or, where it does not start, the last line
    that it wrote.

    Raises:
        EgemmaError: from a question that ends the process.
    """
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def last_line() -> str:
            log.seek(0)
            return (log.read().strip().splitlines() or ["it wrote nothing"])[-1]

        def ask(question: Any) -> Any:
            try:
                stdin.write(json.dumps(question) + "\n")
                stdin.flush()
                return json.loads(stdout.readline())
            except (BrokenPipeError, json.JSONDecodeError):
                raise EgemmaError(f"{' '.join(arguments)}: the process ended: {last_line()}") from None

        yield ask if stdout.readline() else last_line()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "egemma_mlx.bench", *arguments]


def environment() -> dict[str, str]:
    """This process's, for a contender."""
    return {name: value for name, value in os.environ.items() if name not in _OPENBLAS_TUNING}
