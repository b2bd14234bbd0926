"""The command line with images: what it prints, stores and draws is what `Encoder` gives; what cannot be read is said.

`shell` runs the program itself; `run` calls `main` in this process, which is quicker.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from egemma_mlx import cli
from egemma_mlx.cli.arguments import SHARED
from egemma_mlx.encoder import Encoder
from egemma_mlx.media.image import BUDGETS
from egemma_mlx.random_checkpoint import write_checkpoint

Image = pytest.importorskip("PIL.Image")

ROOT = Path(__file__).parents[1]
DOCUMENT = "title: none | text: "


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def embeddings(self) -> np.ndarray:
        return np.array([line["embedding"] for line in self.lines], np.float32)


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("session") / "seeing", modalities=("text", "image"))


@pytest.fixture(scope="module")
def encoder(model: Path) -> Encoder:
    return Encoder(model, modalities=("text", "image"))


def draw(name: str, size: tuple[int, int], slope: tuple[int, int, int], **save: object) -> Path:
    """A picture of three ramps, unlike those of another slope."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    pixels = np.stack([np.abs(x * r + y * (2 - r)) % 256 for r in slope], axis=-1).astype(np.uint8)
    path = Path(name)
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.fromarray(pixels).save(path, **save)
    return path


@pytest.fixture(autouse=True)
def surroundings(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder `photos` of four images and a text, in a working folder of its own; the signal handler of before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGEMMA_MODEL", str(model))
    draw("photos/a.png", (96, 64), (0, 1, 2))
    draw("photos/deep/b.JPG", (64, 200), (2, 0, 1), quality=90, format="JPEG")
    draw("photos/c.webp", (50, 50), (1, 1, 0))
    draw("photos/d.gif", (300, 48), (2, 2, 1))
    Path("photos/notes.md").write_text("# Rivers\n\nA river.\n")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


PHOTOS = ["photos/a.png", "photos/c.webp", "photos/d.gif", "photos/deep/b.JPG"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


def shell(*arguments: object, before: str = "", **environment: str) -> Done:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = f"import sys\n{before}\nfrom egemma_mlx.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def assert_one_error(done: Done, *parts: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("egemma-mlx: error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)


# --- embed -----------------------------------------------------------------------------------------------------------


def test_from_a_shell(encoder: Encoder) -> None:
    """Both commands once, as a shell runs them."""
    done = shell("embed", *PHOTOS, "a text")
    assert (done.code, done.err) == (0, "")
    assert [{**line, "embedding": None} for line in done.lines] == [
        *({"image": path, "embedding": None} for path in PHOTOS),
        {"text": "a text", "embedding": None},
    ]
    close(done.embeddings(), encoder.encode([*map(Path, PHOTOS), "a text"]))

    done = shell("search", "a red bicycle", "photos", "--contact-sheet", "out.png")
    assert done.code == 0
    assert done.err == "egemma-mlx: 1 paragraphs in 1 files (0 more are unreadable as text), 4 images\n"
    assert sorted(line.split()[1] for line in done.out.splitlines() if line[0] != " ") == [*PHOTOS, "photos/notes.md:3"]
    assert Image.open("out.png").width > 1000


def test_no_image_loads_no_tower(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    start = Encoder.__init__

    def init(self: Encoder, *arguments: Any, modalities: tuple[str, ...], **options: Any) -> None:
        loaded.append(modalities)
        start(self, *arguments, modalities=modalities, **options)

    monkeypatch.setattr(Encoder, "__init__", init)
    assert run("embed", "a text", "see photo a.png").code == 0
    assert run("search", "a text", "photos/notes.md").code == 0
    assert run("search", "a text", "photos", "--only", "text", "--max-soft-tokens", 70).code == 0
    assert loaded == 3 * [("text",)]
    assert run("embed", "photos/a.png").code == run("search", "a text", "photos").code == 0
    assert run("search", "photos/a.png", "photos", "--only", "text").code == 0
    assert loaded[3:] == 3 * [("text", "image")]


def test_options_reach_the_images(run: Run, encoder: Encoder) -> None:
    paths = [Path(path) for path in PHOTOS]
    done = run("embed", *PHOTOS, "--prompt-name", "query", "--truncate-dim", 32)
    close(done.embeddings(), encoder.encode_query(paths, truncate_dim=32))
    done = run("embed", *PHOTOS, "--max-soft-tokens", 70, "--batch-tokens", 16)
    close(done.embeddings(), encoder.encode(paths, max_soft_tokens=70))
    assert not np.allclose(done.embeddings(), encoder.encode(paths), atol=1e-4)
    assert SHARED["--max-soft-tokens"]["choices"] == BUDGETS


def write_lines(name: str, *records: object) -> Path:
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_records(run: Run, encoder: Encoder, tmp_path: Path) -> None:
    a, b, c = (tmp_path / "photos" / name for name in ("a.png", "deep/b.JPG", "c.webp"))
    given = [
        {"image": "../photos/a.png", "id": 1},
        {"image": str(b), "text": "caption"},
        {"text": "caption", "image": "../photos/c.webp"},
        {"image": ["../photos/a.png", "../photos/c.webp"]},
        {"text": "between <|image|> words", "image": "../photos/a.png"},
        "../photos/a.png",
        {"text": str(a)},
    ]
    inputs = [
        a,
        {"image": b, "text": "caption"},
        {"text": "caption", "image": c},
        {"image": [a, c]},
        {"text": "between <|image|> words", "image": a},
        {"text": "../photos/a.png"},
        {"text": str(a)},
    ]
    source = write_lines("lists/records.jsonl", *given)
    done = run("embed", "--input", source, "--output", "lists/v.jsonl")
    assert done == (0, "", "")
    lines = [json.loads(line) for line in Path("lists/v.jsonl").read_text().splitlines()]
    close([line.pop("embedding") for line in lines], encoder.encode(inputs))
    assert lines == [record if isinstance(record, dict) else {"text": record} for record in given]
    # What was written reads back as an input.
    again = run("embed", "--input", "lists/v.jsonl", "--prompt-name", "query")
    close(again.embeddings(), encoder.encode_query(inputs))

    assert run("embed", "--input", source, "--output", "v.npz").code == 0
    stored = np.load("v.npz")
    assert sorted(stored) == ["embeddings", "images", "texts"]
    assert stored["texts"].tolist() == [
        "",
        "caption",
        "caption",
        "",
        "between <|image|> words",
        "../photos/a.png",
        str(a),
    ]
    assert stored["images"].tolist()[3] == "lists/../photos/a.png\nlists/../photos/c.webp"
    assert stored["images"].tolist()[5:] == ["", ""]
    assert (
        run("embed", "--input", write_lines("i.jsonl", {"id": 7, "image": "photos/a.png"}), "--output", "v.npz").code
        == 0
    )
    assert sorted(np.load("v.npz")) == ["embeddings", "ids"]


def test_titles(run: Run, encoder: Encoder, tmp_path: Path) -> None:
    a = tmp_path / "photos/a.png"
    source = write_lines(
        "d.jsonl",
        {"image": "photos/a.png", "title": "A"},
        {"image": "photos/a.png"},
        {"image": "photos/a.png", "text": "caption", "title": "B"},
        {"text": "text"},
    )
    inputs = [
        {"text": "title: A | text: ", "image": a},
        {"text": DOCUMENT, "image": a},
        {"text": "title: B | text: <|image|>caption", "image": a},
        {"text": f"{DOCUMENT}text"},
    ]
    close(run("embed", "--input", source).embeddings(), encoder.encode(inputs, prompt=""))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": 5}, '"image" to be a path or an array of them but got a number'),
        ({"image": None}, '"image" to be a path or an array of them but got null'),
        ({"image": ["photos/a.png", {}]}, '"image" to be a path or an array of them but got an object'),
        ({"image": []}, '"image" to be a path or an array of them but got an array'),
        ({"image": "photos/a.png", "text": None}, '"text" to be a string but got null'),
        ({"picture": "photos/a.png"}, 'a string or an object with "text" or "image" but got an object with picture'),
        ({"image": "absent.png"}, "absent.png: "),
        ({"image": "photos"}, "photos: "),
        ({"image": "https://example.org/a.png"}, "download it first"),
        ({"image": "photos/notes.md"}, "photos/notes.md: "),
        ({"image": "cut.jpg"}, "cut.jpg: "),
        ({"text": "<|image|><|image|>", "image": "photos/a.png"}, "2 '<|image|>' but 1 images"),
        ({"text": "<|image|>"}, "'<|image|>'"),
    ],
)  # fmt: skip
def test_bad_record_is_named(run: Run, fields: dict[str, Any], message: str) -> None:
    whole = draw("cut.jpg", (200, 200), (0, 1, 2)).read_bytes()
    Path("cut.jpg").write_bytes(whole[: len(whole) // 2])
    write_lines("bad.jsonl", {"image": "photos/a.png"}, "good", fields, {"image": "photos/a.png"})
    done = run("embed", "--input", "bad.jsonl", "--output", "v.npy")
    assert_one_error(done, "error: bad.jsonl:3: ", message)
    assert "input 2" not in done.err and not Path("v.npy").exists()


def test_bad_image_argument(run: Run) -> None:
    assert_one_error(run("embed", "a text", "photos/phoot.png"), "photos/phoot.png: no such image file")
    assert_one_error(run("search", "phoot.png", "photos"), "phoot.png: no such image file")
    assert_one_error(run("embed", "photos/a.png", "--max-soft-tokens", 100), "--max-soft-tokens: invalid choice: ")
    Path("bad.png").write_text("not an image")
    assert_one_error(run("embed", "photos/a.png", "bad.png"), "error: image 2: bad.png: expected an image")
    done = run("search", "bad.png", "photos")
    assert done.code == 2 and done.err.splitlines()[1].startswith(
        "egemma-mlx: error: query: bad.png: expected an image"
    )
    # Words are a text, whatever they end in.
    assert run("embed", "where is phoot.png").lines[0]["text"] == "where is phoot.png"


# --- search ----------------------------------------------------------------------------------------------------------


def test_search_ranks_images_and_texts(run: Run, encoder: Encoder) -> None:
    done = run("search", "a red bicycle", "photos", "--json")
    inputs = [*map(Path, PHOTOS), "title: Rivers | text: A river."]
    vectors = [*encoder.encode(inputs[:4], prompt=DOCUMENT), encoder.encode(inputs[4], prompt="")]
    scores = encoder.similarity(encoder.encode_query("a red bicycle"), np.array(vectors))[0]
    expected = dict(zip([*PHOTOS, "photos/notes.md"], scores, strict=True))
    assert {line["file"]: pytest.approx(line["score"], abs=2e-6) for line in done.lines} == expected
    ranked = [line["score"] for line in done.lines]
    assert ranked == sorted(ranked, reverse=True)
    kinds = {line["file"]: {key: value for key, value in line.items() if key != "score"} for line in done.lines}
    assert kinds["photos/a.png"] == {"file": "photos/a.png", "image": "photos/a.png"}
    text = {"file": "photos/notes.md", "line": 3, "title": "Rivers", "text": "A river."}
    assert kinds["photos/notes.md"] == text

    printed = run("search", "a red bicycle", "photos", "--top", 3).out.splitlines()
    assert [line for line in printed if line[0] != " "] == [
        f"{line['score']:.4f}  {line['file']}" + (":3  Rivers" if "line" in line else "") for line in done.lines[:3]
    ]
    small = run("search", "a red bicycle", "photos", "--max-soft-tokens", 70, "--json").lines
    assert {line["score"] for line in small if "image" in line}.isdisjoint(ranked)


def test_only(run: Run) -> None:
    done = run("search", "q", "photos", "--only", "images", "--json")
    assert done.err == "egemma-mlx: 4 images\n" and sorted(line["file"] for line in done.lines) == PHOTOS
    done = run("search", "q", "photos", "--only", "text", "--json")
    assert [line["file"] for line in done.lines] == ["photos/notes.md"]
    assert_one_error(run("search", "q", "photos/a.png", "--only", "text"), "nothing to search: 0 paragraphs in 0 files")


def test_an_image_finds_its_copy(run: Run) -> None:
    Path("query.png").write_bytes(Path(PHOTOS[2]).with_name("a.png").read_bytes())
    best = run("search", "query.png", "photos", "--json").lines[0]
    assert best["file"] == "photos/a.png" and best["score"] == pytest.approx(1, abs=2e-6)
    asked = run("search", "query.png", "photos", "--json", "--prompt-name", "Clustering").lines
    assert {line["file"] for line in asked} == {*PHOTOS, "photos/notes.md"}
    assert all(line["score"] < 1 - 1e-5 for line in asked)


def test_unreadable_images_are_skipped(run: Run, encoder: Encoder) -> None:
    good = run("search", "q", "photos", "--json").lines
    whole = draw("photos/cut.jpg", (200, 200), (0, 1, 2)).read_bytes()
    Path("photos/cut.jpg").write_bytes(whole[: len(whole) // 2])
    Path("photos/b.png").write_text("a text")
    Path("photos/empty.gif").touch()
    done = run("search", "q", "photos", "--json", "--contact-sheet", "out.html")
    assert done.code == 0 and done.lines == good
    summary, *skipped, count = done.err.splitlines()
    assert summary.endswith(", 7 images") and count == "egemma-mlx: 3 of 7 images are skipped"
    for line, name in zip(skipped, ["photos/b.png", "photos/cut.jpg", "photos/empty.gif"], strict=True):
        assert line.startswith(f"egemma-mlx: skipped {name}: ") and "input" not in line
    assert Path("out.html").read_text().count("<img") == 4

    done = run("search", "q", "photos/b.png", "photos/cut.jpg", "--contact-sheet", "all.html")
    assert done.code == 2 and done.err.endswith("error: nothing to search: no image can be read\n")
    assert not Path("all.html").exists()


def test_an_animation_counts_by_its_first_frame(run: Run) -> None:
    first, second = Image.open(draw("1.png", (64, 64), (0, 1, 2))), Image.open(draw("2.png", (64, 64), (2, 1, 0)))
    first.save("film.gif", save_all=True, append_images=[second])
    done = run("search", "q", "film.gif", "--json")
    assert done.code == 0 and "warning: film.gif: has several frames, and only the first is used" in done.err


# --- without a tower, without Pillow ---------------------------------------------------------------------------------


def test_a_checkpoint_without_image_tower(run: Run, tiny_text: Path) -> None:
    done = run("search", "q", "photos", "--model", tiny_text, "--json")
    assert [line["file"] for line in done.lines] == ["photos/notes.md"]
    lack = f"{tiny_text} has no image tower; google/embeddinggemma-2 has (`hf download google/embeddinggemma-2`)"
    assert done.err.splitlines()[1] == f"egemma-mlx: the images are left out: {lack}"
    assert_one_error(run("embed", "photos/a.png", "--model", tiny_text), lack)
    for arguments in (["photos/a.png", "photos/notes.md"], ["q", "photos", "--only", "images"]):
        done = run("search", *arguments, "--model", tiny_text)
        assert (done.code, done.out) == (2, "") and done.err.endswith(f"error: {lack}\n")


NO_PILLOW = "sys.modules['PIL'] = None"


def test_without_pillow() -> None:
    extra = "images need Pillow: pip install 'egemma-mlx[image]'"
    assert_one_error(shell("embed", "photos/a.png", before=NO_PILLOW), extra)
    assert_one_error(shell("search", "q", "photos", "--contact-sheet", "o.html", before=NO_PILLOW), "o.html: ", extra)
    done = shell("search", "q", "photos", before=NO_PILLOW)
    assert done.code == 0 and f"egemma-mlx: the images are left out: {extra}\n" in done.err
    assert "photos/notes.md:3" in done.out


# --- contact sheets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.png", "out.html", "OUT.HTML"])
def test_contact_sheet(run: Run, name: str) -> None:
    plain = run("search", "a <red> bicycle", "photos", "--top", 4)
    assert run("search", "a <red> bicycle", "photos", "--top", 4, "--contact-sheet", name) == plain
    if name == "out.png":
        assert Image.open(name).format == "PNG"
    else:
        page = Path(name).read_text()
        assert '<h1 dir="auto">a &lt;red&gt; bicycle</h1>' in page and page.count("<figure>") == 4
        places = [line.split()[1] for line in plain.out.splitlines() if line[0] != " "]
        assert [page.index(f"<span>{place}</span>") for place in places] == sorted(
            page.index(f"<span>{place}</span>") for place in places
        )
    # The sheet is no result of the next search.
    assert run("search", "a <red> bicycle", ".", "--top", 99, "--contact-sheet", name).out.count(name) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.jpg", "--contact-sheet out.jpg: expected a name that ends in .png, .html"),
        ("out", "--contact-sheet out: expected a name that ends in .png, .html"),
        ("absent/out.png", "absent/out.png: cannot be written (No such file or directory)"),
        ("folder.png", "folder.png: cannot be written (it is a folder)"),
    ],
)
def test_bad_sheet_is_refused_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    Path("folder.png").mkdir()
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("computed"))
    done = run("search", "q", "photos", "--contact-sheet", name)
    assert (done.code, done.out) == (2, "") and done.err.endswith(f"error: {message}\n")
    assert sorted(path.name for path in Path().iterdir()) == ["folder.png", "photos"]


def test_a_failure_leaves_the_sheet_of_before(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.html").write_text("an older sheet")
    monkeypatch.setattr("egemma_mlx.contact_sheet._thumbnail", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert run("search", "q", "photos", "--contact-sheet", "out.html").code == 130
    assert Path("out.html").read_text() == "an older sheet"
    assert sorted(path.name for path in Path().iterdir()) == ["out.html", "photos"]


# --- info ------------------------------------------------------------------------------------------------------------


def test_info_names_the_towers(run: Run, model: Path, tiny_text: Path) -> None:
    rows = dict(line.split(maxsplit=1) for line in run("info").out.splitlines())
    (facts,) = run("info", "--json").lines
    assert rows["parameters"].split(", ")[1] == f"image {facts['parameters']['image']:,}"
    assert rows["images"] == "2 layers of width 32, 2 heads of 16; a token for 48×48 pixels"
    assert "images      none: this checkpoint has no such tower\n" in run("info", "--model", tiny_text).out
