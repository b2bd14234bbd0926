"""The launches of a whole text forward, in order: ours, the seed's, plain MLX operations.

Ours is what `models/text.py` launches over the Metal kernels (a test compares it with MLX's own trace). The seed's is
what its host does as DESIGN §3 tells it: three launches a round of attention, q/k/v and gate/up in one launch each,
norms fused with the residual add, 17 launches a layer, float32 weights. Where its host is not known (the embedding's
gather, the last norm of the vectors) it is charged with MLX's own operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from egemma_mlx.config import LayerConfig, TextConfig
from egemma_mlx.cost import attention, products, seed
from egemma_mlx.cost import rows as by_row
from egemma_mlx.cost.work import Heads, Keys, Work, tiles
from egemma_mlx.kernels.fused import FEW_SEGMENTS
from egemma_mlx.kernels.linear import SHORT
from egemma_mlx.packing import bucket

_ITEM = 2  # weights stay bfloat16 on Metal


def _layer(full: bool) -> LayerConfig:
    if full:
        return LayerConfig(heads=4, kv_heads=1, head_dim=512, window=None, rope_theta=1e6)
    return LayerConfig(heads=4, kv_heads=2, head_dim=256, window=512, rope_theta=1e4)


PUBLISHED = TextConfig(
    vocab_size=262_144,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=24,
    hidden_size_per_layer_input=512,
    embedding_dim=768,
    rms_norm_eps=1e-6,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
    max_position_embeddings=262_144,
    layers=tuple(_layer(full=index % 6 == 5) for index in range(24)),
)
"""The text model of google/embeddinggemma-2."""


@dataclass(frozen=True)
class Workload:
    """`batch` texts of `length` tokens, packed."""

    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.batch}×{self.length}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self.batch

    @property
    def rows(self) -> int:
        """Packed rows T, in their bucket."""
        return bucket(self.batch * self.length, self.batch)[0]

    @property
    def slots(self) -> int:
        """Segments S, in their bucket."""
        return bucket(self.batch * self.length, self.batch)[1]

    def keys(self, window: int | None) -> Keys:
        return Keys.of(self.lengths, window, self.rows)


WORKLOADS = (Workload(1, 16), Workload(1, 128), Workload(32, 128), Workload(32, 512), Workload(1, 8192))


def heads(layer: LayerConfig) -> Heads:
    return Heads(layer.heads, layer.kv_heads, layer.head_dim)


def least_bytes(config: TextConfig, load: Workload) -> int:
    """What any forward moves: bfloat16 weights and embedding rows once, the vectors out."""
    hidden, middle, ple = config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input
    weights = hidden * config.embedding_dim
    for layer in config.layers:
        weights += hidden * 2 * (heads(layer).q_width + heads(layer).kv_width) + 3 * hidden * middle + 3 * hidden * ple
    return _ITEM * (weights + load.batch * load.length * hidden) + 4 * load.batch * config.embedding_dim


# --- ours ------------------------------------------------------------------------------------------------------------


def ours(config: TextConfig, load: Workload) -> list[Work]:
    """Our forward, for packed rows in their bucket."""
    rows, hidden = load.rows, config.hidden_size
    starts = [load.length * i for i in range(load.batch)] + [load.batch * load.length] * (load.slots - load.batch)
    launches = [*_embed(rows, hidden), by_row.rms_norm(rows, hidden)]
    few = rows < SHORT
    if few:  # per-layer embeddings of all layers at once
        ple, layers = config.hidden_size_per_layer_input, len(config.layers)
        launches += [products.linear_short(rows, hidden, layers * ple), by_row.rms_norm(rows * layers, ple)]
    for index, layer in enumerate(config.layers):
        form = our_short_layer if few else our_layer
        launches += form(config, load, layer, last=index == len(config.layers) - 1)
    bounds = [attention.attention_bounds(rows, starts) for _ in {layer.window for layer in config.layers}]
    return [*bounds, *launches, *our_tail(config, load)]


def our_layer(config: TextConfig, load: Workload, layer: LayerConfig, *, last: bool) -> list[Work]:
    """Nine launches, for many rows."""
    t, hidden, middle, ple = load.rows, config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input
    h = heads(layer)
    return [
        products.linear(t, hidden, h.q_width, h.kv_width, h.kv_width),
        by_row.qkv_prep(t, h, positions=load.length),
        attention.flash_split(h, load.keys(layer.window)),
        products.linear_add_norm(t, h.q_width, hidden, next_norm=True),
        products.gated(t, hidden, middle),
        products.linear_add_norm(t, middle, hidden),
        products.linear_rms_norm(t, hidden, ple),
        products.linear_gelu_mul(t, hidden, ple),
        products.linear_add_norm(t, ple, hidden, next_norm=not last),
    ]


def our_short_layer(config: TextConfig, load: Workload, layer: LayerConfig, *, last: bool) -> list[Work]:
    """Eleven, for few: norms of whole rows are launches of their own, so that products spread over all cores."""
    t, hidden, middle, ple = load.rows, config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input
    h = heads(layer)
    return [
        products.linear_short(t, hidden, h.q_width, h.kv_width, h.kv_width),
        by_row.qkv_prep(t, h, positions=load.length),
        attention.flash_split(h, load.keys(layer.window)),
        products.linear_short(t, h.q_width, hidden),
        by_row.add_norm(t, hidden, next_norm=True),
        products.gated_short(t, hidden, middle),
        products.linear_short(t, middle, hidden),
        by_row.add_norm(t, hidden),
        products.linear_gelu_mul_short(t, hidden, ple),
        products.linear_short(t, ple, hidden),
        by_row.add_norm(t, hidden, next_norm=not last),
    ]


def our_tail(config: TextConfig, load: Workload) -> list[Work]:
    """Two launches; three for few segments."""
    slots, hidden, width = load.slots, config.hidden_size, config.embedding_dim
    pool = by_row.pool(load.lengths, slots, hidden)
    if slots >= FEW_SEGMENTS:
        return [pool, products.linear_unit(load.batch, slots, hidden, width)]
    return [pool, products.linear_short(slots, hidden, width), by_row.rms_norm(slots, width, item=4)]


def _embed(rows: int, hidden: int) -> Iterator[Work]:
    """MLX's gather of bfloat16 rows, then their widening and scale."""
    yield moving("gather", load=rows * (4 + 2 * hidden), store=rows * 2 * hidden)
    yield moving("scale", load=rows * 2 * hidden, store=rows * 4 * hidden)


