"""`python -m egemma_mlx.bench kernels`: our kernels beside the seed's, in counted work."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from executors import simulated

from egemma_mlx.bench.kernels import REASONS, SEED, Comparison, comparisons

pytestmark = simulated


@pytest.fixture(scope="module")
def compared() -> list[Comparison]:
    return list(comparisons(SEED if SEED.is_file() else None))


def test_fragments_leave_room_in_the_registers(compared: list[Comparison]) -> None:
    assert all(0 < result.ours.fragment_floats <= 96 for result in compared)


@pytest.mark.skipif(not SEED.is_file(), reason="the seed's kernels are not at hand")
def test_no_kernel_multiplies_more_than_the_seeds(compared: list[Comparison]) -> None:
    assert {result.kernel for result in compared} == {"linear", "linear_short", "matmul", "flash", "flash_staged"}
    for result in compared:
        assert result.seed is not None
        assert result.ours.multiply_accumulates <= result.seed.multiply_accumulates


@pytest.mark.skipif(not SEED.is_file(), reason="the seed's kernels are not at hand")
def test_a_higher_figure_has_its_reason(compared: list[Comparison]) -> None:
    assert {(result.kernel, figure) for result in compared for figure in result.worse()} == set(REASONS)


def test_the_table_is_printed() -> None:
    program = [sys.executable, "-m", "egemma_mlx.bench", "kernels", "--json"]
    rows = json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    assert rows and all(row["ours"]["multiply_accumulates"] > 0 for row in rows)
