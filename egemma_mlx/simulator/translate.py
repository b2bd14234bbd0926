"""MSL text → C++ text for clang.

The shim's `msl.h` makes most of Metal's language C++. What no header can express is rewritten here, line by line in
place, so that clang's messages and debug information keep the lines of the source:

* a kernel's `threadgroup T x[N];` becomes a reference into the simulator's threadgroup memory;
* the explicit instantiation, which names the template arguments, becomes the argument of an entry function.

And what clang would take but Metal does not is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from egemma_mlx.simulator.errors import CompileError

# The thread attributes that MLX declares when their name occurs in a body.
ATTRIBUTES = frozenset(
    {
        "dispatch_quadgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "grid_origin",
        "grid_size",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_simdgroup",
        "threads_per_threadgroup",
    }
)

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
_LINE = re.compile(r'#\s*line\s+(\d+)(?:\s+"([^"\n]*)")?')
_KERNEL = re.compile(r"(?:\[\[\s*kernel\b[^\]]*\]\]|\bkernel\b)\s*void\s+(\w+)\s*\(")
_INSTANTIATION = re.compile(
    r"template\s*\[\[\s*host_name\([^)]*\)\s*\]\]\s*\[\[\s*kernel\s*\]\]\s*"
    r"decltype\((?P<function>(?P<name>\w+)[^;]*?)\)\s*(?P=function)\s*;"
)
_PARAMETER = re.compile(
    r"(?P<type>[^\[]*?)(?P<name>\w+)\s*\[\[\s*(?P<attribute>\w+)\s*(?:\(\s*(?P<index>\d+)\s*\))?\s*\]\]", re.S
)
_MACRO = r"^[ \t]*#[ \t]*define[ \t]+{}[ \t]((?:[^\n]*\\\n)*[^\n]*)"

# `threadgroup T x[N][M], y;`: one or more words or templates, then names with dimensions. A pointer or a reference to
# threadgroup memory has a * or & and does not match.
_DIMENSIONS = r"(?:\s*\[[^\]]*\])*"
_VARIABLE = re.compile(
    r"\bthreadgroup\s+(?P<type>(?:[A-Za-z_][\w:]*(?:\s*<[^;{}=]*?>)?\s+)+)"
    rf"(?P<names>[A-Za-z_]\w*{_DIMENSIONS}(?:\s*,\s*[A-Za-z_]\w*{_DIMENSIONS})*)\s*(?P<end>[;=])"
)
_VARIABLE_NAME = re.compile(rf"([A-Za-z_]\w*)({_DIMENSIONS})\s*(?:,|$)")

_NOT_IN_METAL = re.compile(
    r"\b(double|goto|new|dynamic_cast|typeid|thread_local|register|virtual|try|catch|throw|asm)\b"
)
_FOREIGN_HEADER = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<(?!metal_|metal/|simd/)[^>\n]*>", re.M)
_SPACE = re.compile(r"\b(device|constant|threadgroup|thread)\b")
_BUILT_IN = (
    r"(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]?"
    r"|u?int(?:8|16|32|64)_t|b?float16_t|size_t|void"
)
_BUILT_IN_POINTER = re.compile(rf"\b(?:{_BUILT_IN})\s*(?:const\s*)?[*&](?!&)")
_FUNCTION = re.compile(r"\b(?!if\b)\w+[\s*&]+(?!(?:if|for|while|switch)\b)\w+\s*\(([^(){};]*)\)\s*(?:const\s*)?\{")
_CAST = re.compile(r"\((?:const\s+)?(device|constant|threadgroup)\b[^(){};]*\*\s*\)\s*[(&\s]*([A-Za-z_]\w*)")
_TYPED_POINTER = re.compile(r"\s*(?:const\s+)?[A-Za-z_][\w:]*(?:\s*<.*>)?\s*(?:const\s*)?[*&](?!&)")


class Parameter(NamedTuple):
    """A kernel's parameter: a buffer (of that number) or a thread attribute (None)."""

    name: str
    type: str
    attribute: str
    buffer: int | None

    @property
    def constant(self) -> bool:
        """In the constant address space."""
        return "constant" in _SPACE.findall(self.type)


