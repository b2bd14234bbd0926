"""The kernel functions that the models are written over.

Each file holds one family: what it computes, and its plain-MLX form (`ops`), which runs wherever MLX does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from egemma_mlx.kernels import attention, gelu, linear, norm, pool, qkv


@dataclass(frozen=True)
class Kernels:
    """One implementation of every kernel function; a model takes the set as an argument."""

    name: str
    linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_norm: Callable[..., Any]
    gelu_mul: Callable[..., Any]
    rope: Callable[..., Any]
    qkv_prep: Callable[..., Any]
    plan: Callable[..., Any]
    attention: Callable[..., Any]
    pool: Callable[..., Any]


OPS = Kernels(
    name="ops",
    linear=linear.linear,
    rms_norm=norm.rms_norm,
    add_norm=norm.add_norm,
    gelu_mul=gelu.gelu_mul,
    rope=qkv.rope,
    qkv_prep=qkv.qkv_prep,
    plan=attention.plan,
    attention=attention.attention,
    pool=pool.pool,
)
