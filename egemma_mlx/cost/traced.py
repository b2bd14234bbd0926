"""The launches of a forward over plain MLX operations, from the graph that MLX itself traces.

The graph is that of our own `ops` kernels with host-known lengths, as a GPU gets it: the branches that these functions
take on a CPU are switched off, and MLX's fused norm, which a CPU's trace shows as its eleven parts, is traced as a
kernel. Then, as an optimistic `mx.compile` would:

    one launch        each matrix product, norm, softmax, reduction, gather, concatenation
    one launch        all elementwise operations that touch each other and wait for the same launches before them
    none              views: reshapes, transposes, broadcasts, slices (some of which MLX in truth copies)

A product is charged as one of 64 × 64 tiles (`seed.product`, the same form as MLX's own float32 GEMM), one with a
single column and everything else as its bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from egemma_mlx.config import TextConfig
from egemma_mlx.cost import seed
from egemma_mlx.cost.plans import Workload, moving
from egemma_mlx.cost.work import Work, together
from egemma_mlx.kernels import OPS, Kernels, attention, gelu, norm
from egemma_mlx.kernels.library import Library
from egemma_mlx.models.text import RopeTables, TextModel, project_unit
from egemma_mlx.packing import pack
from egemma_mlx.simulator import Graph, trace
from egemma_mlx.simulator.call import VIEWS, Node, Spec

_ALONE = {"Matmul", "Softmax", "Reduce", "ArgReduce", "Gather", "Concatenate", "CustomKernel"}


def forward(kernels: Kernels, config: TextConfig, load: Workload) -> Graph:
    """The graph of a text forward from token ids to unit vectors; nothing is evaluated."""
    model = TextModel(config)
    packed = pack([np.zeros(length, np.int32) for length in load.lengths])
    packed = packed.padded(load.rows, load.slots)
    tables = RopeTables(config)(packed.reach)
    parameters = tree_flatten(model.parameters())
    names = [name for name, _ in parameters]

    def run(tokens: mx.array, *weights: mx.array) -> mx.array:
        model.update(tree_unflatten(list(zip(names, weights, strict=True))))
        states = model(model.embed(tokens), packed, tables, kernels)
        mean = kernels.pool(states, model.norm.weight, packed, eps=config.rms_norm_eps)
        return project_unit(kernels, mean, model.embedding_projection)[1]

    return trace(run, packed.tokens, *(mx.zeros(value.shape, mx.bfloat16) for _, value in parameters))


def plain(config: TextConfig, load: Workload) -> tuple[list[Work], int]:
    """The launches of plain MLX operations, and the primitives of their graph."""
    with _as_on_a_gpu() as kernels:
        graph = forward(kernels, config, load)
    return list(launches(graph)), len(graph.nodes)


@contextmanager
def _as_on_a_gpu() -> Iterator[Kernels]:
    rms_norm = partial(norm.metal_rms_norm, Library(mx.fast.metal_kernel))
    with ExitStack() as patches:
        for module in (attention, gelu):
            patches.enter_context(patch.object(module, "on_cpu", lambda: False))
        patches.enter_context(patch.object(norm, "rms_norm", rms_norm))
        yield replace(OPS, rms_norm=rms_norm)


def launches(graph: Graph) -> Iterator[Work]:
    """The launches of a graph, by the rules above."""
    specs = {**graph.inputs, **{name: Spec(a.shape, a.dtype) for name, a in graph.constants.items()}}
    source: dict[str, str] = {}  # an array → the array in memory that it is a view of
    level: dict[str, int] = defaultdict(int)  # launches that an array waits for, one after another
    groups = _Groups()
    for node in graph.nodes:
        specs.update(node.outputs)
        if node.primitive in VIEWS:
            for name in node.outputs:
                source[name] = source.get(node.inputs[0], node.inputs[0])
                level[name] = level[source[name]]
            continue
        inputs = [source.get(name, name) for name in node.inputs]
        waits = max((level[name] for name in inputs), default=0)
        alone = node.primitive in _ALONE
        for name in node.outputs:
            level[name] = waits + alone
        groups.add(node, inputs, None if alone else waits)
    reads = {
        group: {name for _, inputs in members for name in inputs if groups.owner.get(name) != group}
        for group, members in groups.members.items()
    }
    kept = {source.get(name, name) for name in graph.outputs}.union(*reads.values())
    for group, members in groups.members.items():
        made = [name for node, _ in members for name in node.outputs]
        load, store = (sum(_bytes(specs[name]) for name in names) for names in (reads[group], kept.intersection(made)))
        yield _launch(members[0][0], specs, load, store)


class _Groups:
    """Nodes (and their inputs) that are one launch; elementwise ones join over the arrays that they hand on."""

    def __init__(self) -> None:
        self.members: dict[int, list[tuple[Node, list[str]]]] = {}
        self.owner: dict[str, int] = {}  # an array → the group that makes it
        self.open: dict[int, int] = {}  # an elementwise group → the launches that it waits for

    def add(self, node: Node, inputs: list[str], waits: int | None) -> None:
        """`waits`: the launches that an elementwise node waits for; None for a node that is a launch by itself."""
        makers = {self.owner[name] for name in inputs if name in self.owner}
        joined = sorted(group for group in makers if waits is not None and self.open.get(group) == waits)
        group = joined[0] if joined else len(self.owner)  # grows with every node, and so is new
        self.members.setdefault(group, [])
        for other in joined[1:]:
            del self.open[other]
            for member in self.members.pop(other):
                self._join(group, *member)
        if waits is not None:
            self.open[group] = waits
        self._join(group, node, inputs)

    def _join(self, group: int, node: Node, inputs: list[str]) -> None:
        self.members[group].append((node, inputs))
        self.owner.update(dict.fromkeys(node.outputs, group))


def _launch(first: Node, specs: dict[str, Spec], load: int, store: int) -> Work:
    """The launch that begins with a node, and reads and writes so many bytes of arrays."""
    if first.primitive == "Matmul":
        *batch, rows, width = next(iter(first.outputs.values())).shape
        if width > 1:
            one = seed.product("", rows, specs[first.inputs[0]].shape[-1], width, weights=False)
            return together([one] * math.prod(batch), "matmul", read=0, written=0, table_bytes=load + store)
    if first.primitive == "Gather":
        load = store
    return moving("elementwise" if first.primitive not in _ALONE else first.primitive.lower(), load=load, store=store)


def _bytes(spec: Spec) -> int:
    return math.prod(spec.shape) * int(spec.dtype.size)
