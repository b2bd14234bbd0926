"""Whole encoders side by side: `python -m egemma_mlx.bench text`.

Every contender that is installed (this package, sentence-transformers, egemma2) embeds the same texts with the same
checkpoint on this machine. Each runs in a process of its own; rounds go through the contenders in alternating order,
and medians are reported, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from egemma_mlx import __version__
from egemma_mlx.bench import processes

Embed = Callable[[list[str]], Any]

_OURS = "egemma-mlx"

# name: token counts of its texts, rounds.
_WORKLOADS: dict[str, tuple[list[int], int]] = {
    "one query of 31 tokens": ([31], 15),
    "two documents of about 515": ([515, 516], 5),
    "32 texts of 3 to 610": ([3 + round(607 * (i / 31) ** 3.15) for i in range(32)], 3),
}


# --- contenders, each in a process of its own ------------------------------------------------------------------------


def _egemma_mlx(folder: str) -> Embed:
    from egemma_mlx.encoder import Encoder

    return Encoder(folder).encode


def _sentence_transformers(folder: str) -> Embed:
    import torch

    declare_torchvision_operators()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    encode: Embed = model.encode
    return encode


def _egemma2(folder: str) -> Embed:
    from egemma2 import Egemma2

    embed: Embed = Egemma2(model_dir=folder, device="cpu").embed
    return embed


_CONTENDERS: dict[str, Callable[[str], Embed]] = {
    _OURS: _egemma_mlx,
    "sentence-transformers": _sentence_transformers,
    "egemma2": _egemma2,
}


def declare_torchvision_operators() -> None:
    """Make PyPI's torchvision import beside a CPU build of torch.

    Its compiled half, built for CUDA, does not load there, and its Python half then trips over operators that nobody
    declared; declaring them is enough for whoever does not call them.
    """
    import torch

    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # an operator lives as long as its library object
        import torchvision  # noqa: F401


_KEPT: list[Any] = []


def _serve(name: str, folder: str) -> None:
    """Child process: the seconds that embedding a list of texts took."""

    def start() -> Callable[[list[str]], float]:
        embed = _CONTENDERS[name](folder)

        def seconds(texts: list[str]) -> float:
            begin = time.perf_counter()
            embed(texts)
            return time.perf_counter() - begin

        return seconds

    processes.serve(start)


# --- what is measured ------------------------------------------------------------------------------------------------


def _texts(folder: str, counts: Sequence[int]) -> list[str]:
    """English of so many tokens each: the Python language reference, from places of its own for every text."""
    from pydoc_data.topics import topics

    from egemma_mlx.config import Config
    from egemma_mlx.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder, Config.from_file(Path(folder, "config.json")))
    words = " ".join(" ".join(topics[key].split()) for key in sorted(topics)).replace("<|", "< |").split(" ")
    texts = []
    for index, count in enumerate(counts):
        start = 997 * index
        ids = tokenizer.ids([" ".join(words[start : start + count])], truncation=True).ids[0]
        texts.append(tokenizer.decode(ids[1 : count - 1]))
    return texts


def _compare(folder: str, names: Sequence[str], rounds: int | None) -> dict[str, dict[str, float]]:
    """Median seconds by workload and contender."""
    results: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        contenders = []
        for name in names:
            seconds = stack.enter_context(processes.served("text", "--serve", name, "--model", folder))
            if isinstance(seconds, str):
                print(f"{name} did not start: {seconds}", file=sys.stderr)
            else:
                contenders.append((name, seconds))
        corpora = {workload: _texts(folder, counts) for workload, (counts, _) in _WORKLOADS.items()}
        for _, seconds in contenders:
            for texts in corpora.values():  # all of them: what compiles does so after some work
                seconds(texts)
        for workload, (_, most) in _WORKLOADS.items():
            texts = corpora[workload]
            times: dict[str, list[float]] = {name: [] for name, _ in contenders}
            for number in range(rounds or most):
                for name, seconds in contenders if number % 2 else contenders[::-1]:
                    times[name].append(seconds(texts))
                    print(f"{workload}, round {number}: {name} {times[name][-1]:.3f} s", file=sys.stderr)
            results[workload] = {name: statistics.median(values) for name, values in times.items()}
    return results


def _profile(folder: str) -> dict[str, dict[str, float]]:
    """Share of a forward's time in each kernel function, every call evaluated on its own."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from egemma_mlx.kernels import OPS, fused
    from egemma_mlx.loading import load
    from egemma_mlx.packing import pack

    def arrays(tree: Any) -> list[mx.array]:
        return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            mx.eval(arrays([list(args), options]))
            start = time.perf_counter()
            result = function(*args, **options)
            mx.eval(arrays([result]))
            spent[name] += time.perf_counter() - start
            return result

        return run

    spent: dict[str, float] = defaultdict(float)
    model, tokenizer = load(folder, compiled=False)
    functions: dict[str, Any] = {name: timed(name, function) for name, function in OPS.functions().items()}
    # What is composed of them is timed by its parts.
    parts = fused.Parts(*(functions[name] for name in fused.Parts._fields))
    model.kernels = dataclasses.replace(OPS, **functions | fused.composed(parts))
    shares = {}
    for workload, (counts, _) in list(_WORKLOADS.items())[:2]:
        batch = pack(tokenizer.ids(_texts(folder, counts)).ids)
        mx.eval(model.pooled(batch))
        spent.clear()
        mx.eval(model.pooled(batch))
        ranked = sorted(spent.items(), key=lambda item: -item[1])
        shares[workload] = {name: seconds / sum(spent.values()) for name, seconds in ranked}
    return shares


