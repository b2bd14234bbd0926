"""Apple GPUs as the roofline sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Core:
    """One GPU core. "metal-benchmarks" is philipturner/metal-benchmarks, measured on Apple 7 and 8.

    Attributes:
        alus: float32 multiply-adds in a clock (metal-benchmarks).
        matrix_ceiling: the part of the peak that 8×8 float32 matrix products reach: 3.4 of 3.76 TFLOP/s on the M4 with
            ten cores (published by cortiq, whose kernels this project started from). Taken for all: an estimate.
        load_bytes: of device memory that pass into or out of a core in a clock, through its caches (DESIGN §3).
        request_bytes: which a lane's request moves at least: a load of four bytes takes as long as one of eight. An
            estimate, fitted to one figure: cortiq's direct flash attention, which reads 8×8 fragments element by
            element, at 0.8 TFLOP/s.
        shared_bytes: of threadgroup memory that a core loads or stores in a clock: an estimate, half of 32 banks of
            four bytes. They and device memory share the core's one load and store unit, so their times add up.
        simdgroups: that a core needs to reach its peak: one for each scheduler of 32 ALUs (metal-benchmarks).
        shared_memory: bytes of threadgroup memory (metal-benchmarks).
        most_threads: at 32 registers each, of a register file of 384 KB (metal-benchmarks).
        matrix_threads: the same at 128 registers, which kernels full of fragments are taken to use.
    """

    alus: int = 128
    matrix_ceiling: float = 0.9
    load_bytes: int = 32
    request_bytes: int = 8
    shared_bytes: int = 64
    simdgroups: int = 4
    shared_memory: int = 64 << 10
    most_threads: int = 3072
    matrix_threads: int = 768


LAUNCH_OVERHEADS = (1e-6, 3e-6, 10e-6)
"""Seconds between two dependent launches in one command buffer: an estimate, hence three of them."""

DEFAULT_OVERHEAD = 3e-6


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        cores: GPU cores.
        clock: Hz.
        bandwidth: of DRAM, bytes a second.
        source: where the figures are from; what is an estimate says so.
        core: alike in all, as far as is published.
    """

    name: str
    cores: int
    clock: float
    bandwidth: float
    source: str
    core: Core = Core()

    @property
    def peak(self) -> float:
        """Float32 FLOP/s: cores · ALUs · 2 · clock."""
        return self.cores * self.core.alus * 2 * self.clock

    @property
    def matrix_peak(self) -> float:
        """Float32 FLOP/s of 8×8 matrix products."""
        return self.core.matrix_ceiling * self.peak


DEVICES = {
    device.name: device
    for device in (
        Device("M1", 8, 1.278e9, 68.25e9, "metal-benchmarks (2.617 TFLOP/s); Apple: LPDDR4X-4266, 68.25 GB/s"),
        Device("M2", 10, 1.398e9, 102.4e9, "metal-benchmarks (3.579 TFLOP/s); Apple: 100 GB/s, LPDDR5-6400"),
        Device("M4", 10, 1.470e9, 120e9, "hmc-tech.com (1470 MHz, 3.76 TFLOP/s); Apple: 120 GB/s"),
        Device("M4 Pro", 20, 1.470e9, 273e9, "hmc-tech.com (1470 MHz); Apple: 20 cores, 273 GB/s"),
        Device("M5 Max", 40, 1.740e9, 614e9, "Apple: 40 cores, 614 GB/s; clock of the M5 (hmc-tech.com), an estimate"),
    )
}
