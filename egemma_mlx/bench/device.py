"""This device: forwards beside plain MLX operations and mlx-vlm, every kernel function beside the device's ceilings.

`egemma-mlx bench`, or `python -m egemma_mlx.bench device`. Contenders take turns in alternating order, medians are
reported, and a time covers ids on the host to vectors on the host. The report is Markdown, for an issue.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from egemma_mlx import checkpoint, doctor
from egemma_mlx.bench.ceilings import Ceilings, ceilings
from egemma_mlx.bench.contenders import Contender, Launches, first_forward, mlx_vlm, ours, text_model
from egemma_mlx.bench.functions import FunctionTime, function_times
from egemma_mlx.bench.workloads import STANDARD, Ids, Workload, workload
from egemma_mlx.cli import bench as command
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.backend import picked
from egemma_mlx.random_checkpoint import write_checkpoint

# The contender that others are measured against.
_PLAIN = "ops float32"
# What a CPU does in minutes.
_ON_CPU = ("1x16", "1x128", "32x128", "mixed:40")
# Rounds by default: a contender spends so many seconds on a workload, within these bounds.
_SECONDS, _FEWEST, _MOST = 10.0, 3, 20


@dataclass(frozen=True)
class Timing:
    """One contender on one workload.

    Attributes:
        ms: median of the rounds.
        peak_bytes: its weights, and the most that MLX's arrays took beyond those at rest.
        launches: of one forward.
    """

    workload: str
    contender: str
    tokens: int
    rounds: int
    ms: float
    tokens_per_second: float
    peak_bytes: int
    launches: Launches


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        machine: `doctor.facts`.
        contender: the first, which is what a user gets.
        functions: times of its kernel functions by workload.
        process_bytes: peak resident memory of the whole process.
        left_out: what was not run, a line each.
    """

    machine: dict[str, Any]
    model: str
    ceilings: Ceilings
    timings: list[Timing]
    contender: str
    functions: dict[str, list[FunctionTime]]
    process_bytes: int
    left_out: list[str]


def measure(arguments: argparse.Namespace) -> Report:
    """Run the benchmark that the command line asks for."""
    names = arguments.workloads or (_ON_CPU if on_cpu() else STANDARD)
    workloads = [workload(name) for name in names]
    with ExitStack() as stack:
        if arguments.model:
            folder = checkpoint.resolve(arguments.model)
        else:
            temporary = stack.enter_context(tempfile.TemporaryDirectory())
            folder = write_checkpoint(temporary, "full", modalities=("text",))
        contenders, missing = _contenders(folder, arguments)
        vocabulary = text_model(contenders[0]).config.text.vocab_size
        texts = {each: each.texts(vocabulary) for each in workloads}
        timed = [_timed(each, texts[each], contenders, arguments.rounds) for each in workloads]
        functions = {
            each.name: function_times(text_model(contenders[0]), first_forward(texts[each]))
            for each in _ends([each for each in workloads if not each.is_mixed])
        }
        return Report(
            machine=doctor.facts(),
            model=arguments.model or "random weights in the published sizes",
            ceilings=ceilings(),
            timings=[timing for timings, _ in timed for timing in timings],
            contender=contenders[0].name,
            functions=functions,
            process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            * (1 if sys.platform == "darwin" else 1024),
            left_out=[
                *missing,
                *(line for _, failed in timed for line in failed),
                *(_without(names) if arguments.workloads is None else []),
            ],
        )


def _contenders(folder: Path, arguments: argparse.Namespace) -> tuple[list[Contender], list[str]]:
    """Those that run here, the first being what a user gets, and a line for each that does not."""
    backend = picked(arguments.backend)
    precisions = arguments.compute_precision or (["float32"] if on_cpu() else ["float32", "bfloat16"])
    found = [ours(folder, backend, precision) for precision in precisions]
    if all(contender.name != _PLAIN for contender in found):
        found.append(ours(folder, "ops", "float32"))
    peer = mlx_vlm(folder)
    if isinstance(peer, str):
        return found, [peer]
    return [*found, peer], []


