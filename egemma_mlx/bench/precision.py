"""How near bfloat16 vectors are to float32 ones: `python -m egemma_mlx.bench precision`.

Cosines over texts of mixed lengths, by length: rounding errors of a text's tokens average out in its mean. On a GPU
mlx-vlm, where it is installed, is measured on the same texts and checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from egemma_mlx import checkpoint
from egemma_mlx.bench.contenders import Contender, Vectors, mlx_vlm, ours, text_model
from egemma_mlx.bench.workloads import LONGEST, SHORTEST, workload
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.backend import Backend
from egemma_mlx.random_checkpoint import write_checkpoint

# Lower bounds of the lengths that are reported together.
_BANDS = (SHORTEST, 16, 64)


@dataclass(frozen=True)
class Agreement:
    """Cosines with the float32 vectors of this package."""

    contender: str
    shortest: int
    longest: int
    texts: int
    minimum: float
    mean: float


def agreements(folder: Path, texts: int, backend: Backend = "auto") -> Iterator[Agreement]:
    """Every contender, over all texts and by length."""
    corpus = workload(f"mixed:{texts}")
    reference = ours(folder, backend, "float32")
    ids = corpus.texts(text_model(reference).config.text.vocab_size)
    exact, name, lengths = reference.embed(ids), reference.name, np.array(corpus.lengths)
    contenders = [ours(folder, backend, "bfloat16")]
    if not on_cpu() and isinstance(peer := mlx_vlm(folder), Contender):
        contenders.append(peer)
    for contender in contenders:
        cosines = cosine(contender.embed(ids), exact)
        for low, high in ((SHORTEST, LONGEST), *zip(_BANDS, (*(x - 1 for x in _BANDS[1:]), LONGEST), strict=True)):
            chosen = cosines[(lengths >= low) & (lengths <= high)]
            if len(chosen):
                yield Agreement(
                    f"{contender.name} beside {name}", low, high, len(chosen), float(chosen.min()), float(chosen.mean())
                )


def cosine(a: Vectors, b: Vectors) -> NDArray[np.float64]:
    """Row by row, in float64."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    norms = np.linalg.norm(wide_a, axis=1) * np.linalg.norm(wide_b, axis=1)
    cosines: NDArray[np.float64] = (wide_a * wide_b).sum(axis=1) / norms
    return cosines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=500, help="default: 500, a quarter of an hour on two cores")
    parser.add_argument("--model", help="checkpoint (default: random weights in the published sizes)")
    parser.add_argument("--backend", choices=("auto", "metal", "ops"), default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    with ExitStack() as stack:
        if arguments.model:
            folder = checkpoint.resolve(arguments.model)
        else:
            temporary = stack.enter_context(tempfile.TemporaryDirectory())
            folder = write_checkpoint(temporary, "full", modalities=("text",))
        found = list(agreements(folder, arguments.texts, arguments.backend))
    if arguments.json:
        print(json.dumps([asdict(each) for each in found]))
        return
    print("| | tokens | texts | min cosine | mean cosine |\n|---|---|---|---|---|")
    for each in found:
        print(
            f"| {each.contender} | {each.shortest} to {each.longest} | {each.texts} | {each.minimum:.6f} "
            f"| {each.mean:.6f} |"
        )
