"""Contact sheets: what is shown where, that nothing in a name or text is markup, and that a page loads nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from egemma_mlx import contact_sheet
from egemma_mlx.contact_sheet import Result, write_html, write_png

Image = pytest.importorskip("PIL.Image")
ImageChops = pytest.importorskip("PIL.ImageChops")

RED, GREEN, BLUE = (200, 30, 30), (30, 160, 30), (30, 30, 200)
TILE = contact_sheet._TILE


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, size: tuple[int, int], color: tuple[int, ...] | str, mode: str = "RGB", **save: object) -> Path:
        path = tmp_path / name
        Image.new(mode, size, color).save(path, **save)
        return path

    return make


def sheet(query: Path | str, results: list[Result]) -> Image.Image:
    file = io.BytesIO()
    write_png(file, query, results)
    image = Image.open(file)
    assert (image.format, image.mode) == ("PNG", "RGB")
    return image


def where(image: Image.Image, color: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """The box that holds all pixels of a colour."""
    difference = ImageChops.difference(image, Image.new("RGB", image.size, color)).convert("L")
    return difference.point([255] + [0] * 255).getbbox()


def test_tiles_are_in_order_and_fill_their_squares(picture: Callable[..., Path]) -> None:
    results = [
        Result(0.9, "wide.png", picture("wide.png", (1000, 250), RED)),
        Result(0.8, "high.png", picture("high.png", (30, 60), GREEN)),
        *(Result(0.7, f"text {n}", "words " * 100) for n in range(3)),
        Result(0.6, "dot.png", picture("dot.png", (1, 1), BLUE)),
    ]
    image = sheet("a query", results)
    wide, high, dot = (where(image, color) for color in (RED, GREEN, BLUE))
    assert wide is not None and high is not None and dot is not None
    assert (wide[2] - wide[0], wide[3] - wide[1]) == (TILE, TILE // 4)
    assert (high[2] - high[0], high[3] - high[1]) == (TILE // 2, TILE)
    assert (dot[2] - dot[0], dot[3] - dot[1]) == (TILE, TILE)
    assert wide[2] < high[0] and wide[3] < high[3]  # a row of five, each centred in its square
    assert dot[0] == wide[0] and dot[1] > high[3]  # the sixth starts the next
    paper = where(image, (255, 255, 255))
    assert paper is not None and high[2] < paper[0] and high[1] < paper[1] < paper[3] < high[3] + 1
    assert image.width > 5 * TILE and image.height > 2 * TILE


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(0, 3, 0), (1, 3, 1), (4, 4, 1), (5, 5, 1), (6, 5, 2), (30, 5, 6), (49, 7, 7)]
)
def test_grid(count: int, columns: int, rows: int) -> None:
    result = Result(0.5, "name", "text")
    nothing, one = sheet("q", []).height, sheet("q", [result]).height
    image = sheet("q", [result] * count)
    gap = contact_sheet._GAP
    assert image.width == 2 * contact_sheet._MARGIN + columns * (TILE + gap) - gap
    assert image.height == nothing + rows * (one - nothing) and one - nothing > TILE


def test_texts_stay_in_their_tiles() -> None:
    """Every kind of text leaves the gaps between tiles as empty as short ones do, and its end is marked."""
    edge, gap = contact_sheet._MARGIN + TILE, contact_sheet._GAP
    for text in ("word " * 500, "x" * 5000, "水" * 3000, "a\x1b[31m\n\nb" * 300, "ends\0"):
        image = sheet(text, [Result(-0.123456, text, text)] * 2)
        between = image.crop((edge, image.height - TILE, edge + gap, image.height))
        page = Image.new("RGB", between.size, contact_sheet._PAGE)
        assert ImageChops.difference(between, page).getbbox() is None, text[:10]
    font = contact_sheet._font(16)
    width = int(font.getlength("one two")) + 1
    assert contact_sheet._lines("one two three four", font, width, 9) == ["one two", "three", "four"]
    assert contact_sheet._lines("one two three four", font, width, 3) == ["one two", "three", "four"]
    assert contact_sheet._lines("one two three four", font, width, 2) == ["one two", "three…"]
    assert contact_sheet._lines(" one\n\x1b\ttwo ", font, 1000, 2) == ["one two"]
    lines = contact_sheet._lines("x" * 50, font, 60, 99)
    assert "".join(lines) == "x" * 50 and len(lines) > 4 and all(font.getlength(line) <= 60 for line in lines)
    assert contact_sheet._lines("", font, 60, 2) == []
    name = contact_sheet._ending("a/long/path/to/photo.jpg", font, 100)
    assert name[0] == "…" and name.endswith("/photo.jpg") and font.getlength(name) <= 100


def test_pictures_are_upright_and_on_white(picture: Callable[..., Path]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90°
    turned = picture("turned.jpg", (400, 100), RED, exif=exif)
    clear = picture("clear.png", (100, 100), (0, 0, 0, 0), "RGBA")
    narrow = picture("narrow.png", (1, 3000), GREEN)
    assert contact_sheet._thumbnail(turned, 100).size == (25, 100)
    assert contact_sheet._thumbnail(narrow, 100).size == (1, 100)
    assert contact_sheet._thumbnail(clear, 100).getcolors() == [(10_000, (255, 255, 255))]


def test_query_image_is_shown(picture: Callable[..., Path]) -> None:
    query = picture("query.png", (64, 32), BLUE)
    result = Result(0.5, "a.png", picture("a.png", (64, 64), RED))
    image = sheet(query, [result])
    shown, below = where(image, BLUE), where(image, RED)
    assert shown is not None and below is not None and shown[3] < below[1] and shown[0] == below[0]


class Page(HTMLParser):
    """The tags of a page, the text in each, and its images."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.images: list[tuple[str, Image.Image]] = []
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            given = dict(attributes)
            kind, data = str(given["src"]).split(",")
            assert kind == "data:image/jpeg;base64"
            self.images.append((str(given["alt"]), Image.open(io.BytesIO(base64.b64decode(data)))))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.tags[-1], data))


