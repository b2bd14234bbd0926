"""One image beside transformers in float32, and the memory of many: `python -m egemma_mlx.bench image`.

A picture of 768×768 pixels, 2,304 patches within the default budget, goes from its pixels through the vision tower to
soft tokens, and from a JPEG in memory to a unit vector. Each contender runs in a process of its own; rounds go through
them in alternating order, medians are reported, and beside them how far apart the results are, as rows of length 1: the
same was timed.

`--memory` measures memory instead: a process each embeds so many images of several shapes, and what it takes at most
beyond its weights, their pixels and their soft tokens is reported.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from egemma_mlx import checkpoint, doctor
from egemma_mlx.bench import processes
from egemma_mlx.bench.text import declare_torchvision_operators
from egemma_mlx.config import Config
from egemma_mlx.media.image import BUDGETS, ImageProcessor, Patches
from egemma_mlx.random_checkpoint import write_checkpoint

_OURS, _PEER = "egemma-mlx", "transformers"
_MODALITIES = ("text", "image")
_ROUNDS, _BUDGET = 6, 280

_SIDE = 768
# Widths and heights whose memory is measured, in turn; of 280 soft tokens they have 2,268 to 2,520 patches.
_SHAPES = ((1024, 768), (768, 1024), (960, 640), (640, 960), (1280, 720), (720, 1280), (768, 768))

# What is timed: a contender has a function for each, of patches and of a JPEG.
_SOFT_TOKENS, _VECTOR = "pixels to soft tokens", "JPEG to unit vector"
Contender = dict[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Timing:
    """One stage.

    Attributes:
        seconds: medians by contender.
        difference: the largest between the two's results, as rows of length 1; None for one contender.
    """

    stage: str
    rounds: int
    seconds: dict[str, float]
    difference: float | None


@dataclass(frozen=True)
class Memory:
    """One batch of images.

    Attributes:
        soft_bytes: of the batch's soft tokens, which the others leave out.
        mlx_bytes: the most that MLX's arrays took beyond the weights.
        resident_bytes: the most that was resident beyond what was before; None where the system does not say.
    """

    images: int
    patches: int
    seconds: float
    soft_bytes: int
    mlx_bytes: int
    resident_bytes: int | None


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        machine: `doctor.facts`.
        max_soft_tokens: of an image.
        versions: of transformers and torch, where they ran.
        left_out: what was not run, a line each.
    """

    machine: dict[str, Any]
    model: str
    max_soft_tokens: int
    versions: dict[str, str]
    timings: list[Timing]
    memory: list[Memory]
    left_out: list[str]


# --- contenders ------------------------------------------------------------------------------------------------------


def _egemma_mlx(folder: str, budget: int) -> Contender:
    from egemma_mlx.encoder import Encoder

    encoder = Encoder(folder, modalities=_MODALITIES)
    return {
        _SOFT_TOKENS: lambda patches: np.array(encoder.model.embed_images([patches])),
        _VECTOR: lambda jpeg: encoder.encode(jpeg, max_soft_tokens=budget),
    }


def _transformers(folder: str, budget: int) -> Contender:
    import torch
    from PIL import Image

    if importlib.util.find_spec("torchvision") is not None:
        declare_torchvision_operators()  # before any of transformers' models is imported
    from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2Model

    # Attention is sdpa, the default.
    model = EmbeddingGemma2Model.from_pretrained(folder, dtype=torch.float32).eval()
    process = _transformers_processor(folder, budget)

    def soft_tokens(patches: Patches) -> Any:
        pixels, positions = (torch.from_numpy(array)[None] for array in patches)
        with torch.inference_mode():
            (soft,) = model.get_image_features(pixels, positions.long()).pooler_output
        return soft.numpy()

    def vector(jpeg: bytes) -> Any:
        arguments = process(Image.open(io.BytesIO(jpeg)))
        with torch.inference_mode():
            states = model(**arguments).last_hidden_state[0]
            return torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy()

    return {_SOFT_TOKENS: soft_tokens, _VECTOR: vector}


def _transformers_processor(folder: str, budget: int) -> Callable[[Any], dict[str, Any]]:
    """PIL image → the model's arguments: the checkpoint's processor, or without torchvision, which that one needs for
    videos, the Pillow image processor and the same ids."""
    import torch

    if importlib.util.find_spec("torchvision") is not None:
        from transformers import AutoProcessor

        process = AutoProcessor.from_pretrained(folder)
        return lambda image: dict(process(images=image, max_soft_tokens=budget, return_tensors="pt"))

    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    images = Gemma4ImageProcessorPil(max_soft_tokens=budget)
    config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    bos, eos = (config["text_config"][key] for key in ("bos_token_id", "eos_token_id"))
    image_token, first, last = (config[key] for key in ("image_token_id", "boi_token_id", "eoi_token_id"))

    def arguments(image: Any) -> dict[str, Any]:
        found = dict(images(image, return_tensors="pt"))
        count = int(found.pop("num_soft_tokens_per_image")[0])
        return {"input_ids": torch.tensor([[bos, first, *[image_token] * count, last, eos]]), **found}

    return arguments