@dataclass(frozen=True)
class Translation:
    """C++ text, and the name of the `extern "C"` function in it that runs one thread of the kernel."""

    cpp: str
    entry: str


@lru_cache(maxsize=256)
def translate(source: str, name: str) -> Translation:
    """The C++ of a kernel.

    Args:
        source: MSL text; lines before its first `#line` count as lines of `name`.metal.
        name: of a kernel function in it, a template with its explicit instantiation or a plain one.

    Raises:
        CompileError: what Metal's compiler would refuse and clang would not, or a signature that is not Metal.
    """
    text = _Text(source, name)
    _refuse(text)
    codes = ", ".join(f"{p.buffer}" if p.buffer is not None else f"::msl::at_{p.attribute}" for p in _parameters(text))
    instances = {match["name"]: match["function"] for match in _INSTANTIATION.finditer(text.code)}
    entry = f"{name}_entry"
    body = _INSTANTIATION.sub(_blank, _rewrite_variables(text))
    cpp = (
        f'#include <msl.h>\n#line 1 "{name}.metal"\n{body}\n#line 1 "{entry}"\n'
        f'extern "C" void {entry}(msl_buffers b, const msl_lane MSL_RAW* l, const msl_group MSL_RAW* g) {{\n'
        f"  ::msl::launch(&{instances.get(name, name)}, ::msl::codes<{codes}>(), b, l, g);\n}}\n"
    )
    return Translation(cpp, entry)


@lru_cache(maxsize=256)
def signature(source: str, name: str) -> tuple[Parameter, ...]:
    """The parameters of the kernel `name` in MSL text.

    Raises:
        CompileError: there is no such kernel, or a parameter without an attribute that is known here.
    """
    return tuple(_parameters(_Text(source, name)))


