"""The Metal forms of attention, over `bounds`: for each packed row the rows that it may meet.

    flash       head_dim up to 128: softmax as keys go by, no score in memory. Direct (each simdgroup reads its own
                keys) where rows meet few, staged (a threadgroup shares them) where they meet many.
    split       wide heads, of a multiple of 256: the same, the head split by columns over eight simdgroups, which share
                the keys among all query heads of a group.
    products    all other heads: scores = q·kᵀ, their softmax, and its product with v, in blocks of 64 rows and in
                rounds of bounded memory.

Blocks lie on the packed row, not on its segments, so the launch grid is a function of T alone; a block visits the keys
from the first that its first row meets to the last that its last row does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import mlx.core as mx

from egemma_mlx.kernels import check
from egemma_mlx.kernels.attention import check_heads, check_tables
from egemma_mlx.kernels.library import Library, Source, launch
from egemma_mlx.kernels.linear import TILE
from egemma_mlx.packing import Packed

_BOUNDS = Source("attention_bounds", ("segments", "window"), ("bounds",), ("attention",))
_TABLES = ("bounds", "positions", "window", "heads", "kv_heads")
_FLASH = Source(
    "flash", ("q", "k", "v", *_TABLES), ("out",), ("fragment", "load", "attention", "flash", "flash_direct")
)
_FLASH_STAGED = Source("flash_staged", ("q", "k", "v", *_TABLES), ("out",), ("fragment", "load", "attention", "flash"))
_FLASH_SPLIT = Source(
    "flash_split", ("q", "k", "v", *_TABLES), ("out",), ("fragment", "load", "attention", "flash", "flash_split")
)
_SCORES = Source(
    "attention_scores",
    ("q", "k", "bounds", "first", "heads", "kv_heads", "span"),
    ("scores",),
    ("fragment", "load", "gemm"),
)
_SOFTMAX = Source(
    "softmax",
    ("scores", "bounds", "positions", "first", "window"),
    ("weights",),
    ("fragment", "load", "gemm", "attention"),
)
_VALUES = Source(
    "attention_values", ("weights", "v", "bounds", "first", "kv_heads"), ("out",), ("fragment", "load", "gemm")
)

Form = Literal["flash", "flash_staged", "flash_split", "products"]

FLASH_HEAD_DIM = 128
"""The widest head whose queries and outputs fit the registers of one simdgroup."""
_SPLIT_FLOATS = 1024
"""Query rows of a fragment · head_dim / 8: as many queries and outputs are 64 floats a lane in eight simdgroups."""
_SPLIT_THREADGROUPS = 32
"""As many keep the cores of most GPUs (8 to 40) at work; from there on more rows in each save memory traffic."""
_STAGED_KEYS = 128
"""From as many keys a row on, a threadgroup shares them."""
_SCORE_BYTES = 1 << 26
"""Scores of one round, and as much again for their softmax."""
_EVERYTHING = 2**31 - 1


class Bounds(NamedTuple):
    """What the rows of a batch may meet, for one window.

    Attributes:
        rows: [T, 2] int32, the packed rows [lo, hi) that each row may meet.
        positions: [T] int32, −1 where a row holds no token.
        window: inclusive radius in positions.
        keys: host bound on hi − lo of a row.
    """

    rows: mx.array
    positions: mx.array
    window: int
    keys: int


def metal_plan(library: Library, packed: Packed, window: int | None) -> Bounds:
    """`plan` for the Metal forms: one small launch, once for all layers of one window."""
    check_tables(packed)
    radius = _EVERYTHING if window is None else window
    (rows,) = library(_BOUNDS)(
        inputs=[packed.segments, radius],
        template=[],
        grid=(packed.rows, 1, 1),
        threadgroup=(min(packed.rows, 256), 1, 1),
        output_shapes=[(packed.rows, 2)],
        output_dtypes=[mx.int32],
    )
    return Bounds(rows, packed.positions, radius, min(packed.span, 2 * radius + 1, packed.rows))


def metal_attention(library: Library, q: mx.array, k: mx.array, v: mx.array, plan: Bounds) -> mx.array:
    """`attention` for head_dim a multiple of 8, in whichever form fits."""
    check_heads(q, k, v, plan.positions.shape[0])
    _, heads, head_dim = q.shape
    check.multiple("attention", "head_dim", head_dim, 8)
    chosen = form(heads, k.shape[1], head_dim, plan.keys)
    if chosen == "products":
        return product_attention(library, q, k, v, plan)
    if chosen == "flash_split":
        return split_attention(library, q, k, v, plan)
    return flash_attention(library, q, k, v, plan, staged=chosen == "flash_staged")


def form(heads: int, kv_heads: int, head_dim: int, keys: int) -> Form:
    """Which form serves heads of this shape where a row meets at most `keys` rows (tests/test_cost.py has the cost
    model agree)."""
    if head_dim <= FLASH_HEAD_DIM:
        return "flash_staged" if keys >= _STAGED_KEYS else "flash"
    return "flash_split" if splits(heads, kv_heads, head_dim) else "products"


def flash_attention(library: Library, q: mx.array, k: mx.array, v: mx.array, plan: Bounds, *, staged: bool) -> mx.array:
    """Flash attention for head_dim up to 128, direct or staged."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    inputs = (*_flat(q, k, v), plan.rows, plan.positions, plan.window, heads, kv_heads)
    outputs = [(rows, heads * head_dim)]
    if not staged:
        grid = (32, -(-rows // 8), heads)
        return launch(library(_FLASH), *inputs, grid=grid, threadgroup=(32, 4, 1), outputs=outputs, D=head_dim)[0]
    # Two row fragments a simdgroup and 32 keys a block, while registers and threadgroup memory have room for them.
    fragments, block = (2, 32) if head_dim <= 64 else (1, 16)
    threads = TILE // (8 * fragments) * 32
    return launch(
        library(_FLASH_STAGED),
        *inputs,
        grid=(threads, -(-rows // TILE), heads),
        threadgroup=(threads, 1, 1),
        outputs=outputs,
        D=head_dim,
        R=fragments,
        BLOCK=block,
    )[0]


def split_attention(
    library: Library, q: mx.array, k: mx.array, v: mx.array, plan: Bounds, *, fragments: int | None = None
) -> mx.array:
    """Flash attention for the shapes that `splits` accepts.

    Args:
        fragments: one of `split_fragments`; default: the most that leave enough threadgroups.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    blocks = {n: -(-rows // (8 * n // (heads // kv_heads))) for n in split_fragments(head_dim)}
    if fragments is None:
        fragments = next((n for n in blocks if blocks[n] * kv_heads >= _SPLIT_THREADGROUPS), 1)
    return launch(
        library(_FLASH_SPLIT),
        *(*_flat(q, k, v), plan.rows, plan.positions, plan.window, heads, kv_heads),
        grid=(256, blocks[fragments], kv_heads),
        threadgroup=(256, 1, 1),
        outputs=[(rows, heads * head_dim)],
        D=head_dim,
        R=fragments,
    )[0]


def splits(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Does `split_attention` serve this shape? A simdgroup reads 32 columns at once, 8 rows hold a group's heads."""
    return head_dim % 256 == 0 and head_dim <= _SPLIT_FLOATS and heads // kv_heads <= 8


def split_fragments(head_dim: int) -> tuple[int, ...]:
    """The 8-row fragments of queries that a threadgroup of `split_attention` may hold, most first."""
    return tuple(n for n in (4, 2, 1) if n * head_dim <= _SPLIT_FLOATS)


def product_attention(
    library: Library, q: mx.array, k: mx.array, v: mx.array, plan: Bounds, *, score_bytes: int = _SCORE_BYTES
) -> mx.array:
    """Attention as two matrix products around a softmax, in rounds of at most `score_bytes` of scores."""
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    q, k, v = _flat(q, k, v)
    # The keys of a block: of its rows together, whose bounds move by at most a row from each to the next in a segment.
    span = -(-min(rows, 2 * plan.keys + TILE) // 32) * 32
    blocks = -(-rows // TILE)
    size = max(score_bytes // (heads * TILE * span * 4), 1)
    outputs = []
    for first in range(0, blocks, size):
        count = min(size, blocks - first)
        scores = (count, heads, TILE, span)
        (s,) = launch(
            library(_SCORES),
            *(q, k, plan.rows, first, heads, kv_heads, span),
            grid=(-(-span // TILE) * 128, heads, count),
            threadgroup=(128, 1, 1),
            outputs=[scores],
        )
        (weights,) = launch(
            library(_SOFTMAX),
            *(s, plan.rows, plan.positions, first, plan.window),
            grid=(32, heads * TILE, count),
            threadgroup=(32, 4, 1),
            outputs=[scores],
        )
        (out,) = launch(
            library(_VALUES),
            *(weights, v, plan.rows, first, kv_heads),
            grid=(-(-head_dim // TILE) * 128, heads, count),
            threadgroup=(128, 1, 1),
            outputs=[(min(rows - first * TILE, count * TILE), heads * head_dim)],
        )
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _flat(*heads: mx.array) -> tuple[mx.array, ...]:
    """[T, heads, head_dim] → [T, heads·head_dim]."""
    return tuple(x.reshape(x.shape[0], -1) for x in heads)
