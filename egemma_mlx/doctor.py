"""What this machine is, which backend it gets and whether the kernels are right on it: `egemma-mlx doctor`."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from egemma_mlx import __version__, blas
from egemma_mlx.config import Config, LayerConfig, TextConfig
from egemma_mlx.errors import EgemmaError
from egemma_mlx.export import example, forward
from egemma_mlx.kernels import metal_kernels
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.attention_metal import form
from egemma_mlx.kernels.backend import picked, simulator_library
from egemma_mlx.kernels.library import Library
from egemma_mlx.kernels.linear import SHORT
from egemma_mlx.kernels.selfcheck import PUBLISHED, TOLERANCE, Verdict, Widths, launches, verdicts
from egemma_mlx.models.encoder import EmbeddingGemma2

# Of a batch in each form of the products: one, two and four fragments of few rows, and many.
_ROWS = (8, 16, 64, 256)
_KERNEL_PREFIX = "custom_kernel_egemma_"
# What of utils.h, which MLX puts before every kernel, a generated signature needs.
_PRELUDE = """\
#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
"""


def facts() -> dict[str, Any]:
    """Versions, device, backend and BLAS."""
    return {
        "egemma_mlx": __version__,
        "mlx": version("mlx"),
        "python": platform.python_version(),
        "os": platform.platform(),
        "device": {"type": "cpu" if on_cpu() else "gpu", **mx.device_info()},
        "backend": picked("auto"),
        "blas": asdict(blas.current()),
    }


def examine(widths: Widths, *, simulator: bool) -> tuple[str, list[Verdict]] | None:
    """Every kernel against float64, on the simulator or else on Metal.

    Returns:
        What they ran on, and the verdicts; None where that would be Metal and there is none.

    Raises:
        EgemmaError: the simulator does not run here.
    """
    if simulator:
        from egemma_mlx.simulator import available

        if reason := available():
            raise EgemmaError(reason)
        return "simulator", verdicts(simulator_library(), widths)
    return ("metal", verdicts(Library(mx.fast.metal_kernel), widths)) if picked("auto") == "metal" else None


# --- the report ------------------------------------------------------------------------------------------------------


def as_json(machine: dict[str, Any], examined: tuple[str, list[Verdict]] | None, msl: list[Path]) -> dict[str, Any]:
    """All that the report says, for `json.dumps`."""
    ran_on, found = examined or (None, [])
    kernels = [
        {**asdict(verdict), "error": _finite(verdict.error), "compiled": verdict.error is not None} for verdict in found
    ]
    return {**machine, "kernels_ran_on": ran_on, "kernels": kernels, "msl": list(map(str, msl))}


def facts_table(machine: dict[str, Any]) -> str:
    """`facts` as Markdown that reads as plain text too."""
    device, library = machine["device"], machine["blas"]
    rows = [
        ("egemma-mlx", machine["egemma_mlx"]),
        ("MLX", machine["mlx"]),
        ("Python", machine["python"]),
        ("OS", machine["os"]),
        ("device", ", ".join(_described(name, value) for name, value in device.items())),
        ("backend", f"{machine['backend']} (what `auto` picks)"),
        ("forms", f"products spread over all cores below {SHORT} rows; attention {_forms()}"),
    ]
    if device["type"] == "cpu":
        rows.append(("BLAS", f"{library['name']} ({library['reason']})"))
    return table(rows)


def as_text(machine: dict[str, Any], examined: tuple[str, list[Verdict]] | None) -> str:
    """The report as Markdown that reads as plain text too."""
    heading = facts_table(machine)
    if examined is None:
        ending = "The kernels need Metal, which is not here: `egemma-mlx doctor --simulator` runs them on the CPU."
        return f"{heading}\n{ending}\n"
    ran_on, found = examined
    failed = sum(verdict.problem is not None for verdict in found)
    outcome = f"{failed} of {len(found)} checks failed" if failed else f"All {len(found)} checks passed"
    kernels = [
        ("kernel", "function", "compiled", "max error", "verdict"),
        *(
            (
                verdict.kernel,
                verdict.function,
                "no" if verdict.error is None else "yes",
                "" if verdict.error is None else f"{verdict.error:.1e}",
                verdict.problem or "ok",
            )
            for verdict in found
        ),
    ]
    place = "Metal" if ran_on == "metal" else "the simulator"
    ending = f"{outcome} on {place} (tolerance: {TOLERANCE:.0e} of the greatest float64 value)."
    return f"{heading}\n{table(kernels)}\n{ending}\n"


def _forms() -> str:
    """The forms of attention for the shapes of the published model, in short batches and long ones."""
    lines = []
    for shape in PUBLISHED.attention:
        names = [form(shape.heads, shape.kv_heads, shape.head_dim, keys) for keys in (16, 8192)]
        lines.append(f"{shape.head_dim}: {' or '.join(dict.fromkeys(names))}")
    return ", ".join(lines)


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def _described(name: str, value: Any) -> str:
    if name in ("type", "device_name", "architecture"):
        return str(value)
    label = name.replace("_", " ")
    return f"{label} {value / 2**30:.1f} GiB" if isinstance(value, int) and value >= 2**20 else f"{label} {value}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned; the first row is its head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |\n" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|\n")
    return "".join(lines)


# --- the sources -----------------------------------------------------------------------------------------------------


def dump_msl(folder: Path, widths: Widths) -> list[Path]:
    """Write every source that MLX compiles for these widths, each a file that Metal's compiler takes as it is.

    Args:
        folder: new or empty; it gets all files or none.

    Raises:
        EgemmaError: the folder is in use or cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise EgemmaError(f"{folder}: expected a new or empty folder")
    texts = {f"{name.removeprefix(_KERNEL_PREFIX)}.metal": text for name, text in sorted(sources(widths).items())}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as partial:
            for file, text in texts.items():
                (Path(partial) / file).write_text(_PRELUDE + text, encoding="utf-8")
            return [(Path(partial) / file).rename(folder / file) for file in texts]
    except OSError as error:
        raise EgemmaError(f"{folder}: cannot be written ({error})") from error


