"""The GEMM and flash kernels beside those they started from, in counted work: `python -m egemma_mlx.bench kernels`.

Both run under the simulator on the same inputs. Counts are exact for the program (8×8×8 multiply-accumulates, bytes as
the lanes ask for them, barriers a threadgroup or simdgroup passes) and say nothing of caches or clocks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import attention_metal, linear
from egemma_mlx.kernels.backend import simulator_library
from egemma_mlx.kernels.library import Library
from egemma_mlx.packing import pack
from egemma_mlx.simulator import Counters, Kernel, metal_kernel, session

SEED = Path(__file__).parents[2].parent / "shared" / "seed" / "egemma2_msl.metal"
"""The kernel library that this project started from, where a checkout has it beside it."""


@dataclass(frozen=True)
class Work:
    """What one launch did."""

    multiply_accumulates: int
    device_bytes: int
    threadgroup_bytes: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    fragment_floats: int
    threadgroup_memory: int

    @classmethod
    def of(cls, counters: Counters) -> Work:
        c = counters
        return cls(
            multiply_accumulates=c.multiply_accumulates,
            device_bytes=c.device_load_bytes + c.device_store_bytes,
            threadgroup_bytes=c.threadgroup_load_bytes + c.threadgroup_store_bytes,
            threadgroup_barriers=c.threadgroup_barriers,
            simdgroup_barriers=c.simdgroup_barriers,
            fragment_floats=c.fragment_floats,
            threadgroup_memory=c.threadgroup_memory,
        )


@dataclass(frozen=True)
class Comparison:
    """One kernel on one shape: ours, and the seed's where it is at hand."""

    kernel: str
    shape: str
    ours: Work
    seed: Work | None

    def worse(self) -> list[str]:
        """The figures that are higher than the seed's."""
        if self.seed is None:
            return []
        seed = asdict(self.seed)
        return [name for name, figure in asdict(self.ours).items() if figure > seed[name]]


# Why a figure may be higher than the seed's.
REASONS = {
    ("linear", "fragment_floats"): "32 × 64 sums a simdgroup, weights straight into fragments: two fifths of the "
    "threadgroup traffic, an eighth of the barriers",
    ("linear", "threadgroup_memory"): "two slices of x in turn, so that one barrier a slice is enough",
    ("linear", "device_bytes"): "both simdgroups that work on a column read its weights, for 32 rows each",
    ("linear_short", "device_bytes"): "sixteen columns a threadgroup, so that all cores read weights: each reads x",
    ("flash", "fragment_floats"): "scores stay in fragments instead of threadgroup memory",
    ("flash_staged", "fragment_floats"): "two row fragments a simdgroup: a key is loaded once for sixteen rows",
    ("flash", "device_bytes"): "every row's positions and bounds are read, for windows, holes and packed neighbours",
    ("flash_staged", "device_bytes"): "every row's positions and bounds are read, for windows, holes and neighbours",
    ("flash_staged", "threadgroup_barriers"): "blocks lie on the packed row: one over several segments visits the keys "
    "of each (and no segment of a few rows fills a block alone)",
}


def comparisons(seed: Path | None) -> Iterator[Comparison]:
    """Run every kernel on every shape.

    Args:
        seed: the MSL file to compare with, or None.
    """
    peer = None if seed is None else _Seed(seed.read_text(encoding="utf-8"))
    library = simulator_library()
    long, short = ((64, 512, 512), (100, 192, 96), (256, 1024, 512)), ((1, 512, 512), (16, 1024, 512), (64, 512, 512))
    for name, shapes in (("linear", long), ("linear_short", short)):
        for rows, columns, depth in shapes:
            x, w = _normal(rows, depth), _normal(columns, depth)
            run = partial(_linear, library, x, w, short=name == "linear_short")
            yield _compare(name, f"{rows}×{depth} · {columns}×{depth}ᵀ", run, peer, x, w)
    for rows, columns, depth in ((64, 256, 512), (100, 256, 96)):
        p, v = _normal(rows, depth), _normal(depth, columns)
        run = partial(linear.metal_matmul, library, p, v)
        yield _compare("matmul", f"{rows}×{depth} · {depth}×{columns}", run, peer, p, v)
    for lengths in ((256,), (45, 32, 7), (45, 70), (8,) * 12):
        q, k, v = _normal(sum(lengths), 2, 64), _normal(sum(lengths), 1, 64), _normal(sum(lengths), 1, 64)
        shape = f"{'+'.join(map(str, lengths[:4]))}{'…' if len(lengths) > 4 else ''} rows, 2 heads over 1 of 64"
        bounds = attention_metal.metal_plan(library, pack([np.zeros(n, np.int32) for n in lengths]), None)
        for name in ("flash", "flash_staged"):
            staged = name == "flash_staged"
            run = partial(attention_metal.flash_attention, library, q, k, v, bounds, staged=staged)
            yield _compare(name, shape, run, peer, q, k, v, lengths)


def _linear(library: Library, x: mx.array, w: mx.array, *, short: bool) -> mx.array:
    return linear.metal_linear(library, x, w, short=short)[0]