def page(query: Path | str, results: list[Result]) -> tuple[str, Page]:
    file = io.BytesIO()
    write_html(file, query, results)
    return file.getvalue().decode(), Page(file.getvalue())


def test_page(picture: Callable[..., Path]) -> None:
    hostile = "</p><script>alert('1')</script>&amp; \"quoted\""
    name = "\"><img src=x onerror='1'>.png"
    results = [
        Result(0.98765, name, picture("a.png", (400, 100), RED)),
        Result(-0.5, f"{hostile}.md:3", f"{hostile}\n水 🌍"),
    ]
    source, found = page(hostile, results)
    assert "script" not in found.tags and found.tags.count("img") == 1
    assert found.texts[0] == ("title", hostile) and ("h1", hostile) in found.texts
    assert ("p", f"{hostile}\n水 🌍") in found.texts
    assert [text for tag, text in found.texts if tag == "span"] == [name, f"{hostile}.md:3"]
    assert [text.split() for tag, text in found.texts if tag == "figcaption"] == [["1", "0.9877"], ["2", "-0.5000"]]
    ((alt, image),) = found.images
    assert alt == name and image.size == (contact_sheet._THUMBNAIL, contact_sheet._THUMBNAIL // 4)
    assert all(abs(a - b) < 8 for a, b in zip(image.getpixel((5, 5)), RED, strict=True))
    # Nothing is loaded, and the reader's colours are used.
    assert not {"link", "script", "iframe", "object"} & set(found.tags)
    assert "url(" not in source and "@import" not in source
    assert "prefers-color-scheme: dark" in source and "color-scheme: light dark" in source


def test_page_of_an_image_query_and_no_results(picture: Callable[..., Path]) -> None:
    query = picture("query.png", (64, 32), BLUE)
    _, found = page(query, [])
    assert ("h1", str(query)) in found.texts and len(found.images) == 1 and "li" not in found.tags


def test_a_name_that_is_not_unicode() -> None:
    source, _ = page("q", [Result(0.5, "bad\udcff.md:1", "text")])
    assert "bad?.md:1" in source
    sheet("q", [Result(0.5, "bad\udcff.md:1", "text")])