def compile_command(folder: Path) -> str:
    """The shell command that has Apple's compiler read a folder of `dump_msl`, as MLX sets it (no fast math)."""
    return f"(cd {shlex.quote(str(folder))} && xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -c *.metal)"


def sources(widths: Widths) -> dict[str, str]:
    """What MLX compiles for these widths, by the name of the kernel: those of the text forward over bfloat16 weights,
    and those that only the check of the kernels launches. Nothing is compiled or run."""
    library = Library(mx.fast.metal_kernel)
    model = EmbeddingGemma2(_config(widths), metal_kernels(library, "metal"), compiled=False)
    model.set_dtype(mx.bfloat16)
    found = _kernels(lambda: launches(library, widths), ())
    for rows in _ROWS:
        found |= _kernels(forward(model), example(rows, 1))
    return found


def _kernels(function: Callable[..., Any], arguments: Iterable[mx.array]) -> dict[str, str]:
    """The custom kernels of a traced function: name and complete text, which MLX puts first into their nodes."""
    found: dict[str, str] = {}

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            name, text = event["arguments"][:2]
            found[name] = text

    mx.export_function(note, function, *arguments)
    return found


def _config(widths: Widths) -> Config:
    """The smallest model of these widths: one layer a shape of attention, and nobody's vocabulary."""
    text = TextConfig(
        vocab_size=8,
        hidden_size=widths.hidden,
        intermediate_size=widths.inner,
        num_hidden_layers=len(widths.attention),
        hidden_size_per_layer_input=widths.ple,
        embedding_dim=8,
        rms_norm_eps=1e-6,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        max_position_embeddings=64,
        layers=tuple(LayerConfig(shape.heads, shape.kv_heads, shape.head_dim, None, 1e4) for shape in widths.attention),
    )
    return Config(text, None, None, image_token_id=-1, video_token_id=-1, audio_token_id=-1)
