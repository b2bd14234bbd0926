"""Paragraphs of text: where they start, what they stand under, what is read and how a long one is cut. Images."""

from __future__ import annotations

from pathlib import Path

import pytest

from egemma_mlx.documents import Paragraph, Picture, pieces, read_corpus, split
from egemma_mlx.errors import EgemmaError


def found(text: str, file: str) -> list[tuple[int, str, str]]:
    paragraphs = list(split(text, file))
    assert all(paragraph.file == file for paragraph in paragraphs)
    return [paragraph[1:] for paragraph in paragraphs]


def test_plain_paragraphs() -> None:
    text = "\n\nOne\n  one.\n\n \t \nTwo.\n\n-----\n\n  三\n"
    name = "notes.txt"
    assert found(text, f"a/{name}") == [(3, name, "One\n  one."), (7, name, "Two."), (11, name, "三")]
    assert found("# comment\nx = 1\n\n# other", "m.py") == [(1, "m.py", "# comment\nx = 1"), (4, "m.py", "# other")]
    assert found("", name) == found(" \n\n***\n", name) == []


def test_headings_are_titles() -> None:
    text = """# Manual ##

Intro.

## Use of C#
At once.

Later.

Underlined
==========

```sh
# a comment

make
```

### Alone
#### Last

#hashtag
"""
    assert found(text, "guide.md") == [
        (3, "Manual", "Intro."),
        (6, "Use of C#", "At once."),
        (8, "Use of C#", "Later."),
        (13, "Underlined", "```sh\n# a comment"),
        (16, "Underlined", "make\n```"),
        (19, "guide.md", "Alone"),  # nothing is lost: a heading over nothing is a paragraph
        (22, "Last", "#hashtag"),
    ]
    assert found("A title\n~~~~~~~\n\nText.\n\nEnd\n---\n", "x.rst") == [(4, "A title", "Text."), (6, "x.rst", "End")]
    assert found("# " + "long " * 100, "x.md")[0][2] == ("long " * 100).strip()
    assert len(found("# " + "long " * 100 + "\ntext", "x.md")[0][1]) == 120


def test_pieces_keep_everything_and_know_their_lines() -> None:
    lines = [f"Line {number} of a log, which says {'this ' * (number % 7)}and that." for number in range(10, 400)]
    whole = Paragraph("x.log", 10, "x.log", "\n".join(lines))
    parts = list(pieces(whole, lambda part: len(part.text) <= 500))
    assert "\n".join(part.text for part in parts) == whole.text
    assert all(part.text.startswith(f"Line {part.line} ") for part in parts)  # cut between lines alone
    sizes = [len(part.text) for part in parts]
    assert max(sizes) <= 500 and min(sizes) > 100
    assert list(pieces(whole, lambda part: True)) == [whole]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("A sentence of some words. " * 40, "."),
        ("これは文です。" * 60, "。"),
        ("words without any end " * 40, ("words", "without", "any", "end")),
        ("x" * 1000, "x"),
    ],
    ids=["sentences", "Chinese full stops", "words", "characters"],
)
def test_pieces_of_one_line(text: str, end: str | tuple[str, ...]) -> None:
    parts = list(pieces(Paragraph("f", 3, "f", text.strip()), lambda part: len(part.text) <= 100))
    assert "".join("".join(part.text for part in parts).split()) == "".join(text.split())
    assert all(part.line == 3 and 25 <= len(part.text) <= 100 and part.text.endswith(end) for part in parts)


def test_pieces_end_when_nothing_fits() -> None:
    parts = list(pieces(Paragraph("f", 1, "f", "a\n\nb c"), lambda part: False))
    assert [(part.line, part.text) for part in parts] == [(1, "a"), (3, "b"), (3, "c")]


def test_what_is_read(tmp_path: Path) -> None:
    files = {
        "b.md": b"\xef\xbb\xbf# T\r\n\r\ntwo\r\nlines\r\n",
        "a.txt": b"one",
        "sub/c.py": b"three",
        "no-suffix": "vier ü".encode(),
        "empty.txt": b"",
        "latin.txt": "ü".encode("latin-1"),
        "sub/image.PNG": b"\x89PNG\r\n\0\0",
        "film.bin": b"\0",
        "late.bin": b"x" * 10_000 + b"\0",
        "table.csv": b"a,b",
        ".hidden": b"no",
        ".git/config": b"no",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus([str(tmp_path)])
    assert [(Path(p.file).name, p.line, p.text) for p in corpus.paragraphs] == [
        ("a.txt", 1, "one"),
        ("b.md", 3, "two\nlines"),
        ("no-suffix", 1, "vier ü"),
        ("c.py", 1, "three"),
    ]
    assert (corpus.files, corpus.skipped) == (5, 3)
    assert corpus.images == [Picture(str(tmp_path / "sub/image.PNG"))]
    # What is named is read, and read once.
    named = [str(tmp_path / name) for name in (".hidden", "table.csv", "a.txt", "a.txt", ".git")]
    assert [p.text for p in read_corpus(named).paragraphs] == ["no", "a,b", "one", "no"]
    with pytest.raises(EgemmaError, match=r"absent\.txt: no such file or folder"):
        read_corpus([str(tmp_path / "absent.txt")])


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "a.txt")

    monkeypatch.setattr(Path, "open", refuse)
    assert read_corpus([str(tmp_path)]) == ([], [], 0, 1)
    with pytest.raises(PermissionError):
        read_corpus([str(tmp_path / "a.txt")])


def test_images_are_known_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    images = ["a.jpg", "b.JPEG", "c.png", "d.webp", "e.gif", "f.bmp", "g.tif", "h.TIFF"]
    for name in (*images, "i.svg", "j.txt", "k.png.txt", ".l.png", "out.png"):
        Path(name).write_text("text")
    Path("m.png").mkdir()
    Path("m.png/n.png").touch()
    corpus = read_corpus(["."], but=tmp_path / "out.png")
    assert [image.file for image in corpus.images] == [*images, "m.png/n.png"]
    assert [paragraph.file for paragraph in corpus.paragraphs] == ["j.txt", "k.png.txt"]
    assert read_corpus(["."], "images", but=Path("out.png")) == ([], corpus.images, 0, 0)
    assert read_corpus(["."], "text") == (corpus.paragraphs, [], 2, 0)
    # What is named is taken, and taken once.
    assert read_corpus([".l.png", "a.jpg", "a.jpg", "j.txt"], "images").images == [Picture(".l.png"), Picture("a.jpg")]
    assert read_corpus(["a.jpg"], "text") == ([], [], 0, 0)
