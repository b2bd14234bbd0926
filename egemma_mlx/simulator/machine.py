"""Runs one compiled kernel: arrays in, arrays and counters out, or an error with the line that made it."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from egemma_mlx.simulator.compiler import compile_runtime
from egemma_mlx.simulator.errors import (
    DataRace,
    Divergence,
    Misaligned,
    OutOfBounds,
    ReadOnlyStore,
    ResourceLimit,
    SimulatorError,
    UninitialisedRead,
)

MOST_BUFFERS = 31
MOST_THREADS = 1024

# In the order of the runtime's `Fault`.
FAULTS: tuple[type[SimulatorError], ...] = (
    OutOfBounds,
    Misaligned,
    ReadOnlyStore,
    DataRace,
    Divergence,
    UninitialisedRead,
    ResourceLimit,
)


@dataclass
class Buffer:
    """One [[buffer(n)]]: a C-contiguous array (bfloat16 as uint16), which the kernel fills if it is writable.

    `initialised` False means that reading an element which the kernel has not written is an error, as it is of an
    output without init_value.
    """

    name: str
    array: np.ndarray[Any, Any]
    writable: bool = False
    constant: bool = False
    initialised: bool = True


@dataclass(frozen=True)
class Options:
    """How to run a kernel.

    Attributes:
        checked: what the library was compiled for. An unchecked kernel counts no bytes, and a wild access of it ends
            the process.
        order: in which order threadgroups, simdgroups and lanes run. A correct kernel gives the same in both.
        access_budget: memory accesses and simd operations after which the kernel is taken to run forever.
    """

    checked: bool = True
    order: Literal["forward", "reversed"] = "forward"
    access_budget: int = 1 << 40


_PEAKS = ("threadgroup_memory", "fragment_floats")


@dataclass(frozen=True)
class Counters:
    """What a launch did: exact for the program, and silent about caches. Bytes are summed over lanes.

    Barriers are counted once a threadgroup or simdgroup, simd operations and 8×8×8 multiply-accumulates once a
    simdgroup, atomics once a thread. `per_buffer` has bytes loaded and stored, `threadgroup_memory` the bytes of one
    threadgroup, `fragment_floats` the most 32-bit registers that one lane's matrices fill at a time (as the kernel is
    written: a compiler may do with fewer).
    """

    device_load_bytes: int = 0
    device_store_bytes: int = 0
    constant_load_bytes: int = 0
    threadgroup_load_bytes: int = 0
    threadgroup_store_bytes: int = 0
    multiply_accumulates: int = 0
    threadgroup_barriers: int = 0
    simdgroup_barriers: int = 0
    simd_operations: int = 0
    atomics: int = 0
    threads: int = 0
    threadgroups: int = 0
    threadgroup_memory: int = 0
    fragment_floats: int = 0
    per_buffer: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __add__(self, other: Counters) -> Counters:
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in dataclasses.fields(self)
            if item.name not in ("per_buffer", *_PEAKS)
        }
        buffers = dict(self.per_buffer)
        for name, (loaded, stored) in other.per_buffer.items():
            before = buffers.get(name, (0, 0))
            buffers[name] = (before[0] + loaded, before[1] + stored)
        peaks = {name: max(getattr(self, name), getattr(other, name)) for name in _PEAKS}
        return Counters(**sums, **peaks, per_buffer=buffers)


def run(
    library: Path,
    entry: str,
    buffers: Sequence[Buffer],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    options: Options = Options(),
) -> Counters:
    """Runs every thread of a launch and fills the arrays of writable buffers.

    Args:
        library: from compile_kernel, with the same `checked` as the options.
        entry: the thunk in it.
        buffers: in the order of their [[buffer(n)]] indices.
        grid: threads in x, y and z; threadgroups at its edges are smaller where it does not divide.
        threadgroup: threads of one in x, y and z.

    Raises:
        SimulatorError: a subclass for each kind of fault; the message begins with file and line of the kernel. Arrays
            are left alone then.
    """
    _check_limits(entry, buffers, threadgroup)
    with _lock:
        runtime, kernel = _runtime(), _load(library)
        natives = (_Buffer * max(1, len(buffers)))(*map(_native, buffers))
        result = _Result()
        runs = runtime.msl_run(
            ctypes.cast(getattr(kernel, entry), ctypes.c_void_p),
            natives,
            len(buffers),
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*threadgroup),
            ctypes.byref(_Options(options.checked, options.order == "reversed", options.access_budget)),
            ctypes.byref(result),
        )
    if not runs:
        raise ResourceLimit(f"{entry}: no address space for {sum(buffer.array.nbytes for buffer in buffers)} bytes")
    if result.report.fault:
        raise _error(library, result.report)
    return _counters(buffers, natives, result)


def _check_limits(entry: str, buffers: Sequence[Buffer], threadgroup: Sequence[int]) -> None:
    if len(buffers) > MOST_BUFFERS:
        raise ResourceLimit(f"{entry}: {len(buffers)} buffers, Metal allows {MOST_BUFFERS}")
    x, y, z = threadgroup
    if not 0 < x * y * z <= MOST_THREADS:
        raise ResourceLimit(f"{entry}: {x * y * z} threads in a threadgroup, Metal allows 1 to {MOST_THREADS}")
    for buffer in buffers:
        if not buffer.array.flags.c_contiguous:
            raise SimulatorError(f"{entry}: the array of buffer {buffer.name} is not C-contiguous")


def _error(library: Path, report: _Report) -> SimulatorError:
    from egemma_mlx.simulator import symbols  # needs pyelftools, whose absence `available` explains

    place, other = (
        symbols.locate(library, site) if site else "unknown place" for site in (report.site, report.other_site)
    )
    message: str = report.message.decode()
    fault: type[SimulatorError] = FAULTS[report.fault - 1]
    return fault(f"{place}: {message.replace('{other}', other)}")


def _native(buffer: Buffer) -> _Buffer:
    array = buffer.array
    name = f"buffer {buffer.name}".encode()
    flags = (buffer.writable, buffer.constant, buffer.initialised)
    return _Buffer(name, array.ctypes.data, array.nbytes, array.itemsize, *flags)


def _counters(buffers: Sequence[Buffer], natives: ctypes.Array[_Buffer], result: _Result) -> Counters:
    pairs = list(zip(buffers, natives, strict=False))
    counts = result.counts
    return Counters(
        device_load_bytes=sum(native.loaded for buffer, native in pairs if not buffer.constant),
        device_store_bytes=sum(native.stored for _, native in pairs),
        constant_load_bytes=sum(native.loaded for buffer, native in pairs if buffer.constant)
        + result.program_constants_loaded,
        threadgroup_load_bytes=result.threadgroup_loaded,
        threadgroup_store_bytes=result.threadgroup_stored,
        fragment_floats=counts.fragment_bytes // 4,
        **{name: getattr(counts, name) for name, _ in _Counts._fields_ if name != "fragment_bytes"},
        per_buffer={buffer.name: (native.loaded, native.stored) for buffer, native in pairs},
    )


# ---- the runtime's structures (native/runtime/host.h); its state is the process's, so one kernel runs at a time

_lock = threading.Lock()


class _Counts(ctypes.Structure):
    _fields_ = (
        ("multiply_accumulates", ctypes.c_uint64),
        ("threadgroup_barriers", ctypes.c_uint64),
        ("simdgroup_barriers", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("atomics", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("threadgroups", ctypes.c_uint64),
        ("threadgroup_memory", ctypes.c_uint64),
        ("fragment_bytes", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("fault", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("other_site", ctypes.c_uint32),
        ("message", ctypes.c_char * 1024),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("counts", _Counts),
        ("threadgroup_loaded", ctypes.c_uint64),
        ("threadgroup_stored", ctypes.c_uint64),
        ("program_constants_loaded", ctypes.c_uint64),
        ("report", _Report),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("checked", ctypes.c_uint32),
        ("reversed", ctypes.c_uint32),
        ("access_budget", ctypes.c_uint64),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item_bytes", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("constant", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
    )


@functools.cache
def _runtime() -> ctypes.CDLL:
    # Global, so that kernels find the functions that they call.
    return ctypes.CDLL(str(compile_runtime()), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))