_COLD_START = """
import json, sys, time
start = time.perf_counter()
import egemma_mlx
encoder = egemma_mlx.Encoder(sys.argv[1])
loaded = time.perf_counter()
encoder.encode_query("a red bicycle leaning on a wall")
print(json.dumps({"import and load": loaded - start, "first vector": time.perf_counter() - loaded}))
"""

_MEMORY = """
import json, resource, sys
import egemma_mlx
encoder = egemma_mlx.Encoder(sys.argv[1])
encoder.encode(json.load(sys.stdin))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _cold_start(folder: str, *, compiler: bool) -> dict[str, float]:
    """Seconds of a first query in a new process with an empty TMPDIR, where MLX keeps what g++ made."""
    with tempfile.TemporaryDirectory() as empty:
        environment = os.environ | {"TMPDIR": empty} | ({} if compiler else {"PATH": empty})
        times: dict[str, float] = json.loads(_python(_COLD_START, folder, env=environment))
        return times | {"total": sum(times.values())}


def _peak_megabytes(folder: str) -> float:
    """Peak resident memory of loading and embedding the mixed batch."""
    texts = _texts(folder, list(_WORKLOADS.values())[-1][0])
    scale = 1e6 if sys.platform == "darwin" else 1e3  # ru_maxrss: bytes there, KiB here
    return float(_python(_MEMORY, folder, input=json.dumps(texts))) / scale


def _python(code: str, *arguments: str, **options: Any) -> str:
    command = [sys.executable, "-c", code, *arguments]
    output: str = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout
    return output


# --- report ----------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The text model against its peers, cold start and memory."""
    with ExitStack() as stack:
        folder = arguments.model or _random_checkpoint(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [name for name in _CONTENDERS if name == _OURS or _version(name)]
        return {
            "machine": _machine(),
            "versions": {_OURS: __version__} | {name: _version(name) for name in (*names[1:], "mlx", "torch")},
            "seconds": _compare(folder, names, arguments.rounds),
            "shares": _profile(folder),
            "cold start": {
                "with a C++ compiler": _cold_start(folder, compiler=True),
                "without": _cold_start(folder, compiler=False),
            },
            "peak MB": _peak_megabytes(folder),
        }


def _print_text(report: dict[str, Any]) -> None:
    names = list(next(iter(report["seconds"].values())))
    print(f"{report['machine']}; {', '.join(f'{name} {found}' for name, found in report['versions'].items() if found)}")
    print(f"\n| median seconds | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for workload, seconds in report["seconds"].items():
        cells = [f"{seconds[name]:.3f}" + _ratio(seconds, name) for name in names]
        print(f"| {workload} | {' | '.join(cells)} |")
    for workload, shares in report["shares"].items():
        print(f"\nWhere {workload} goes: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    for kind, times in report["cold start"].items():
        print(f"\nCold start {kind}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
    print(f"\nPeak resident memory, loading and the 32 texts: {report['peak MB']:,.0f} MB")


def _ratio(seconds: dict[str, float], name: str) -> str:
    return "" if name == _OURS else f" ({seconds[name] / seconds[_OURS]:.2f}×)"


def _random_checkpoint(folder: str) -> str:
    from egemma_mlx.random_checkpoint import write_checkpoint

    return str(write_checkpoint(folder, "full", modalities=("text",)))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _machine() -> str:
    """Model of the processor and number of cores."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    elif shutil.which("sysctl"):
        name = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint folder (default: a random one of full size)")
    parser.add_argument("--rounds", type=int, help="rounds of every workload (default: 15, 5 and 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", choices=_CONTENDERS, help=argparse.SUPPRESS)  # a contender's process, on --model


def run(arguments: argparse.Namespace) -> None:
    if arguments.serve:
        _serve(arguments.serve, arguments.model)
        return
    report = measure(arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        _print_text(report)
