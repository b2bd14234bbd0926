"""From an address in a compiled kernel to the line of MSL that it came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from elftools.dwarf.descriptions import describe_form_class
from elftools.dwarf.ranges import BaseAddressEntry, RangeEntry
from elftools.elf.elffile import ELFFile

from egemma_mlx.simulator.compiler import INCLUDE


def locate(library: Path, offset: int) -> str:
    """`file:line` of the instruction before `offset`, a return address relative to the library's start.

    The shim's functions are inlined into kernels: the place is the innermost frame outside the shim. Files are named as
    the kernel's #line directives name them.
    """
    with library.open("rb") as file:
        dwarf = ELFFile(file).get_dwarf_info()
        for unit in dwarf.iter_CUs():
            for name, line in _frames(dwarf, unit, offset - 1):
                if not PurePosixPath(name).is_relative_to(INCLUDE):
                    return f"{name}:{line}"
    return "unknown place"


def _frames(dwarf: Any, unit: Any, address: int) -> Iterator[tuple[str, int]]:
    """The source positions of `address`: the instruction's own, then the calls that were inlined around it."""
    program = dwarf.line_program_for_CU(unit)
    row = _line_row(program, address)
    if row is None:
        return
    yield _file_name(program, row.file), row.line
    for call in reversed(_inlined_calls(dwarf, unit.get_top_DIE(), address)):
        yield _file_name(program, call.attributes["DW_AT_call_file"].value), call.attributes["DW_AT_call_line"].value


def _line_row(program: Any, address: int) -> Any | None:
    before, dropped = None, False
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        if before is None:
            dropped = state.address == 0  # a function that the linker left out
        elif before.address <= address < state.address and not dropped:
            return before
        before = None if state.end_sequence else state
    return None


def _inlined_calls(dwarf: Any, parent: Any, address: int) -> list[Any]:
    """The DW_TAG_inlined_subroutine entries around `address`, from the outermost in."""
    for child in parent.iter_children():
        if child.tag in ("DW_TAG_subprogram", "DW_TAG_inlined_subroutine", "DW_TAG_lexical_block"):
            if not any(low <= address < high for low, high in _address_ranges(dwarf, child)):
                continue
            inner = _inlined_calls(dwarf, child, address)
            return [child, *inner] if child.tag == "DW_TAG_inlined_subroutine" else inner
        if child.has_children and (found := _inlined_calls(dwarf, child, address)):
            return found  # a namespace
    return []


def _address_ranges(dwarf: Any, entry: Any) -> Iterator[tuple[int, int]]:
    attributes = entry.attributes
    if "DW_AT_ranges" in attributes:
        base = entry.cu.get_top_DIE().attributes.get("DW_AT_low_pc")
        start = base.value if base else 0
        ranges = dwarf.range_lists().get_range_list_at_offset(attributes["DW_AT_ranges"].value, entry.cu)
        for item in ranges:
            if isinstance(item, BaseAddressEntry):
                start = item.base_address
            elif isinstance(item, RangeEntry):
                shift = 0 if item.is_absolute else start
                yield shift + item.begin_offset, shift + item.end_offset
    elif "DW_AT_low_pc" in attributes:
        low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        yield low, high.value if describe_form_class(high.form) == "address" else low + high.value


def _file_name(program: Any, index: int) -> str:
    """The name in the #line directive, or the whole path of a file that was included."""
    header = program.header
    first = 0 if header.version >= 5 else 1  # what file and folder numbers count from
    file = header.file_entry[index - first]
    folder = header.include_directory[file.dir_index - first].decode() if file.dir_index >= 1 else ""
    return str(PurePosixPath(folder) / file.name.decode())
