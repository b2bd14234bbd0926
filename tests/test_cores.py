"""Layers in parts, a core each, give what they give together."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import blas
from egemma_mlx.kernels import OPS, Kernels, cores
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.norm import normalize
from egemma_mlx.packing import Packed, pack

pytestmark = pytest.mark.skipif(not on_cpu(), reason="for CPUs")

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 32, 6, 3, 16


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cores, "_FEWEST", 1)
    before = blas.set_threads(2)
    yield
    if before is not None:
        blas.set_threads(before)


class Layers:
    """Two layers of attention and a residual add, over every argument that layers have."""

    def __init__(self, scale: float = 1.0) -> None:
        random = np.random.default_rng(0)
        self.calls = 0
        self.scales = mx.linspace(0.1, scale, HEADS)[:, None]
        widths = [(HEADS * HEAD_DIM, WIDTH), (KV_HEADS * HEAD_DIM, WIDTH), (KV_HEADS * HEAD_DIM, WIDTH)]
        self.weights = [mx.array(random.standard_normal(shape).astype(np.float32) * 0.2) for shape in widths]
        self.out = mx.array(random.standard_normal((WIDTH, HEADS * HEAD_DIM)).astype(np.float32) * 0.2)
        mx.eval(self.scales)

    def __call__(self, h: mx.array, positions: mx.array, packed: Packed, table: mx.array, kernels: Kernels) -> mx.array:
        self.calls += 1
        self.kernels = kernels
        plan = kernels.plan(packed, None)
        h = h + table[positions]
        for _ in range(2):
            q, k, v = (x.reshape(len(x), -1, HEAD_DIM) for x in kernels.linear(h, *self.weights))
            attended = kernels.attention(normalize(q) * self.scales, normalize(k), v, plan)
            h = h + kernels.linear(attended, self.out)[0]
        return h


def batch(*lengths: int) -> tuple[mx.array, mx.array, Packed, mx.array]:
    random, packed = np.random.default_rng(1), pack([np.zeros(n, np.int32) for n in lengths])
    h, table = (mx.array(random.standard_normal((n, WIDTH)).astype(np.float32)) for n in (packed.rows, max(lengths)))
    return h, packed.positions, packed, table


@pytest.mark.parametrize("lengths", [(2,), (301,), (700,), (7, 300, 300, 12), (1,) * 5])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("scale", [1, 100], ids=["bounded", "some heads bounded"])
def test_in_parts_as_together(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], count: int, scale: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    layers, arguments = Layers(scale), batch(*lengths)
    expected = cores.together(layers, *arguments, OPS)
    assert layers.calls == 1
    found = cores.apart(layers, *arguments, OPS)
    assert layers.calls == 1 + min(count, sum(lengths))
    assert found.shape == expected.shape
    assert float(mx.abs(found - expected).max()) < 1e-5 * scale


@pytest.mark.parametrize("lengths", [(2,), (300,), (7, 300, 300, 12)])
@pytest.mark.parametrize("scale", [1, 3, 30], ids=["bounded", "some heads bounded", "large"])
def test_attention_in_parts_equals_plain_attention(lengths: tuple[int, ...], scale: float) -> None:
    random, packed = np.random.default_rng(0), pack([np.zeros(n, np.int32) for n in lengths])
    shapes = [(packed.rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (mx.array(random.standard_normal(shape).astype(np.float32)) for shape in shapes)
    q = q * mx.linspace(0.1, scale, HEADS)[:, None]
    mx.eval(q)

    def layers(rows: mx.array, _: mx.array, packed: Packed, __: Any, kernels: Kernels) -> mx.array:
        return kernels.attention(q[rows], k[rows], v[rows], kernels.plan(packed, None))

    rows = mx.arange(packed.rows)
    found, expected = (run(layers, rows, rows, packed, None, OPS) for run in (cores.apart, cores.together))
    assert found.shape == expected.shape
    # What a score is rounded by is the relative error of its weight.
    longest = [float(mx.linalg.norm(x, axis=-1).max()) for x in (q, k)]
    assert float(mx.abs(found - expected).max()) < 2e-6 + 1e-7 * math.prod(longest)


def test_bounds_do_not_overflow() -> None:
    """Rows and keys of the greatest length that takes no shift, all alike, so that all scores are the greatest."""
    length, rows = (cores.plain.BOUND * 0.999) ** 0.5, 4096
    q, v = mx.full((rows, 1, 1), length), mx.random.normal((rows, 1, 1))
    packed = pack([np.zeros(rows, np.int32)])
    mx.eval(q)
    for sign in (1, -1):

        def layers(
            _: mx.array, values: mx.array, rows: Packed, __: Any, kernels: Kernels, sign: int = sign
        ) -> mx.array:
            here = q[: len(values)]
            return kernels.attention(sign * here, here, values, kernels.plan(rows, None))

        found = cores.apart(layers, v, v, packed, None, OPS)
        assert float(mx.abs(found - v.mean()).max()) < 1e-5


def test_the_blas_has_its_threads_again() -> None:
    cores.apart(Layers(), *batch(40), OPS)
    assert blas.set_threads(2) in (2, None)


def test_an_error_in_a_part_ends_all_and_is_the_one_that_is_raised() -> None:
    class Failing(Layers):
        def __call__(self, h: mx.array, positions: mx.array, *arguments: Any) -> mx.array:
            if positions[0].item() > 0:
                raise ValueError("in a part")
            return super().__call__(h, positions, *arguments)

    for _ in range(3):
        with pytest.raises(ValueError, match="in a part"):
            cores.apart(Failing(), *batch(40), OPS)
    assert blas.set_threads(2) in (2, None)
    assert cores.apart(Layers(), *batch(40), OPS).shape == (40, WIDTH)


def test_callers_at_once() -> None:
    arguments = batch(300)
    mx.eval(list(arguments[:2]), arguments[3])
    layers = Layers()
    expected = np.array(cores.together(layers, *arguments, OPS))
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: found.append(np.array(cores.apart(layers, *arguments, OPS)))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(np.abs(each - expected).max() < 5e-6 for each in found)
    assert blas.set_threads(2) in (2, None)


def test_which_rows_go_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(kernels: Kernels = OPS, packed: Packed | None = None) -> tuple[int, bool]:
        """How many parts, and whether they are evaluated one function at a time."""
        layers, (h, positions, rows, table) = Layers(), batch(40)
        cores.apart(layers, h, positions, packed or rows, table, kernels)
        return layers.calls, layers.kernels is not kernels

    assert calls() == (2, True)
    assert calls(replace(OPS, attention=partial(OPS.attention))) == (1, False)  # other kernels
    assert calls(packed=batch(40)[2].anonymous()) == (1, False)  # lengths that only the device knows
    with blas.one_thread():
        assert calls() == (1, True)  # a batch beside others
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert calls() == (10, True)
    monkeypatch.setattr(cores, "_FEWEST", 21)
    assert calls() == (1, True)  # few rows