def _timed(
    load: Workload, texts: list[Ids], contenders: Sequence[Contender], rounds: int | None
) -> tuple[list[Timing], list[str]]:
    """The contenders' times on one workload, and a line for each that fails on it."""
    running, failed = [], []
    for contender in contenders:
        try:
            running.append((contender, *_warmed_up(contender, texts)))
        except Exception as error:  # most likely out of memory, which says nothing against the others
            failed.append(f"{load.name} by {contender.name} ({type(error).__name__}: {error})")
    slowest = max((spent for _, spent, _ in running), default=_SECONDS)
    rounds = rounds or max(_FEWEST, min(_MOST, int(_SECONDS / slowest)))
    times: list[list[float]] = [[] for _ in running]
    for number in range(rounds):
        turns = list(zip(running, times, strict=True))
        for (contender, _, _), spent in turns if number % 2 else turns[::-1]:
            spent.append(_seconds(contender, texts))
    timings = []
    for (contender, _, peak), spent in zip(running, times, strict=True):
        median = statistics.median(spent)
        print(f"{load.name}: {contender.name} {median * 1e3:,.1f} ms", file=sys.stderr)
        launches = contender.launches(first_forward(texts))
        speed = load.tokens / median
        timings.append(Timing(load.name, contender.name, load.tokens, rounds, median * 1e3, speed, peak, launches))
    return timings, failed


def _warmed_up(contender: Contender, texts: list[Ids]) -> tuple[float, int]:
    """Seconds of the second time, and the peak memory in it."""
    _seconds(contender, texts)  # compiles
    resting = mx.get_active_memory()
    mx.reset_peak_memory()
    spent = _seconds(contender, texts)
    return spent, contender.weight_bytes + mx.get_peak_memory() - resting


def _seconds(contender: Contender, texts: list[Ids]) -> float:
    start = time.perf_counter()
    contender.embed(texts)
    return time.perf_counter() - start


def _ends(workloads: list[Workload]) -> list[Workload]:
    """The smallest and the largest."""
    ordered = sorted(workloads, key=lambda each: each.tokens)
    return ordered[:1] + ordered[1:][-1:]


def _without(names: Sequence[str]) -> list[str]:
    left = [workload(name).name for name in STANDARD if name not in names]
    return [f"{', '.join(left)}: too long for a CPU (ask with --workloads)"] if left else []


# --- report ----------------------------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report as Markdown that reads as plain text too."""
    parts = [
        doctor.facts_table(report.machine),
        doctor.table(_ceiling_rows(report)),
        doctor.table(_timing_rows(report)),
    ]
    for name, times in report.functions.items():
        parts.append(
            f"One forward of {name}, {report.contender}, each kernel function alone:\n\n"
            + doctor.table(_function_rows(times, report.ceilings))
        )
    endings = [f"Peak resident memory of the process: {report.process_bytes / 1e6:,.0f} MB."]
    endings += [f"Left out: {line}." for line in report.left_out]
    return "\n".join([*parts, "\n".join(endings) + "\n"])


def _ceiling_rows(report: Report) -> list[tuple[str, ...]]:
    best = report.ceilings
    product = f"{best.side} × {best.side} matrices"
    rows: list[tuple[str, ...]] = [
        ("ceiling", "measured", "on"),
        ("float32 products", f"{best.float32_tflops:.3g} TFLOP/s", f"mx.matmul of {product}"),
        ("memory", f"{best.gbps:.3g} GB/s", "a large sum"),
        ("launch", f"{best.launch_us:.2g} µs", "a sum of one element that waits for the one before"),
        ("model", report.model, ""),
    ]
    if best.bfloat16_tflops is not None:
        rows.insert(2, ("bfloat16 products", f"{best.bfloat16_tflops:.3g} TFLOP/s", f"mx.matmul of {product}"))
    return rows


def _timing_rows(report: Report) -> list[tuple[str, ...]]:
    plain = {timing.workload: timing.ms for timing in report.timings if timing.contender == _PLAIN}
    head = ("workload", "contender", "ms", "tokens/s", "× ops", "kernels", "other operations", "peak MB", "rounds")
    return [
        head,
        *(
            (
                timing.workload,
                timing.contender,
                f"{timing.ms:,.1f}",
                f"{timing.tokens_per_second:,.0f}",
                f"{plain[timing.workload] / timing.ms:.2f}" if timing.workload in plain else "",
                str(timing.launches.custom),
                str(timing.launches.other),
                f"{timing.peak_bytes / 1e6:,.0f}",
                str(timing.rounds),
            )
            for timing in report.timings
        ),
    ]


def _function_rows(times: list[FunctionTime], best: Ceilings) -> list[tuple[str, ...]]:
    head = ("function", "arrays", "calls", "ms each", "share", "TFLOP/s", "of float32", "GB/s", "of memory")
    return [
        head,
        *(
            (
                each.function,
                each.shapes,
                str(each.calls),
                f"{each.ms:.3f}",
                f"{each.share:.0%}",
                "" if each.tflops is None else f"{each.tflops:.3g}",
                "" if each.tflops is None else f"{each.tflops / best.float32_tflops:.0%}",
                f"{each.gbps:.3g}",
                f"{each.gbps / best.gbps:.0%}",
            )
            for each in times
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    report = measure(arguments)
    print(json.dumps(asdict(report)) if arguments.json else as_text(report), end="\n" if arguments.json else "")