def _compare(kernel: str, shape: str, run: Callable[[], mx.array], peer: _Seed | None, *inputs: Any) -> Comparison:
    with session() as log:
        got = run()
    ours = Work.of(log.total)
    if peer is None:
        return Comparison(kernel, shape, ours, None)
    with session() as log:
        expected = getattr(peer, kernel)(*inputs)
    difference = float(mx.abs(got - expected).max() / mx.abs(expected).max())
    if not difference <= 2e-5:
        raise EgemmaError(f"[bench] expected {kernel} on {shape} to equal the seed's but it is {difference:.1e} off")
    return Comparison(kernel, shape, ours, Work.of(log.total))


class _Seed:
    """The seed's kernels, called from a kernel of ours that hands them its buffers (which only the simulator allows).

    They take their parameters in structs, one for each grid z or one in `constant` memory.
    """

    _THREAD = (
        "thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup, "
        "threadgroup_position_in_grid"
    )

    def __init__(self, text: str) -> None:
        header = f'#line 1 "seed.metal"\n{text}'
        self._gemm = {
            name: _kernel(
                f"seed_{name}",
                ("x", "w", "items"),
                f"eg_mm_{name}(x, w, w, w, out, (device const EgMm*)items, {self._THREAD});\n",
                header,
            )
            for name in ("nt", "nn")
        }
        self._flash = {
            name: _kernel(
                f"seed_{name}",
                ("qkv", "segments", "parameters"),
                f"eg_{name}(qkv, out, segments, *(constant EgFlash*)parameters, {arguments});\n",
                header,
            )
            for name, arguments in (("flash64", self._THREAD.split(", ", 1)[1]), ("flash64s", self._THREAD))
        }

    def linear(self, x: mx.array, w: mx.array) -> mx.array:
        return self._product("nt", x, w, w.shape[0])

    linear_short = linear

    def matmul(self, p: mx.array, v: mx.array) -> mx.array:
        return self._product("nn", p, v, v.shape[1])

    def flash(self, *inputs: Any) -> mx.array:
        return self._attention("flash64", 32, *inputs)

    def flash_staged(self, *inputs: Any) -> mx.array:
        return self._attention("flash64s", 64, *inputs)

    def _product(self, name: str, x: mx.array, w: mx.array, columns: int) -> mx.array:
        rows, depth = x.shape
        item = np.array([rows, columns, depth, depth, w.shape[1], columns, 0, 0, 0, 0, depth, 0], np.uint32)
        item[9:10].view(np.float32)[:] = 1.0  # alpha
        return _launch(
            self._gemm[name], [x, w, mx.array(item)], (-(-rows // 64), -(-columns // 64), 1), 128, (rows, columns)
        )

    def _attention(
        self, name: str, tile: int, q: mx.array, k: mx.array, v: mx.array, lengths: Sequence[int]
    ) -> mx.array:
        rows, heads, head_dim = q.shape
        kv_heads, width = k.shape[1], heads * head_dim
        qkv = mx.concatenate([x.reshape(rows, -1) for x in (q, k, v)], axis=1)
        qkv = mx.pad(qkv, [(0, 64), (0, 0)])  # it reads up to 31 rows past a segment, and a whole tile of queries
        stride, k_at = qkv.shape[1], width
        fields = [stride, 0, k_at, k_at + kv_heads * head_dim, width, heads, heads // kv_heads, 0]
        parameters = np.array(fields, np.uint32)
        parameters[7:].view(np.float32)[:] = 1.0  # scale
        starts = np.cumsum([0, *lengths])[:-1]
        segments = np.zeros((max(len(lengths), 4), 2), np.uint32)  # eight elements: below, MLX binds `constant` memory
        segments[: len(lengths)] = np.stack([starts, lengths], axis=1)
        return _launch(
            self._flash[name],
            [qkv, mx.array(segments), mx.array(parameters.view(np.uint64))],
            (-(-max(lengths) // tile), heads, len(lengths)),
            4 * tile,
            (rows, width),
        )


def _kernel(name: str, inputs: Sequence[str], body: str, header: str) -> Kernel:
    return metal_kernel(name=name, input_names=inputs, output_names=["out"], source=body, header=header)


def _launch(
    kernel: Kernel, inputs: list[mx.array], groups: tuple[int, int, int], threads: int, output: tuple[int, ...]
) -> mx.array:
    return kernel(
        inputs=inputs,
        grid=(groups[0] * threads, groups[1], groups[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[output],
        output_dtypes=[mx.float32],
    )[0]


def _normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


# --- report ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=Path, help="MSL file to compare with (default: ../shared/seed, where it exists)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> None:
    seed = arguments.seed or (SEED if SEED.is_file() else None)
    results = list(comparisons(seed))
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return
    if seed is None:
        print("The seed's kernels are not at hand (--seed FILE): ours alone.", file=sys.stderr)
    names = list(Work.__dataclass_fields__)
    print(f"| kernel | shape | | {' | '.join(name.replace('_', ' ') for name in names)} |")
    print(f"|{'---|' * (len(names) + 3)}")
    for result in results:
        for who, work in (("ours", result.ours), ("seed", result.seed)):
            if work is not None:
                cells = " | ".join(f"{figure:,}" for figure in asdict(work).values())
                print(f"| {result.kernel} | {result.shape} | {who} | {cells} |")
    worse = sorted({(result.kernel, name) for result in results for name in result.worse()})
    for kernel, name in worse:
        print(
            f"\n{kernel}, {name.replace('_', ' ')} above the seed's: {REASONS.get((kernel, name), 'no reason known')}."
        )
