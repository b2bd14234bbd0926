"""Write docs/api.md from the docstrings of the public names.

    python tools/api_reference.py

The page depends on the source alone: signatures stand as they are written there. A test compares it with the file.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "api.md"

PUBLIC: dict[str, tuple[str, ...]] = {
    "Texts and images to vectors": (
        "egemma_mlx.Encoder",
        "egemma_mlx.encoder.Embedded",
        "egemma_mlx.vectors.quantize",
        "egemma_mlx.EgemmaError",
    ),
    "The model": (
        "egemma_mlx.load",
        "egemma_mlx.generate",
        "egemma_mlx.models.encoder.EmbeddingGemma2",
        "egemma_mlx.models.encoder.EmbeddingOutput",
        "egemma_mlx.export.export_forward",
    ),
    "Other packages": (
        "egemma_mlx.register",
        "egemma_mlx.adapters",
        "egemma_mlx.adapters.Adapter",
        "egemma_mlx.adapters.LangChainEmbeddings",
        "egemma_mlx.adapters.ChromaEmbeddingFunction",
        "egemma_mlx.adapters.llama_index_embedding",
        "egemma_mlx.adapters.bertopic_backend",
    ),
    "Quantised checkpoints": ("egemma_mlx.convert.convert",),
    "Corpora": (
        "egemma_mlx.corpus",
        "egemma_mlx.corpus.embed",
        "egemma_mlx.corpus.open",
        "egemma_mlx.corpus.Vectors",
    ),
    "Tokens, pixels, packed batches": (
        "egemma_mlx.tokenizer.Tokenizer",
        "egemma_mlx.tokenizer.Encoded",
        "egemma_mlx.tokenizer.BatchEncoding",
        "egemma_mlx.media.image.ImageProcessor",
        "egemma_mlx.media.image.Patches",
        "egemma_mlx.packing",
        "egemma_mlx.packing.pack",
    ),
    "Configuration": ("egemma_mlx.config.Config", "egemma_mlx.config.LayerConfig"),
    "Kernels": (
        "egemma_mlx.kernels.Kernels",
        "egemma_mlx.kernels.metal_kernels",
        "egemma_mlx.kernels.backend.select",
        "egemma_mlx.kernels.library.Library",
        "egemma_mlx.kernels.library.Source",
        "egemma_mlx.kernels.library.launch",
        "egemma_mlx.kernels.selfcheck.verdicts",
        "egemma_mlx.kernels.selfcheck.Verdict",
    ),
    "The simulator": (
        "egemma_mlx.simulator",
        "egemma_mlx.simulator.metal_kernel",
        "egemma_mlx.simulator.session",
        "egemma_mlx.simulator.Session",
        "egemma_mlx.simulator.Options",
        "egemma_mlx.simulator.Counters",
        "egemma_mlx.simulator.trace",
        "egemma_mlx.simulator.calls",
        "egemma_mlx.simulator.run",
        "egemma_mlx.simulator.Graph",
        "egemma_mlx.simulator.KernelCall",
        "egemma_mlx.simulator.available",
    ),
}
"""Sections of the page and the names in them."""

_HEAD = """# API reference