_CONTENDERS = {_OURS: _egemma_mlx, _PEER: _transformers}


def _serve(name: str, folder: str, budget: int) -> None:
    """Child process: for a stage and a file, the seconds that the stage took; its result is in the file."""

    def start() -> Callable[[Any], float]:
        contender, jpeg = _CONTENDERS[name](folder, budget), _picture()
        inputs = {_SOFT_TOKENS: _processor(folder, budget)(jpeg), _VECTOR: jpeg}

        def answer(question: Any) -> float:
            stage, file = question
            begin = time.perf_counter()
            result = contender[stage](inputs[stage])
            seconds = time.perf_counter() - begin
            np.save(file, result)
            return seconds

        return answer

    processes.serve(start)


def _picture() -> bytes:
    """A JPEG of blurred colours, the same in every process."""
    from PIL import Image

    stream, colors = io.BytesIO(), np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    Image.fromarray(colors).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _processor(folder: str, budget: int) -> ImageProcessor:
    config = Config.from_file(Path(folder, "config.json"))
    assert config.vision is not None
    return ImageProcessor.from_folder(folder, config.vision, budget)


# --- time ------------------------------------------------------------------------------------------------------------


def _times(model: Sequence[str], rounds: int) -> tuple[list[Timing], list[str]]:
    """Every stage, and a line for each contender that does not run."""
    names, left_out = list(_CONTENDERS), []
    if importlib.util.find_spec(_PEER) is None:
        names.remove(_PEER)
        left_out.append(f"{_PEER} is not installed")
    contenders: dict[str, Callable[[Any], Any]] = {}
    with ExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in names:
            started = stack.enter_context(processes.served("image", "--serve", name, *model))
            if isinstance(started, str):
                left_out.append(f"{name} did not start ({started})")
            else:
                contenders[name] = started
        return [_timed(stage, contenders, rounds, files) for stage in (_SOFT_TOKENS, _VECTOR)], left_out


def _timed(stage: str, contenders: dict[str, Callable[[Any], Any]], rounds: int, files: Path) -> Timing:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    results = {name: str(files / f"{name}.npy") for name in contenders}
    for number in range(1 + rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            seconds = contenders[name]([stage, results[name]])
            if number:  # the first is for warming up
                times[name].append(seconds)
            print(f"{stage}, round {number}: {name} {seconds:.3f} s", file=sys.stderr)
    rows = [_unit(np.load(file)) for file in results.values()]
    difference = float(np.abs(rows[0] - rows[1]).max()) if len(rows) == 2 else None
    return Timing(stage, rounds, {name: statistics.median(values) for name, values in times.items()}, difference)


def _unit(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=-1, keepdims=True)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(model: Sequence[str], images: int) -> Memory:
    """`images` pictures in one call, in a process of their own."""
    command = processes.command("image", "--embed", str(images), *model)
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=processes.environment())
    found = Memory(**json.loads(answer.stdout))
    print(f"{images} images: {found.seconds:.1f} s", file=sys.stderr)
    return found


def _embed(folder: str, budget: int, count: int) -> None:
    """Child process. Images of one shape share their pixels, so that those of 128 are not a gigabyte that would have to
    be taken from what is resident; the copies that a pass makes of its images' pixels count."""
    from egemma_mlx.loading import load

    model, _ = load(folder, modalities=_MODALITIES)
    random, processor = np.random.default_rng(0), _processor(folder, budget)
    shapes = [processor(random.integers(0, 256, (down, across, 3), np.uint8)) for across, down in _SHAPES]
    images = [shapes[index % len(shapes)] for index in range(count)]

    at_rest, resident = mx.get_active_memory(), _rest()
    mx.reset_peak_memory()
    start = time.perf_counter()
    soft = model.embed_images(images)
    mx.eval(soft)
    seconds = time.perf_counter() - start
    taken = None if resident is None else _status("VmHWM") - resident - soft.nbytes
    patches = sum(len(image.pixels) for image in images)
    found = Memory(count, patches, seconds, soft.nbytes, mx.get_peak_memory() - at_rest - soft.nbytes, taken)
    print(json.dumps(asdict(found)))


