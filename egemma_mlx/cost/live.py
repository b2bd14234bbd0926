"""How much memory the activations of a traced forward take, had from MLX's own graph."""

from __future__ import annotations

import math
from collections import defaultdict

from egemma_mlx.simulator import Graph
from egemma_mlx.simulator.call import VIEWS


def peak_live_bytes(graph: Graph) -> int:
    """The most bytes of activations alive at a time, run in the graph's order, each freed after its last use.

    Activations are what depends on the first input (token ids): not weights, nor tables. A view takes no memory of its
    own and keeps that of what it shows.
    """
    owners = {next(iter(graph.inputs)): ""}  # whose memory an activation is; the ids are the caller's
    sizes: dict[str, int] = defaultdict(int)
    last_use: dict[str, int] = {}
    nodes = [node for node in graph.nodes if _adopt(owners, node.primitive, node.inputs, list(node.outputs))]
    for place, node in enumerate(nodes):
        last_use |= {owners[name]: place for name in (*node.inputs, *node.outputs) if name in owners}
        sizes |= {
            name: math.prod(spec.shape) * spec.dtype.size for name, spec in node.outputs.items() if owners[name] == name
        }
    for name in graph.outputs:
        last_use[owners[name]] = len(nodes)
    alive = peak = 0
    for place, node in enumerate(nodes):
        alive += sum(sizes[name] for name in node.outputs)
        peak = max(peak, alive)
        touched = {owners[name] for name in (*node.inputs, *node.outputs) if name in owners}
        alive -= sum(sizes[name] for name in touched if last_use[name] == place)
    return peak


def _adopt(owners: dict[str, str], primitive: str, inputs: tuple[str, ...], outputs: list[str]) -> bool:
    """Whether a node's outputs are activations, whose owners it notes."""
    if not any(name in owners for name in inputs):
        return False
    shown = owners.get(inputs[0]) if primitive in VIEWS else None
    owners |= {name: shown or name for name in outputs}
    return True
