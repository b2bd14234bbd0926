"""Who embeds ids in the benchmarks of a device: this package over each set of kernels, and mlx-vlm where it is
installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from egemma_mlx import lanes
from egemma_mlx.bench.workloads import Ids
from egemma_mlx.encoder import default_batch_tokens
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.backend import Backend
from egemma_mlx.kernels.norm import normalize
from egemma_mlx.loading import Precision, load
from egemma_mlx.models.encoder import EmbeddingGemma2
from egemma_mlx.packing import pack, token_batches
from egemma_mlx.simulator.call import VIEWS

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Launches:
    """The operations of a traced forward, before `mx.compile` joins elementwise ones."""

    custom: int
    other: int
    views: int


@dataclass(frozen=True)
class Contender:
    """A loaded model.

    Attributes:
        embed: texts as ids → unit vectors [N, D] on the host, in forwards as large as its caller would make them.
        launches: of one forward of these texts.
        model: the module.
    """

    name: str
    model: nn.Module
    embed: Callable[[Sequence[Ids]], Vectors]
    launches: Callable[[Sequence[Ids]], Launches]

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))


def ours(folder: Path, backend: Backend, precision: Precision) -> Contender:
    """This package, in batches as `Encoder` makes them."""
    model, _ = load(folder, backend=backend, precision=precision)

    def run(texts: Sequence[Ids]) -> Vectors:
        return np.array(normalize(model.pooled(pack(texts))))

    def embed(texts: Sequence[Ids]) -> Vectors:
        vectors = np.zeros((len(texts), model.config.text.embedding_dim), np.float32)
        batches = list(_batches(texts, model.kernels.apart))
        for batch, rows in lanes.run(lambda batch: (batch, run([texts[i] for i in batch])), batches):
            vectors[batch] = rows
        return vectors

    def launches(texts: Sequence[Ids]) -> Launches:
        packed = pack(texts)
        return _traced(lambda tokens: model.pooled(replace(packed, tokens=tokens)), packed.tokens)

    return Contender(f"{model.kernels.name} {precision}", model, embed, launches)


def mlx_vlm(folder: Path) -> Contender | str:
    """mlx-vlm, in padded batches of the same texts as ours; or why not. It computes in the stored dtype, on a CPU in
    float32."""
    if importlib.util.find_spec("mlx_vlm") is None:
        return "mlx-vlm is not installed"
    try:
        from mlx_vlm.utils import load_model

        model = load_model(folder)
        if on_cpu():
            model.set_dtype(mx.float32)  # MLX's own bfloat16 products on a CPU take 20 times as long
            mx.eval(model.parameters())
    except Exception as error:  # whatever another package raises, the benchmark goes on without it
        return f"mlx-vlm {version('mlx-vlm')} does not load this checkpoint ({type(error).__name__}: {error})"

    def run(texts: Sequence[Ids]) -> Vectors:
        ids, mask = _padded(texts)
        return np.array(model(ids, attention_mask=mask).text_embeds.astype(mx.float32))

    def embed(texts: Sequence[Ids]) -> Vectors:
        vectors: list[Any] = [None] * len(texts)
        for batch in _batches(texts):
            for index, vector in zip(batch, run([texts[i] for i in batch]), strict=True):
                vectors[index] = vector
        return np.stack(vectors)

    def launches(texts: Sequence[Ids]) -> Launches:
        ids, mask = _padded(texts)
        return _traced(lambda ids: model(ids, attention_mask=mask).text_embeds, ids)

    return Contender(f"mlx-vlm {version('mlx-vlm')} {_stored(model)}", model, embed, launches)


def first_forward(texts: Sequence[Ids]) -> list[Ids]:
    """The texts of the first of the forwards that these make."""
    return [texts[index] for index in next(_batches(texts))]


def text_model(contender: Contender) -> EmbeddingGemma2:
    """The model of one of ours."""
    assert isinstance(contender.model, EmbeddingGemma2)
    return contender.model


def _batches(texts: Sequence[Ids], apart: int = 0) -> Iterator[list[int]]:
    return token_batches([len(ids) for ids in texts], default_batch_tokens(), apart=apart)


def _padded(texts: Sequence[Ids]) -> tuple[mx.array, mx.array]:
    """Ids and mask [B, L], padding on the right."""
    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    mask = np.zeros(ids.shape, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return mx.array(ids), mx.array(mask)


def _stored(model: nn.Module) -> str:
    return str(tree_flatten(model.parameters())[0][1].dtype).removeprefix("mlx.core.")


def _traced(function: Callable[[mx.array], mx.array], tokens: mx.array) -> Launches:
    names: list[str] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive":
            names.append(event["name"])

    mx.export_function(note, function, tokens)
    custom, views = names.count("CustomKernel"), sum(name in VIEWS for name in names)
    return Launches(custom, len(names) - custom - views, views)