def _rest() -> int | None:
    """Resident bytes now, without what malloc keeps of freed arrays, which others could hide in; from here on VmHWM is
    the most since now. Linux alone keeps such a mark."""
    if sys.platform != "linux":
        return None
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(lines[name].split()[0]) * 1024


# --- report ----------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> Report:
    """Run the benchmark that the command line asks for."""
    with ExitStack() as stack:
        if arguments.model:
            folder = str(checkpoint.resolve(arguments.model))
        else:
            temporary = stack.enter_context(tempfile.TemporaryDirectory())
            folder = str(write_checkpoint(temporary, "full", modalities=_MODALITIES))
        model = ("--model", folder, "--max-soft-tokens", str(arguments.max_soft_tokens))
        timings, left_out = ([], []) if arguments.memory else _times(model, arguments.rounds)
        return Report(
            machine=doctor.facts(),
            model=arguments.model or "random weights in the published sizes",
            max_soft_tokens=arguments.max_soft_tokens,
            versions={name: version(name) for name in (_PEER, "torch") if timings and _PEER in timings[0].seconds},
            timings=timings,
            memory=[_memory(model, images) for images in arguments.memory_images] if arguments.memory else [],
            left_out=left_out,
        )


def as_text(report: Report) -> str:
    """The report as Markdown that reads as plain text too."""
    facts = [("model", report.model), ("soft tokens of an image", f"at most {report.max_soft_tokens}")]
    parts = [doctor.facts_table(report.machine), doctor.table([*facts, *report.versions.items()])]
    if report.timings:
        parts.append(doctor.table(_timing_rows(report.timings)))
    if report.memory:
        parts.append(doctor.table(_memory_rows(report.memory)))
    endings = [f"Left out: {line}.\n" for line in report.left_out]
    return "\n".join([*parts, *endings])


def _timing_rows(timings: Sequence[Timing]) -> list[tuple[str, ...]]:
    names = list(timings[0].seconds)
    both = len(names) == len(_CONTENDERS)
    rows = [("median seconds", *names, *(("ratio", "max difference") if both else ()), "rounds")]
    for timing in timings:
        seconds = timing.seconds
        beside = (f"{seconds[_PEER] / seconds[_OURS]:.2f}", f"{timing.difference:.1e}") if both else ()
        rows.append((timing.stage, *(f"{seconds[name]:.3f}" for name in names), *beside, str(timing.rounds)))
    return rows


def _memory_rows(found: Sequence[Memory]) -> list[tuple[str, ...]]:
    """MB at peak beyond weights, pixels and soft tokens, and how much more than in the first row."""

    def cell(each: Memory, kind: str) -> str:
        taken, first = getattr(each, kind), getattr(found[0], kind)
        if taken is None:
            return ""
        return f"{taken / 1e6:,.0f}" + ("" if each is found[0] else f" ({taken / first - 1:+.0%})")

    return [
        ("images", "patches", "soft tokens MB", "MLX's arrays MB more", "resident MB more", "seconds"),
        *(
            (
                str(each.images),
                f"{each.patches:,}",
                f"{each.soft_bytes / 1e6:,.0f}",
                cell(each, "mlx_bytes"),
                cell(each, "resident_bytes"),
                f"{each.seconds:.1f}",
            )
            for each in found
        ),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint (default: random weights in the published sizes)")
    parser.add_argument("--rounds", type=_positive, default=_ROUNDS, help=f"of each stage (default: {_ROUNDS})")
    parser.add_argument(
        "--max-soft-tokens", type=int, choices=BUDGETS, default=_BUDGET, help=f"of an image (default: {_BUDGET})"
    )
    parser.add_argument("--memory", action="store_true", help="measure memory, not time")
    parser.add_argument(
        "--memory-images",
        type=_positive,
        nargs="+",
        default=[32, 128],
        metavar="N",
        help="images of a batch, whose memory is measured (default: 32 128; a core takes seconds an image)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", choices=_CONTENDERS, help=argparse.SUPPRESS)  # a contender's process, on --model
    parser.add_argument("--embed", type=int, help=argparse.SUPPRESS)  # the process of a batch, on --model


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer but got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    if arguments.serve:
        _serve(arguments.serve, arguments.model, arguments.max_soft_tokens)
    elif arguments.embed:
        _embed(arguments.model, arguments.max_soft_tokens, arguments.embed)
    else:
        report = measure(arguments)
        print(json.dumps(asdict(report)) if arguments.json else as_text(report), end="\n" if arguments.json else "")
