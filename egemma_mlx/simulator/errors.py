"""What the simulator reports. Every message begins with the file and line of the kernel body."""

from __future__ import annotations

from egemma_mlx.errors import EgemmaError


class SimulatorError(EgemmaError):
    """A kernel did what no Metal GPU defines, or the simulator cannot run here."""


class NoCompiler(SimulatorError):
    """No clang, or a machine that the simulator does not run on."""


class CompileError(SimulatorError):
    """Clang refused the source: syntax, types, address spaces."""


class OutOfBounds(SimulatorError):
    """An access outside every buffer, threadgroup variable and array."""


class Misaligned(SimulatorError):
    """An access at an address that is no multiple of its size."""


class ReadOnlyStore(SimulatorError):
    """A store to an input buffer."""


class DataRace(SimulatorError):
    """Two accesses of one element, one of them a write, with no barrier between them."""


class Divergence(SimulatorError):
    """A barrier, simd or matrix operation that not every thread reaches, or not with the same operands."""


class UninitialisedRead(SimulatorError):
    """A read of memory that nothing has written."""


class ResourceLimit(SimulatorError):
    """More threadgroup memory, buffers, threads or steps than there are."""
