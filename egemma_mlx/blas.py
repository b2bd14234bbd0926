"""A real BLAS for MLX's Linux CPU build.

MLX's CPU wheel bundles the reference BLAS, 20–100 times slower than OpenBLAS. `load` finds a real BLAS and writes its
functions into the jump slots of libmlx.so: the words, one per imported function, through which libmlx calls
cblas_sgemm and its like, and which the dynamic linker filled with the reference BLAS (PLT hooking; the structures are
those of <elf.h> and <link.h>).

Loading the BLAS with RTLD_GLOBAL before MLX would do the same to libmlx, but only in that order, only for a library
that exports the plain names (scipy-openblas32 prefixes its own), and not to libmlx alone: torch, LAPACK and whatever
else asks the process for a BLAS would get this one too.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import struct
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import EgemmaError

VARIABLE = "EGEMMA_BLAS"
REFERENCE = "reference (slow)"


@dataclass(frozen=True)
class Blas:
    """The BLAS that MLX's CPU products run on."""

    name: str
    path: str | None  # the library's file; None where MLX keeps its own
    reason: str  # where it comes from, or why MLX keeps its own


@functools.cache
def load() -> Blas:
    """Points MLX at the best BLAS of this machine, before or after `import mlx.core`; acts once per process.

    Leaves macOS, CUDA and every other build of MLX but the Linux CPU wheel alone. `EGEMMA_BLAS` overrides the search:
    `auto` (the default), `none` (keep the reference BLAS), or the path or soname of a library that exports
    cblas_sgemm with 32-bit integers.

    Raises:
        EgemmaError: `EGEMMA_BLAS` names a library that cannot be loaded or is no such BLAS.
    """
    libmlx = _cpu_wheel()
    if libmlx is None:
        return Blas("MLX's own", None, "this is not MLX's Linux CPU wheel")
    choice = os.environ.get(VARIABLE) or "auto"
    if choice == "none":
        return Blas(REFERENCE, None, f"{VARIABLE}=none")
    slots = _jump_slots(ctypes.CDLL(str(libmlx)), b"cblas_")
    if "cblas_sgemm" not in slots:
        return Blas(REFERENCE, None, f"{libmlx} calls no cblas_sgemm through a jump slot")
    if choice != "auto":
        try:
            return _redirect(slots, choice, f"{VARIABLE}={choice}")
        except _UNUSABLE as error:
            raise EgemmaError(
                f"{VARIABLE}: expected auto, none or a library that exports cblas_sgemm with 32-bit integers, "
                f"but got {choice!r}: {error}"
            ) from None
    for library, origin in _candidates():
        with contextlib.suppress(*_UNUSABLE):
            return _redirect(slots, library, origin)
    return Blas(REFERENCE, None, "no OpenBLAS or MKL was found")


def current() -> Blas:
    """The BLAS in use, for `egemma-mlx info`."""
    return load()


@functools.cache
def warn_if_slow() -> None:
    """Warns, once, when MLX was left with the reference BLAS and nobody asked for that."""
    blas = load()
    if blas.name == REFERENCE and os.environ.get(VARIABLE) != "none":
        warnings.warn(
            f"MLX runs on its bundled reference BLAS, many times slower than OpenBLAS ({blas.reason}): "
            "pip install 'egemma-mlx[cpu]' or apt install libopenblas0-pthread",
            RuntimeWarning,
            stacklevel=2,
        )


_THREAD_CONTROLS = (
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
    ("MKL_Get_Max_Threads", "MKL_Set_Num_Threads"),
)


_pins: list[None] = []  # one for each `one_thread` that is in force


@contextlib.contextmanager
def one_thread() -> Iterator[int | None]:
    """BLAS calls have one thread each, whatever is set meanwhile: sums in one order, on any number of cores.

    The block is told what `set_threads` returned: how many they had before.
    """
    before = set_threads(1)
    _pins.append(None)
    try:
        yield before
    finally:
        _pins.pop()
        if before is not None:
            set_threads(before)


def set_threads(n: int) -> int | None:
    """Sets the number of threads of one BLAS call, process-wide; within `one_thread` it stays 1.

    Returns:
        The number before, or None (and nothing happens) where the BLAS in use has no such control.
    """
    if _pins:
        return 1
    path = load().path
    if path is None:
        return None
    library = ctypes.CDLL(path)
    for getter, setter in _THREAD_CONTROLS:
        if hasattr(library, setter):
            before: int = library[getter]()
            library[setter](n)
            return before
    return None


# Which library


def _cpu_wheel() -> Path | None:
    """The libmlx.so of MLX's Linux CPU wheel, known by the reference BLAS it bundles; None for any other build."""
    spec = importlib.util.find_spec("mlx") if sys.platform == "linux" else None
    for package in spec.submodule_search_locations or () if spec else ():
        library, site = Path(package, "lib", "libmlx.so"), Path(package).parent
        # The CUDA wheels bundle a reference BLAS too, for the rare op on the CPU, and install over the same libmlx.so.
        if library.is_file() and any(site.glob("mlx_cpu.libs/libblas-*")) and not any(site.glob("mlx_cuda*")):
            return library
    return None