Written by `python tools/api_reference.py` from the docstrings: change those. A name is imported from what stands before
its last dot. Whatever a caller can get wrong raises [`EgemmaError`](#egemma_mlxegemmaerror). Names that are not here
may change without notice.

"""
_WIDTH = 100
_SECTIONS = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
_ENTRY = re.compile(r"(\w+(?:, \w+)*): +(.*)", re.DOTALL)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """The text of docs/api.md."""
    anchors = _anchors()
    contents = "".join(
        textwrap.fill(
            f"{title}: {', '.join(f'[`{_short(name)}`](#{anchors[name]})' for name in names)}",
            width=120,
            initial_indent="* ",
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        + "\n"
        for title, names in PUBLIC.items()
    )
    sections = (f"## {title}\n\n" + "\n".join(map(entry, names)) for title, names in PUBLIC.items())
    return _HEAD + contents + "\n" + "\n".join(sections)


def entry(name: str) -> str:
    """The part of the page that is about one name."""
    return "\n".join([f"### `{name}`", "", *(_module(name) if inspect.ismodule(found(name)) else _object(name))])


def found(name: str) -> Any:
    """The object of a dotted name."""
    *path, last = name.split(".")
    for end in range(len(path), 0, -1):
        try:
            thing = import_module(".".join(path[:end]))
        except ModuleNotFoundError:
            continue
        for part in (*path[end:], last):
            thing = getattr(thing, part, None) or import_module(f"{thing.__name__}.{part}")
        return thing
    raise ModuleNotFoundError(name)


def undocumented(name: str) -> list[str]:
    """What of a name has no docstring: itself, methods. A class may describe its call, and properties as attributes."""
    thing = found(name)
    if inspect.ismodule(thing):
        return [] if thing.__doc__ else [name]
    node = _node(thing)
    doc = ast.get_docstring(node) or ""
    lacking = [] if doc else [name]
    for member in _members(node) if isinstance(node, ast.ClassDef) else ():
        described = member.name == "__call__" or (_is_property(member) and re.search(rf"\b{member.name}\b.*:", doc))
        if not ast.get_docstring(member) and not described:
            lacking.append(f"{name}.{member.name}")
    return lacking


def _module(name: str) -> Iterator[str]:
    yield from _markdown(inspect.getdoc(found(name)) or "")


def _object(name: str) -> Iterator[str]:
    thing = found(name)
    node, source = _node(thing), _source(thing)
    node.name = _short(name)
    yield from _code(_head(node, source))
    yield from _markdown(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        for member in _members(node):
            if doc := ast.get_docstring(member):
                yield from (f"#### `{node.name}.{member.name}`", "", *_code(_head(member, source)), *_markdown(doc))


def _source(thing: Any) -> str:
    return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))


def _node(thing: Any) -> ast.ClassDef | Function:
    (node,) = ast.parse(_source(thing)).body
    assert isinstance(node, ast.ClassDef | Function)
    return node


def _members(node: ast.ClassDef) -> list[Function]:
    """Public methods and properties that the class itself defines, and its call."""
    methods = [member for member in node.body if isinstance(member, Function)]
    return [member for member in methods if member.name == "__call__" or not member.name.startswith("_")]


def _decorators(node: Function) -> set[str]:
    return {ast.unparse(decorator) for decorator in node.decorator_list}


def _is_property(node: Function) -> bool:
    return "property" in _decorators(node)


def _head(node: ast.ClassDef | Function, source: str) -> str:
    """The first line of a definition; for a class with what it is made of."""
    if isinstance(node, ast.ClassDef):
        init = [member for member in node.body if isinstance(member, Function) and member.name == "__init__"]
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        if init:
            return _call(f"class {node.name}", _parameters(init[0], source)[1:], "")
        if fields:
            return _call(f"class {node.name}", [_field(item, source) for item in fields], "")
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    result = f" -> {ast.get_source_segment(source, node.returns)}" if node.returns else ""
    if _is_property(node):
        return f"{node.name}{result.replace(' ->', ':', 1)}"
    bound = node.args.args[:1] and node.args.args[0].arg in ("self", "cls")
    kind = "@classmethod\n" if "classmethod" in _decorators(node) else ""
    return kind + _call(f"def {node.name}", _parameters(node, source)[1 if bound else 0 :], result)


def _field(item: ast.AnnAssign, source: str) -> str:
    """A dataclass's field as the parameter that it is."""
    return "*" if ast.unparse(item.annotation) == "KW_ONLY" else str(ast.get_source_segment(source, item))


def _parameters(node: Function, source: str) -> list[str]:
    """The parameters as they are written."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [*arguments.defaults]

    def written(argument: ast.arg, default: ast.expr | None) -> str:
        typed = str(ast.get_source_segment(source, argument))
        if default is None:
            return typed
        equals = " = " if argument.annotation else "="
        return f"{typed}{equals}{ast.get_source_segment(source, default)}"

    parameters = [written(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(f"*{ast.get_source_segment(source, arguments.vararg)}")
    elif arguments.kwonlyargs:
        parameters.append("*")
    parameters += map(written, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        parameters.append(f"**{ast.get_source_segment(source, arguments.kwarg)}")
    return parameters


def _call(head: str, parameters: list[str], result: str) -> str:
    line = f"{head}({', '.join(parameters)}){result}"
    if len(line) <= _WIDTH:
        return line
    return f"{head}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){result}"


def _code(text: str, language: str = "python") -> Iterator[str]:
    yield from (f"```{language}", *text.splitlines(), "```", "")


def _markdown(doc: str) -> Iterator[str]:
    """A docstring's paragraphs, sections, tables and sessions."""
    lines = doc.splitlines()
    while lines:
        section = _SECTIONS.fullmatch(lines[0])
        if section:
            yield from (f"**{section[1]}**", "")
            yield from _entries(textwrap.dedent("\n".join(_taken(lines, indented=True, skip=1))))
        elif lines[0].startswith(">>>"):
            yield from _code("\n".join(_taken(lines, indented=False)), "pycon")
        elif lines[0].startswith(" "):
            yield from _code(textwrap.dedent("\n".join(_taken(lines, indented=True))), "text")
        elif lines[0]:
            yield from (*_taken(lines, indented=False), "")
        else:
            lines.pop(0)


def _taken(lines: list[str], *, indented: bool, skip: int = 0) -> list[str]:
    """Take a block from the front: up to a line that is not indented, or up to an empty one."""
    end = skip
    while end < len(lines) and ((not lines[end] or lines[end][0] == " ") if indented else bool(lines[end])):
        end += 1
    block = lines[skip:end]
    del lines[:end]
    while block and not block[-1]:
        block.pop()
    return block


def _entries(text: str) -> Iterator[str]:
    """A section's `name: what it is` as a list; anything else as it is."""
    items = re.split(r"\n(?=\S)", text)
    if all(map(_ENTRY.fullmatch, items)):
        for item in items:
            names, what = re.fullmatch(_ENTRY, item).groups()  # type: ignore[union-attr]
            yield f"* {', '.join(f'`{name}`' for name in names.split(', '))}: {' '.join(what.split())}"
        yield ""
    else:
        yield from (*text.splitlines(), "")


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _anchors() -> dict[str, str]:
    """What GitHub calls the headings of the names: lower case without dots, numbered where that makes two alike."""
    found: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name in chain(*PUBLIC.values()):
        anchor = name.lower().replace(".", "")
        found[name] = f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1
    return found


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
