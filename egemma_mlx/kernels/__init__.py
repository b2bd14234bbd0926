"""The kernel functions that the models are written over.

Each file holds one family: what it computes, its plain-MLX form, which runs wherever MLX does (`ops`), and its Metal
form, which launches a body of `metal_src/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from egemma_mlx.kernels import attention, attention_metal, fused, gelu, linear, norm, pool, qkv
from egemma_mlx.kernels.library import Library
from egemma_mlx.packing import Packed


@dataclass(frozen=True)
class Kernels:
    """One implementation of every kernel function; a model takes the set as an argument."""

    name: str
    linear: Callable[..., Any]
    matmul: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_norm: Callable[..., Any]
    gelu_mul: Callable[..., Any]
    rope: Callable[..., Any]
    qkv_prep: Callable[..., Any]
    plan: Callable[..., Any]
    attention: Callable[..., Any]
    pool: Callable[..., Any]
    gated: Callable[..., Any]
    linear_gelu_mul: Callable[..., Any]
    linear_rms_norm: Callable[..., Any]
    linear_add_norm: Callable[..., Any]
    linear_unit: Callable[..., Any]
    grids: bool = False
    """Traces depend on how long segments are (`packing.Grid`), which plain operations need for their sizes."""
    exact: Kernels | None = None
    """Of a set that rounds: the one for batches with a text of fewer than `apart` tokens, or few rows."""
    apart: int = 0

    def of(self, packed: Packed) -> Kernels:
        """The set that runs this batch."""
        if self.exact is None or (packed.shortest >= self.apart and packed.rows >= linear.SHORT):
            return self
        return self.exact

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The kernel functions by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if callable(value)}


OPS = Kernels(
    name="ops",
    linear=linear.linear,
    matmul=linear.matmul,
    rms_norm=norm.rms_norm,
    add_norm=norm.add_norm,
    gelu_mul=gelu.gelu_mul,
    rope=qkv.rope,
    qkv_prep=qkv.qkv_prep,
    plan=attention.plan,
    attention=attention.attention,
    pool=pool.pool,
    **fused.composed(fused.Parts(linear.linear, gelu.gelu_mul, norm.rms_norm, norm.add_norm)),
    grids=True,
)


def metal_kernels(library: Library, name: str) -> Kernels:
    """The Metal forms over one library, which decides where they run."""
    return Kernels(
        name=name,
        linear=partial(linear.metal_linear, library),
        matmul=partial(linear.metal_matmul, library),
        rms_norm=partial(norm.metal_rms_norm, library),
        add_norm=partial(norm.metal_add_norm, library),
        gelu_mul=partial(gelu.metal_gelu_mul, library),
        rope=partial(qkv.metal_rope, library),
        qkv_prep=partial(qkv.metal_qkv_prep, library),
        plan=partial(attention_metal.metal_plan, library),
        attention=partial(attention_metal.metal_attention, library),
        pool=partial(pool.metal_pool, library),
        gated=partial(fused.metal_gated, library),
        linear_gelu_mul=partial(fused.metal_linear_gelu_mul, library),
        linear_rms_norm=partial(fused.metal_linear_rms_norm, library),
        linear_add_norm=partial(fused.metal_linear_add_norm, library),
        linear_unit=partial(fused.metal_linear_unit, library),
    )