def _candidates() -> Iterator[tuple[str | None, str]]:
    """(what to dlopen, where it comes from), best first.

    GFLOP/s of x[T, 512]·w[M, 512]ᵀ in MLX on two cores of a Zen 3 EPYC, T × M = 31×2048, 515×2048, 515×4096:

        scipy-openblas32 0.3.34          39  106  103     newest, so it knows the newest CPUs
        Debian's OpenBLAS 0.3.21         42  110   96     its OpenMP build: 41 106 90, serial: 23 60 51
        MKL 2026.2                       32   63   58
        reference                       1.2  1.4    –
    """
    yield None, "already global in this process"
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in Path(folder, "lib").glob("libscipy_openblas.*"):
            yield str(library), "the scipy-openblas32 package"
    # Fedora's libopenblas.so.0 has one thread, its libopenblasp.so.0 many; Debian's alternatives prefer pthreads.
    for soname in ("libopenblasp.so.0", "libopenblas.so.0", "libmkl_rt.so.3", "libmkl_rt.so.2"):
        yield str(Path(sys.prefix, "lib", soname)), "found on this machine"
        yield soname, "found on this machine"


_UNUSABLE = (OSError, AttributeError)  # what ctypes raises for a library or a function that is not there


def _redirect(slots: dict[str, int], library: str | None, origin: str) -> Blas:
    """Points libmlx's jump slots at `library` (None: what the process has global); raises one of _UNUSABLE."""
    handle = ctypes.CDLL(library)
    prefix = "scipy_" if hasattr(handle, "scipy_cblas_sgemm") else ""
    functions = {name: _address(handle, prefix + name) for name in slots}
    path = _file_of(functions["cblas_sgemm"])
    blas = Blas(_vendor(handle, prefix) or Path(path).name, path, origin)
    for name, slot in slots.items():
        _write(slot, functions[name])
    return blas


def _vendor(handle: ctypes.CDLL, prefix: str) -> str | None:
    """`OpenBLAS 0.3.34`, `MKL`, or None for others; refuses an OpenBLAS that takes 64-bit integers."""
    if hasattr(handle, f"{prefix}openblas_get_config"):
        get_config = handle[f"{prefix}openblas_get_config"]
        get_config.restype = ctypes.c_char_p
        config: str = get_config().decode()
        if "USE64BITINT" in config:
            raise OSError(f"its integers have 64 bits ({config})")
        return " ".join(config.split()[:2])
    return "MKL" if hasattr(handle, "MKL_Get_Max_Threads") else None


# How libmlx reaches it

_PROCESS = ctypes.CDLL(None)
_RTLD_DI_LINKMAP = 2
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_JMPREL = 0, 2, 5, 6, 10, 23
_LINK_MAP = struct.Struct("QQQ")  # l_addr, l_name, l_ld
_DYN = struct.Struct("qQ")  # d_tag, d_un
_RELA = struct.Struct("QQq")  # r_offset, r_info, r_addend
_SYM = struct.Struct("IBBHQQ")  # st_name, st_info, st_other, st_shndx, st_value, st_size


def _jump_slots(library: ctypes.CDLL, prefix: bytes) -> dict[str, int]:
    """The address of the jump slot of each function that `library` imports under a name with `prefix`."""
    link_map = ctypes.c_void_p()
    _PROCESS.dlinfo(ctypes.c_void_p(library._handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map))
    base, _, entry = _LINK_MAP.unpack(ctypes.string_at(link_map.value or 0, _LINK_MAP.size))

    dynamic: dict[int, int] = {}
    while _DT_NULL not in dynamic:
        tag, value = _DYN.unpack(ctypes.string_at(entry, _DYN.size))
        dynamic[tag] = value
        entry += _DYN.size

    def table(tag: int, size: int) -> bytes:
        # The linker adds the base to these pointers in place, unless the section is read-only.
        address = dynamic[tag] if dynamic[tag] >= base else base + dynamic[tag]
        return ctypes.string_at(address, size)

    relocations = list(_RELA.iter_unpack(table(_DT_JMPREL, dynamic[_DT_PLTRELSZ])))
    symbols = table(_DT_SYMTAB, _SYM.size * (1 + max(info >> 32 for _, info, _ in relocations)))
    names = table(_DT_STRTAB, dynamic[_DT_STRSZ])
    slots = {}
    for offset, info, _ in relocations:
        start = _SYM.unpack_from(symbols, _SYM.size * (info >> 32))[0]
        if names.startswith(prefix, start):
            slots[names[start : names.index(b"\0", start)].decode()] = base + offset
    return slots


def _write(slot: int, function: int) -> None:
    """Writes one jump slot; its page is read-only in a library linked with `-z now`."""
    page = os.sysconf("SC_PAGESIZE")
    read_write = 0x1 | 0x2
    if _PROCESS.mprotect(ctypes.c_void_p(slot - slot % page), ctypes.c_size_t(page), read_write) != 0:
        raise OSError("mprotect refused to make a jump slot of libmlx.so writable")
    ctypes.c_void_p.from_address(slot).value = function


def _address(library: ctypes.CDLL, function: str) -> int:
    return ctypes.cast(library[function], ctypes.c_void_p).value or 0


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


def _file_of(address: int) -> str:
    """The file of the library that `address` lies in."""
    info = _DlInfo()
    _PROCESS.dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.path.realpath(os.fsdecode(info.dli_fname))
