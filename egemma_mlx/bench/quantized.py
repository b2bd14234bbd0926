"""How near the vectors of quantised checkpoints are to float32 ones: `python -m egemma_mlx.bench quantized`.

The checkpoint is converted in every way that `egemma-mlx convert` has, and each copy embeds the same texts: paragraphs
of the Python language reference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

from egemma_mlx import checkpoint
from egemma_mlx.bench.precision import cosine
from egemma_mlx.convert import convert
from egemma_mlx.encoder import Encoder
from egemma_mlx.quantized import AFFINE, Scheme

_SCHEMES = (Scheme(64, 8), Scheme(64, 6), Scheme(64, 4), Scheme(32, 8, "mxfp8"))
_SHORTEST, _LONGEST = 20, 600  # characters


@dataclass(frozen=True)
class Agreement:
    """Cosines with the unquantised checkpoint's float32 vectors, and bytes of the weights."""

    scheme: str
    bytes: int
    texts: int
    minimum: float
    mean: float


def agreements(source: str | Path | None, texts: int) -> Iterator[Agreement]:
    """Each way to quantise, after the source itself."""
    folder = checkpoint.resolve(source)
    paragraphs = _paragraphs(texts)
    exact = Encoder(folder).encode(paragraphs)
    yield Agreement("none", _bytes(folder), len(paragraphs), 1.0, 1.0)
    for scheme in _SCHEMES:
        with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
            # That 4 bits are few, and that a CPU unpacks them, is what this is about.
            warnings.filterwarnings("ignore", message=".*4 bits|weights of")
            copy = convert(folder, Path(temporary) / "copy", **asdict(scheme))
            cosines = cosine(Encoder(copy).encode(paragraphs), exact)
            name = f"{scheme.bits}-bit affine" if scheme.mode == AFFINE else scheme.mode
            yield Agreement(name, _bytes(copy), len(paragraphs), float(cosines.min()), float(cosines.mean()))


def _paragraphs(count: int) -> list[str]:
    """So many paragraphs, from all over the reference."""
    every = [" ".join(part.split()) for topic in sorted(topics) for part in topics[topic].split("\n\n")]
    usable = [paragraph for paragraph in every if _SHORTEST <= len(paragraph) <= _LONGEST]
    return usable[:: max(1, len(usable) // count)][:count]


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="checkpoint (default: as egemma-mlx has it)")
    parser.add_argument("--texts", type=int, default=300, help="default: 300")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    found = list(agreements(arguments.model, arguments.texts))
    if arguments.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print("| quantised | weights, MB | texts | min cosine | mean cosine |\n|---|---|---|---|---|")
    for each in found:
        print(f"| {each.scheme} | {each.bytes / 1e6:,.1f} | {each.texts} | {each.minimum:.6f} | {each.mean:.6f} |")
