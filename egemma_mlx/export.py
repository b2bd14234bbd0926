"""The compiled forward as a file that MLX loads from Swift, C++ and Python, without this package.

`mx.export_function` writes the traced graph, the text of its Metal kernels and the weights. Tracing needs no GPU, so a
file for a Mac can be made anywhere.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, metal_kernels
from egemma_mlx.kernels.library import Library
from egemma_mlx.loading import load_model
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.records import complete

ExportBackend = Literal["metal", "ops"]
Forward = Callable[[mx.array, mx.array, mx.array], mx.array]

_CPU = 0
"""MLX's number for the device, in a file."""


def export_forward(
    folder: Path, out: Path, *, tokens: int, segments: int = 1, backend: ExportBackend = "metal"
) -> None:
    """Write the forward of a checkpoint, for inputs of one size, with its weights.

    The file's function takes three int32 arrays, a packed batch as `egemma_mlx.packing` describes it, and returns an
    array:

        tokens     [tokens]          ids; any where there is no token
        positions  [tokens]          0…n−1 in each text; −1 where there is no token
        segments   [segments, 2]     (start, length) of each text, starts ascending; (tokens, 0) where there is none
        →          [segments, dim]   float32 unit vectors, zeros for a text without tokens

    Args:
        folder: of the checkpoint.
        out: a name that ends in .mlxfn; the file is complete or absent.
        tokens: rows of the packed batch, at most the model's longest input.
        segments: texts of the batch.
        backend: "metal": the package's kernels, for Apple GPUs, weights as they are stored; "ops": plain MLX
            operations, on the kind of device that this machine has, weights in float32 on a CPU.

    Raises:
        EgemmaError: a size, name or backend that does not fit; a checkpoint that is not one; a file that cannot be
            written.
    """
    config = Config.from_file(folder / "config.json")
    longest = config.text.max_tokens
    if out.suffix != ".mlxfn":
        raise EgemmaError(f"{out}: expected a name that ends in .mlxfn")
    if not 1 <= tokens <= longest:
        raise EgemmaError(f"[export] expected tokens in 1…{longest} but got {tokens}")
    if not 1 <= segments <= tokens:
        raise EgemmaError(f"[export] expected segments in 1…{tokens}, the tokens, but got {segments}")
    if backend not in get_args(ExportBackend):
        raise EgemmaError(f"[export] expected backend 'metal' or 'ops' but got {backend!r}")
    kernels = OPS if backend == "ops" else metal_kernels(Library(mx.fast.metal_kernel), "metal")
    with complete(out) as file:
        function = forward(load_model(folder, config, kernels, compiled=True))
        arguments = example(tokens, segments)
        try:
            mx.export_function(file.name, function, *arguments)
        except RuntimeError as error:  # what MLX's own file writer raises
            raise EgemmaError(f"{out}: cannot be written ({error})") from None
        if backend == "metal":
            _join_kernels(Path(file.name), _primitives(function, arguments))


def forward(model: EmbeddingGemma2) -> Forward:
    """The function that is exported."""

    def embed(tokens: mx.array, positions: mx.array, segments: mx.array) -> mx.array:
        return model(tokens, segments=segments, positions=positions).text_embeds

    return embed


def example(tokens: int, segments: int) -> tuple[mx.array, mx.array, mx.array]:
    """Arguments of these sizes, for a trace."""
    return mx.zeros(tokens, mx.int32), mx.zeros(tokens, mx.int32), mx.zeros((segments, 2), mx.int32)


def _primitives(function: Forward, arguments: tuple[mx.array, ...]) -> list[str]:
    """The names of a graph's operations in the order of its file."""
    names: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            names.append(event["name"])

    mx.export_function(note, function, *arguments)
    return names


def _join_kernels(path: Path, primitives: list[str]) -> None:
    """Put every operation of a file on the stream of its kernels.

    A trace takes plain operations to the device at hand. Without a GPU that is the CPU, where a Mac would then run them
    too, and wait between the kernels. An operation begins, in a file, with its stream (index, device and its number,
    int32 each) and its name (length, uint64; characters).
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        places = []
        at = 0
        for name in primitives:
            record = struct.pack("<Q", len(name)) + name.encode()
            at = data.find(record, at)
            if at < 12:
                raise EgemmaError(
                    f"[export] expected {name} in the file but MLX {version('mlx')} writes another format"
                )
            places.append(at - 12)
            at += len(record)
        streams = [data[place : place + 12] for place in places]
        kernels = streams[primitives.index("CustomKernel")]
        for place, stream in zip(places, streams, strict=True):
            if struct.unpack("<iii", stream)[1] == _CPU:
                data[place : place + 12] = kernels
