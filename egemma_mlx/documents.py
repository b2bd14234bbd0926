"""What a search ranks: image files, and paragraphs of text files, each with its heading and the line it starts at."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from egemma_mlx.errors import EgemmaError

Only = Literal["images", "text"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
# Text without prose: a folder's are left out, unless they are named themselves.
_DATA_SUFFIXES = {".csv", ".ipynb", ".json", ".jsonl", ".lock", ".svg", ".tsv", ".xml"}
_HEADING_SUFFIXES = {".md", ".markdown", ".rst"}
_HEADING = re.compile(r" {0,3}#{1,6}\s+(.*?)(?:\s+#+)?\s*")
_UNDERLINE = re.compile(r"([=\-~^*+#\"'])\1{2,}\s*")
_FENCE = "```"
# Characters of a title: enough for any, and few enough tokens to leave room for the text.
_MAX_TITLE = 120
# Where a text may be cut, best first: between lines, sentences, words.
_BOUNDARIES = tuple(map(re.compile, (r"\n", r"(?<=[.!?…])\s+|(?<=[。！？])", r"\s+")))


class Paragraph(NamedTuple):
    """`text` begins at `line` (from 1) of `file`; `title` is the heading above it, or the file's name."""

    file: str
    line: int
    title: str
    text: str


class Picture(NamedTuple):
    """An image file, by its name alone."""

    file: str


class Corpus(NamedTuple):
    """`files` were read for `paragraphs`; `skipped` were not text or could not be read."""

    paragraphs: list[Paragraph]
    images: list[Picture]
    files: int
    skipped: int


def read_corpus(paths: Iterable[str], only: Only | None = None, but: Path | None = None) -> Corpus:
    """The images and paragraphs of all files named, and of all in the folders named, in a stable order.

    Left out of folders: hidden files and folders, data (.csv, .json and their like). An image is what has one of
    `IMAGE_SUFFIXES`; it is not opened here. Text is what is UTF-8 without NUL.

    Args:
        only: images, or text; files of the other kind are not even read.
        but: a file that is no part of it.

    Raises:
        EgemmaError: a path that is not there.
        OSError: a text file that was named cannot be read.
    """
    paragraphs: list[Paragraph] = []
    images: list[Picture] = []
    files = skipped = 0
    for path, named in dict(_files(paths)).items():
        image = is_image(path)
        if only == ("text" if image else "images") or (but and Path(path).resolve() == but.resolve()):
            continue
        if image:
            images.append(Picture(path))
            continue
        try:
            text = _read_text(path)
        except OSError:
            if named:
                raise
            text = None
        if text is None:
            skipped += 1
        else:
            files += 1
            paragraphs += split(text, path)
    return Corpus(paragraphs, images, files, skipped)


def is_image(path: str) -> bool:
    """Whether a file's name is that of an image."""
    return Path(path).suffix.lower() in IMAGE_SUFFIXES


def names_an_image(argument: str) -> bool:
    """Whether an argument that may be a text is the name of an image file.

    Raises:
        EgemmaError: it looks like one, but there is no such file: a slip must not become the vector of its text.
    """
    if not is_image(argument):
        return False
    if Path(argument).is_file():
        return True
    if any(map(str.isspace, argument)):
        return False
    raise EgemmaError(f"{argument}: no such image file")


def _files(paths: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(file, whether it was named itself)."""
    for path in paths:
        if not Path(path).exists():
            raise EgemmaError(f"{path}: no such file or folder")
        if not Path(path).is_dir():
            yield path, True
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                file = Path(folder, name)
                if not name.startswith(".") and file.suffix.lower() not in _DATA_SUFFIXES and file.is_file():
                    yield str(file), False


def _read_text(path: str) -> str | None:
    with Path(path).open("rb") as file:
        # Enough to know a film by, before all of it is read.
        content = file.read(8192)
        if b"\0" in content:
            return None
        content += file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")


def split(text: str, file: str) -> Iterator[Paragraph]:
    """The paragraphs of a text: runs of lines that are not blank and hold a letter or a digit.

    In Markdown and reStructuredText a heading is no paragraph but the title of those below it, unless there are none.
    """
    name = Path(file).name
    headings = Path(file).suffix.lower() in _HEADING_SUFFIXES
    title, bare = name, None
    for line, block in _blocks(text.split("\n"), headings):
        heading = _heading(block) if headings else None
        if bare and heading:
            yield bare
        if heading:
            title, bare = heading[:_MAX_TITLE], Paragraph(file, line, name, heading)
        elif any(map(str.isalnum, content := "\n".join(block).strip())):
            yield Paragraph(file, line, title, content)
            bare = None
    if bare:
        yield bare


def _blocks(lines: list[str], headings: bool) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, lines) of each run of lines that are not blank; a `# heading` is a run of its own."""
    block: list[str] = []
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.lstrip().startswith(_FENCE)
        alone = headings and not fenced and _HEADING.fullmatch(line) is not None
        if block and (alone or not line.strip()):
            yield number - len(block), block
            block = []
        if alone:
            yield number, [line]
        elif line.strip():
            block.append(line)
    if block:
        yield len(lines) + 1 - len(block), block


def _heading(block: list[str]) -> str | None:
    """The heading that a block is, `# like this` or underlined."""
    if len(block) == 1 and (match := _HEADING.fullmatch(block[0])):
        return match[1] or None
    if len(block) == 2 and _UNDERLINE.fullmatch(block[1]):
        return block[0].strip()
    return None


def pieces(paragraph: Paragraph, fits: Callable[[Paragraph], bool]) -> Iterator[Paragraph]:
    """`paragraph`, or halves of it, and of those, until each fits; cut at line ends, else sentences, else words."""
    text = paragraph.text
    if len(text) < 2 or fits(paragraph):
        yield paragraph
        return
    cut = _cut(text)
    for start, end in ((0, cut), (cut, len(text))):
        part = text[start:end]
        if part.strip():
            line = paragraph.line + text.count("\n", 0, end - len(part.lstrip()))
            yield from pieces(paragraph._replace(line=line, text=part.strip()), fits)


def _cut(text: str) -> int:
    """Where to halve a text: the best kind of boundary in its middle half, and of that kind the most central."""
    half = len(text) // 2
    for boundary in _BOUNDARIES:
        if cuts := [match.end() for match in boundary.finditer(text, len(text) // 4, len(text) * 3 // 4)]:
            return min(cuts, key=lambda cut: abs(cut - half))
    return half


def one_line(text: str) -> str:
    """A text on one line, and without the control characters that a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
