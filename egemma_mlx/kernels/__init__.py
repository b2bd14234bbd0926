"""The kernel functions that the models are written over.

Each file holds one family: what it computes, and its plain-MLX form (`ops`), which runs wherever MLX does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from egemma_mlx.kernels.attention import attention, plan
from egemma_mlx.kernels.gelu import gelu_mul
from egemma_mlx.kernels.linear import linear
from egemma_mlx.kernels.norm import add_norm, rms_norm
from egemma_mlx.kernels.pool import pool
from egemma_mlx.kernels.qkv import qkv_prep, rope


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
    linear=linear,
    rms_norm=rms_norm,
    add_norm=add_norm,
    gelu_mul=gelu_mul,
    rope=rope,
    qkv_prep=qkv_prep,
    plan=plan,
    attention=attention,
    pool=pool,
)