class _Text:
    """MSL text without its comments; `bare` is without its strings too. Neither moves a character."""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        self.code = _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else _blank(m), source)
        self.bare = _COMMENT.sub(_blank, source)

    def where(self, at: int) -> str:
        """file:line of a character, as `#line` has it."""
        file, line = f"{self.name}.metal", 1
        lines = self.code[:at].split("\n")
        for text in lines[:-1]:
            match = _LINE.match(text.lstrip())
            if match:
                file, line = match[2] or file, int(match[1])
            else:
                line += 1
        return f"{file}:{line}"

    def error(self, at: int, message: str) -> CompileError:
        return CompileError(f"{self.where(at)}: {message}")

    def kernels(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, start of the parameters, their end, end of the body) of every kernel."""
        for match in _KERNEL.finditer(self.bare):
            stop = _closing(self.bare, match.end() - 1)
            brace = self.bare.find("{", stop)
            yield match[1], match.end(), stop, _closing(self.bare, brace)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _closing(text: str, opening: int) -> int:
    """Where the bracket at `opening` closes; the end of the text when it does not."""
    depth = 0
    for at in range(max(opening, 0), len(text)):
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0:
            return at
    return len(text)


def _parameters(text: _Text) -> Iterator[Parameter]:
    found = next((kernel for kernel in text.kernels() if kernel[0] == text.name), None)
    if found is None:
        raise text.error(0, f"no kernel function {text.name}")
    listing = text.bare[found[1] : found[2]].strip()
    if listing.isidentifier():
        macro = re.search(_MACRO.format(listing), text.bare, re.M)
        listing = macro[1].replace("\\\n", " ") if macro else listing
    for declaration in _split(listing):
        match = _PARAMETER.fullmatch(declaration.strip())
        if match is None:
            raise text.error(found[1], f"expected a parameter with one attribute but got {declaration.strip()!r}")
        attribute, index = match["attribute"], match["index"]
        if attribute == "buffer" and index is not None and _SPACE.search(match["type"]):
            yield Parameter(match["name"], match["type"].strip(), attribute, int(index))
        elif attribute in ATTRIBUTES and index is None:
            yield Parameter(match["name"], match["type"].strip(), attribute, None)
        else:
            raise text.error(found[1], f"expected a buffer or a thread attribute but got {declaration.strip()!r}")


def _split(listing: str) -> Iterator[str]:
    """A parameter list at its commas outside brackets."""
    depth, start = 0, 0
    for at, character in enumerate(listing):
        depth += (character in "([<{") - (character in ")]>}")
        if character == "," and depth == 0:
            yield listing[start:at]
            start = at + 1
    if listing[start:].strip():
        yield listing[start:]


def _rewrite_variables(text: _Text) -> str:
    """Threadgroup variables as references that the runtime hands out by number."""
    bodies = [(stop, end) for _, _, stop, end in text.kernels()]
    count = 0

    def reference(match: re.Match[str]) -> str:
        nonlocal count
        if not any(start < match.start() < end for start, end in bodies):
            raise text.error(match.start(), "a threadgroup variable outside the body of a kernel function")
        if match["end"] == "=":
            raise text.error(match.start(), "a threadgroup variable cannot have an initial value")
        references = []
        for name, dimensions in _VARIABLE_NAME.findall(match["names"]):
            references.append(
                f"threadgroup auto& {name} = "
                f"::msl::threadgroup_variable<{match['type'].strip()}{dimensions.strip()}, {count}>();"
            )
            count += 1
        # A declaration over several lines leaves its newlines behind.
        return " ".join(references).replace("\n", " ") + "\n" * match[0].count("\n")

    return _VARIABLE.sub(reference, text.code)


def _refuse(text: _Text) -> None:
    """What clang takes and Metal does not."""
    if match := _NOT_IN_METAL.search(text.bare):
        raise text.error(match.start(), f"Metal has no {match[1]}")
    if match := _FOREIGN_HEADER.search(text.bare):
        raise text.error(match.start(), f"Metal has no {match[0].strip()}")
    # A pointer or reference needs an address space. `T * x` alone may be a product, so only built-in types, which
    # are no operands, and the parameters of functions are looked at.
    for match in _BUILT_IN_POINTER.finditer(text.bare):
        start = 1 + max(text.bare.rfind(character, 0, match.start()) for character in "(){};,<>=")
        if not _SPACE.search(text.bare, start, match.end()):
            raise _no_space(text, match.start(), match[0])
    for match in _FUNCTION.finditer(text.bare):
        at = match.start(1)
        for parameter in _split(match[1]):
            if _TYPED_POINTER.match(parameter):
                raise _no_space(text, at + len(parameter) - len(parameter.lstrip()), parameter)
            at += len(parameter) + 1
    # A cast from one address space to another, as far as the names of a kernel's variables and buffers tell.
    for name, start, _, end in text.kernels():
        spaces = _spaces(text, start, end) if name == text.name else {}
        for match in _CAST.finditer(text.bare, start, end):
            space = spaces.get(match[2], match[1])
            if space != match[1]:
                raise text.error(match.start(), f"a cast of {space} memory to {match[1]}: {match[0]!r}")


def _spaces(text: _Text, start: int, end: int) -> dict[str, str]:
    """The address spaces of the kernel's buffers and threadgroup variables, by name."""
    spaces = {p.name: _SPACE.findall(p.type)[0] for p in _parameters(text) if p.buffer is not None}
    for match in _VARIABLE.finditer(text.bare, start, end):
        spaces |= {name: "threadgroup" for name, _ in _VARIABLE_NAME.findall(match["names"])}
    return spaces


def _no_space(text: _Text, at: int, declaration: str) -> CompileError:
    return text.error(at, f"a pointer or reference without an address space: {' '.join(declaration.split())!r}")
