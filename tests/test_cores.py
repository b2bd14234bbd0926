"""Attention on all cores of a CPU gives what plain attention gives."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import blas
from egemma_mlx.kernels import OPS, cores
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.packing import pack

pytestmark = pytest.mark.skipif(not on_cpu(), reason="for CPUs")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = blas.set_threads(2)
    yield
    if before is not None:
        blas.set_threads(before)


def qkv(rows: int, heads: int = 6, kv_heads: int = 3, head_dim: int = 16) -> list[mx.array]:
    random = np.random.default_rng(0)
    shapes = ((rows, heads, head_dim), (rows, kv_heads, head_dim), (rows, kv_heads, head_dim))
    return [mx.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("lengths", [(1,), (300,), (7, 300, 300, 12)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scale", [1, 3, 30], ids=["bounded", "some heads bounded", "large"])
def test_equals_plain_attention(lengths: tuple[int, ...], window: int | None, scale: int) -> None:
    q, k, v = qkv(sum(lengths))
    arrays = q * mx.linspace(0.1, scale, q.shape[1])[:, None], k, v
    plan = OPS.plan(pack([np.zeros(n, np.int32) for n in lengths]), window)
    found, expected = cores.attention(*arrays, plan), OPS.attention(*arrays, plan)
    assert found.shape == expected.shape
    # What a score is rounded by is the relative error of its weight.
    longest = [float(mx.linalg.norm(x, axis=-1).max()) for x in arrays[:2]]
    assert float(mx.abs(found - expected).max()) < 2e-6 + 1e-7 * math.prod(longest)


def test_bounds_do_not_overflow() -> None:
    """Rows and keys of the greatest length that takes no shift, all alike, so that all scores are the greatest."""
    length, rows = (cores.plain.BOUND * 0.999) ** 0.5, 4096
    q = mx.full((rows, 1, 1), length)
    v = mx.random.normal((rows, 1, 1))
    found = cores.attention(q, q, v, OPS.plan(pack([np.zeros(rows, np.int32)]), None))
    assert float(mx.abs(found - v.mean()).max()) < 1e-5
    found = cores.attention(-q, q, v, OPS.plan(pack([np.zeros(rows, np.int32)]), None))
    assert float(mx.abs(found - v.mean()).max()) < 1e-5


def test_threads_may_share_it_and_the_blas_has_its_threads_again() -> None:
    arrays = qkv(40)
    mx.eval(arrays)
    plan = OPS.plan(pack([np.zeros(40, np.int32)]), None)
    expected = np.array(OPS.attention(*arrays, plan))
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(np.array(cores.attention(*arrays, plan)))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all(np.abs(each - expected).max() < 5e-6 for each in found)
    assert blas.set_threads(2) in (2, None)


def test_only_plain_attention_is_replaced() -> None:
    assert cores.on_all_cores(OPS).attention is cores.attention
    other = replace(OPS, attention=lambda *_: None)
    assert cores.on_all_cores(other) is other