def moving(name: str, *, load: int, store: int) -> Work:
    """A launch of MLX's own that reads and writes every byte once, 16 bytes a thread."""
    return Work(
        kernel=name,
        threadgroups=tiles(max(load, store), 16 * 256),
        threads=256,
        load_bytes=load,
        store_bytes=store,
        table_bytes=load + store,
    )


# --- the seed's ------------------------------------------------------------------------------------------------------


def seeds(config: TextConfig, load: Workload) -> list[Work]:
    """The seed's forward; no bucket, no empty slot."""
    t, hidden = load.batch * load.length, config.hidden_size
    launches = [*_embed(t, hidden), seed.rms(t, hidden)]
    for index, layer in enumerate(config.layers):
        launches += seed_layer(config, load, layer, last=index == len(config.layers) - 1)
    tail = [
        seed.row_inverse(t, hidden),
        seed.pool(load.lengths, hidden),
        seed.product("project", load.batch, hidden, config.embedding_dim),
        *_normalize(load.batch, config.embedding_dim),
    ]
    return [*launches, *tail]


def seed_layer(config: TextConfig, load: Workload, layer: LayerConfig, *, last: bool) -> list[Work]:
    """Seventeen launches, three more for every further round of attention."""
    hidden, middle, ple = config.hidden_size, config.intermediate_size, config.hidden_size_per_layer_input
    t, h = load.batch * load.length, heads(layer)
    return [
        seed.product("qkv", t, hidden, h.q_width, h.kv_width, h.kv_width),
        seed.qkv_prep(t, h, positions=load.length),
        *seed.attention(load.lengths, h, layer.window),
        seed.product("o", t, h.q_width, hidden),
        seed.add_norm(t, hidden, next_norm=True),
        seed.product("gate_up", t, hidden, middle, middle),
        seed.gelu_mul(t, middle),
        seed.product("down", t, middle, hidden),
        seed.add_norm(t, hidden),
        seed.product("ple_input", t, hidden, ple),
        seed.rms(t, ple),
        seed.product("ple_gate", t, hidden, ple),
        seed.gelu_mul(t, ple),
        seed.product("ple_project", t, ple, hidden),
        seed.add_norm(t, hidden, next_norm=not last),
    ]


def _normalize(slots: int, width: int) -> Iterator[Work]:
    """MLX's norm of the vectors, then their division."""
    yield moving("norm", load=slots * 4 * width, store=slots * 4)
    yield moving("divide", load=slots * 4 * (width + 1), store=slots * 4 * width)
