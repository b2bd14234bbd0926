"""The results of a search as one picture to look at: a grid (.png), or a page that holds its own thumbnails (.html).

Pillow is imported when a sheet is written.
"""

from __future__ import annotations

import base64
import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from html import escape
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from egemma_mlx.documents import one_line
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from PIL import Image, ImageFont

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Result(NamedTuple):
    """`shown` is an image file (Path) or a text; `name` stands beneath it."""

    score: float
    name: str
    shown: Path | str


# Pixels of the PNG.
_TILE, _GAP, _MARGIN, _INSET, _CAPTION = 256, 24, 32, 12, 6
_TITLE_SIZE, _TEXT_SIZE = 28, 16
_TITLE_LINES = 2
_COLUMNS = 5
# Pixels of an HTML thumbnail: twice those of its tile, for screens of two a point.
_THUMBNAIL = 512
_PAGE, _PAPER, _EDGE, _INK, _FAINT = "#f6f6f4", "#ffffff", "#d8d8d4", "#1c1c1a", "#6c6c68"
# Those with the most writing systems first; Pillow's own has Latin letters alone.
_FONTS = ("NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "DejaVuSans.ttf")


# --- PNG -------------------------------------------------------------------------------------------------------------


def write_png(file: BinaryIO, query: Path | str, results: Sequence[Result]) -> None:
    """The query, and beneath it the results row by row: a picture or the beginning of a text, rank and score, name.

    Five columns, and more where five would make a sheet higher than wide. Characters that no font at hand has are
    boxes.

    Raises:
        EgemmaError: an image cannot be read.
    """
    from PIL import Image, ImageDraw

    title_font, font = _font(_TITLE_SIZE), _font(_TEXT_SIZE)
    title_line, line = _line_height(title_font), _line_height(font)
    columns = min(max(len(results), 3), max(_COLUMNS, isqrt(len(results))))
    rows = -(-len(results) // columns)
    width = 2 * _MARGIN + columns * (_TILE + _GAP) - _GAP
    picture = _thumbnail(query, _TILE) if isinstance(query, Path) else None
    room = width - 2 * _MARGIN
    title = [_ending(str(query), title_font, room)] if picture else _lines(str(query), title_font, room, _TITLE_LINES)
    top = _MARGIN + len(title) * title_line + _GAP + (picture.height + _GAP if picture else 0)
    row_height = _TILE + _CAPTION + 2 * line + _GAP

    sheet = Image.new("RGB", (width, top + rows * row_height + _MARGIN - _GAP), _PAGE)
    draw = ImageDraw.Draw(sheet)
    for number, text in enumerate(title):
        draw.text((_MARGIN, _MARGIN + number * title_line), text, _INK, title_font)
    if picture:
        sheet.paste(picture, (_MARGIN, top - _GAP - picture.height))
    for index, result in enumerate(results):
        x, y = _MARGIN + index % columns * (_TILE + _GAP), top + index // columns * row_height
        if isinstance(result.shown, Path):
            image = _thumbnail(result.shown, _TILE)
            sheet.paste(image, (x + (_TILE - image.width) // 2, y + (_TILE - image.height) // 2))
        else:
            draw.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), _PAPER, _EDGE)
            inner = _TILE - 2 * _INSET
            for number, text in enumerate(_lines(result.shown, font, inner, inner // line)):
                draw.text((x + _INSET, y + _INSET + number * line), text, _INK, font)
        y += _TILE + _CAPTION
        draw.text((x, y), f"{index + 1}  {result.score:.4f}", _INK, font)
        draw.text((x, y + line), _ending(result.name, font, _TILE), _FAINT, font)
    sheet.save(file, "PNG")


def _font(size: int) -> Font:
    from PIL import ImageFont

    for name in _FONTS:
        try:
            return ImageFont.truetype(name, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _line_height(font: Font) -> int:
    return round(1.3 * font.getbbox("Ág")[3])


def _lines(text: str, font: Font, width: int, most: int) -> list[str]:
    """A text in at most so many lines of a width, cut between words where there are any; … where more would follow."""
    rest = one_line(text)
    lines: list[str] = []
    while rest and len(lines) < most:
        end = _fitting(rest, font, width)
        if end < len(rest) and len(lines) == most - 1:
            return [*lines, rest[: _fitting(rest, font, width - font.getlength("…"))].rstrip() + "…"]
        if end < len(rest) and rest[end] != " ":
            end = rest.rfind(" ", 1, end) if " " in rest[1:end] else end
        lines.append(rest[:end].rstrip())
        rest = rest[end:].lstrip()
    return lines


def _ending(text: str, font: Font, width: int) -> str:
    """A text, or as much of its end as fits: of a path, the name."""
    text = one_line(text)
    if font.getlength(text) <= width:
        return text
    backwards = text[::-1]
    return "…" + backwards[: _fitting(backwards, font, width - font.getlength("…"))][::-1]


def _fitting(text: str, font: Font, width: float) -> int:
    """How many characters fit a width, at least one."""
    # No line holds more characters than pixels.
    ends = range(1, min(len(text), int(width)) + 1)
    return max(1, bisect_right(ends, width, key=lambda end: font.getlength(text[:end])))


# --- HTML ------------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --page: #f6f6f4; --paper: #fff; --edge: #d8d8d4; --ink: #1c1c1a; --faint: #6c6c68; }
@media (prefers-color-scheme: dark) {
  :root { --page: #191918; --paper: #242422; --edge: #3c3c38; --ink: #ececea; --faint: #a0a09a; }
}
body { margin: 2rem; background: var(--page); color: var(--ink); font: 1rem/1.4 system-ui, sans-serif; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
img { display: block; max-width: 100%; max-height: 16rem; }
ol { display: flex; flex-wrap: wrap; gap: 1.5rem; padding: 0; list-style: none; }
li { width: 16rem; }
figure { margin: 0; }
.shown { display: flex; align-items: center; justify-content: center; height: 16rem; }
p.shown { display: block; margin: 0; padding: .75rem; overflow: auto; box-sizing: border-box; white-space: pre-wrap;
  overflow-wrap: anywhere; background: var(--paper); border: 1px solid var(--edge); }
figcaption { margin-top: .4rem; font-variant-numeric: tabular-nums; }
figcaption span { display: block; color: var(--faint); overflow-wrap: anywhere; }
"""


def write_html(file: BinaryIO, query: Path | str, results: Sequence[Result]) -> None:
    """A page that loads nothing else, in the light or dark colours of whoever reads it.

    Raises:
        EgemmaError: an image cannot be read.
    """
    title = escape(str(query))
    parts = [
        f'<!doctype html>\n<html>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f'<title>{title}</title>\n<style>{_STYLE}</style>\n<h1 dir="auto">{title}</h1>\n',
        f"{_img(query, '')}\n" if isinstance(query, Path) else "",
        "<ol>\n",
    ]
    for rank, (score, name, shown) in enumerate(results, 1):
        if isinstance(shown, Path):
            content = f'<div class="shown">{_img(shown, name)}</div>'
        else:
            content = f'<p class="shown" dir="auto">{escape(shown)}</p>'
        caption = f"{rank}&ensp;{score:.4f} <span>{escape(name)}</span>"
        parts.append(f"<li><figure>{content}<figcaption>{caption}</figcaption></figure>\n")
    # Names of files may hold what is not Unicode.
    file.writelines(part.encode("utf-8", "replace") for part in (*parts, "</ol>\n"))


def _img(path: Path, alt: str) -> str:
    data = io.BytesIO()
    _thumbnail(path, _THUMBNAIL).save(data, "JPEG", quality=85)
    return f'<img alt="{escape(alt)}" src="data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _thumbnail(path: Path, side: int) -> Image.Image:
    """An image, upright and on white, as large as a square of that side can hold."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image.draft("RGB", (side, side))  # a JPEG is decoded no larger than it need be
            upright = ImageOps.exif_transpose(image)
            shown = _on_white(upright) if upright.has_transparency_data else upright.convert("RGB")
    except OSError as error:
        raise EgemmaError(f"{path}: cannot be shown ({error})") from None
    scale = side / max(shown.size)
    width, height = (max(1, round(scale * length)) for length in shown.size)
    return shown.resize((width, height), Image.Resampling.LANCZOS)


def _on_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    layer = image.convert("RGBA")
    paper = Image.new("RGB", image.size, "white")
    paper.paste(layer, mask=layer)
    return paper


WRITERS: dict[str, Callable[[BinaryIO, Path | str, Sequence[Result]], None]] = {
    ".png": write_png,
    ".html": write_html,
}
