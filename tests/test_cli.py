"""The command line: what it prints and stores is what `Encoder` gives, and what goes wrong is one line and exit code 2.

`shell` runs the program itself; `run` calls `main` in this process, which is quicker.
"""

from __future__ import annotations

import argparse
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

import egemma_mlx
from egemma_mlx import checkpoint, cli, random_checkpoint, vectors
from egemma_mlx.documents import Paragraph
from egemma_mlx.encoder import Encoder
from egemma_mlx.kernels.backend import picked
from egemma_mlx.records import json_lines
from egemma_mlx.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
COMMANDS = ("embed", "search", "info", "doctor", "export", "bench", "checkpoint")
TEXTS = ["a river in the north", "", "memory of a computer " * 20, "grüße 你好 🌍"]


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
def encoder(tiny_text: Path) -> Encoder:
    return Encoder(tiny_text)


@pytest.fixture(autouse=True)
def surroundings(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, the tiny model as the default one, and the signal handler of before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGEMMA_MODEL", str(tiny_text))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call


def command(*arguments: object) -> tuple[list[str], dict[str, str]]:
    """The program, and an environment in which any folder has this checkout's package, installed or not."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return [sys.executable, "-m", "egemma_mlx.cli", *map(str, arguments)], {**os.environ, "PYTHONPATH": path}


def shell(*arguments: object, stdin: bytes = b"", **environment: str) -> Done:
    program, variables = command(*arguments)
    done = subprocess.run(
        program, input=stdin, env={**variables, **environment}, capture_output=True, timeout=120, check=False
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def names(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def assert_one_error(done: Done, *parts: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("egemma-mlx: error: ") and done.err.count("\n") == 1, done.err
    for part in parts:
        assert part in done.err


# --- the program -----------------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from egemma_mlx.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'mlx', 'numpy', 'tokenizers', 'safetensors', 'huggingface_hub', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    _, environment = command()
    for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        words = " ".join(done.stdout.split())
        if arguments == ["--version"]:
            assert words == f"egemma-mlx {egemma_mlx.__version__}"
        elif arguments == ["--help"]:
            assert all(name in words for name in COMMANDS)
        else:
            assert words.startswith(f"usage: egemma-mlx {arguments[0]} ")
            assert arguments[0] in ("bench", "checkpoint", "doctor") or checkpoint.DEFAULT_MODEL in words


@pytest.mark.parametrize(("chosen", "used"), [(None, "0"), ("1", "1")])
def test_cuda_graphs_are_off_unless_chosen(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: str | None, used: str
) -> None:
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "")  # restored afterwards
    monkeypatch.delenv("MLX_USE_CUDA_GRAPHS")
    if chosen:
        monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", chosen)
    run("info", "--model", "mini")
    assert os.environ["MLX_USE_CUDA_GRAPHS"] == used


def test_choices_are_those_of_the_package() -> None:
    parser = argparse.ArgumentParser()
    for command in (cli.embed, cli.checkpoint):
        command.add_arguments(parser)
    choices = {name: action.choices for action in parser._actions for name in action.option_strings}
    assert choices["--precision"] == vectors.PRECISIONS
    assert choices["--modalities"] == checkpoint.MODALITIES
    assert set(choices["--size"]) == set(random_checkpoint._SIZES)
    assert set(choices["--dtype"]) == set(random_checkpoint._STORED)


def test_from_checkpoint_to_search(tmp_path: Path) -> None:
    """Each command once, as a shell runs it."""
    model = tmp_path / "model"
    done = shell("checkpoint", "--size", "tiny", model, "--modalities", "text", "--seed", "3")
    assert (done.code, done.err) == (0, "") and done.out.startswith(f"{model}: tiny random checkpoint, 0.9 MB")

    done = shell("info", "--model", model)
    assert (done.code, done.err) == (0, "") and f"model       {model}\n" in done.out

    encoder = Encoder(model)
    done = shell("embed", *TEXTS, "--prompt-name", "query", "--model", model)
    assert (done.code, done.err) == (0, "")
    assert [line["text"] for line in done.lines] == TEXTS
    np.testing.assert_allclose(done.embeddings(), encoder.encode_query(TEXTS), atol=1e-6)

    done = shell("embed", "--input", "-", "--output", "v.npy", stdin="\n".join(TEXTS).encode(), EGEMMA_MODEL=str(model))
    assert done == (0, "", "")
    np.testing.assert_allclose(np.load("v.npy"), encoder.encode(TEXTS), atol=1e-6)

    Path("notes.md").write_text("# Rivers\n\nThe river comes from the mountain.\n\nWater.\n")
    done = shell("search", "river", "notes.md", "--model", model)
    assert done.code == 0 and done.err == "egemma-mlx: 2 paragraphs in 1 files (0 more are unreadable as text)\n"
    assert "  notes.md:3  Rivers\n" in done.out and "  notes.md:5  Rivers\n        Water.\n" in done.out


def test_a_reader_that_stops(tmp_path: Path) -> None:
    (tmp_path / "many.txt").write_text("a text\n" * 2000)  # far more output than a pipe holds
    program, environment = command("embed", "--input", "many.txt")
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["text"] == "a text"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_killed_in_the_middle(number: signal.Signals, code: int) -> None:
    program = (
        "import sys, time\n"
        "from egemma_mlx import cli\n"
        "from egemma_mlx.encoder import Encoder\n"
        "def encode(*_, **__):\n    print('encoding', flush=True)\n    time.sleep(60)\n"
        "Encoder.encode = encode\n"
        "sys.exit(cli.main(['embed', 'a text', '--output', 'v.npy']))"
    )
    _, environment = command()
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"encoding\n"
        assert [path.suffix for path in Path().iterdir()] == [".partial"]
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err == (b"egemma-mlx: interrupted\n" if number == signal.SIGINT else b"")
    assert names() == []


# --- which model -----------------------------------------------------------------------------------------------------


def test_without_network_and_weights(tmp_path: Path) -> None:
    """The hub's own client and an address where nothing listens: one line, soon, that names the ways out."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"}
    real = checkpoint.DEFAULT_MODEL
    done = shell("embed", "a text", "--output", "v.npy", "--model", real, **nowhere)
    ways = ("local checkpoint folder", "EGEMMA_MODEL", "mini", f"hf download {real}", "egemma-mlx checkpoint")
    assert_one_error(done, f"{real!r} is not a folder and the hub did not give it", *ways)
    assert not Path("v.npy").exists()


def test_the_option_goes_before_the_environment(
    run: Run, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = random_checkpoint.write_checkpoint(tmp_path / "other", modalities=("text",), seed=9)
    expected = Encoder(other).encode("a text")
    np.testing.assert_array_equal(run("embed", "a text", "--model", other).embeddings()[0], expected)
    monkeypatch.setenv("EGEMMA_MODEL", str(other))
    np.testing.assert_array_equal(run("embed", "a text").embeddings()[0], expected)
    assert not np.allclose(run("embed", "a text", "--model", tiny_text).embeddings()[0], expected)


def test_revision_goes_to_the_hub(run: Run, tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(*arguments: object) -> Path:
        asked.append(arguments)
        return tiny_text

    monkeypatch.setattr(checkpoint, "resolve", resolve)
    assert run("info", "--model", "org/name", "--revision", "v1").code == 0
    assert run("embed", "a text", "--model", "org/name", "--revision", "v1").code == 0
    assert asked.count(("org/name", "v1")) == 2


# --- embed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--prompt-name", "query"], {"prompt_name": "query"}),
        (["--prompt", "title: none | text: "], {"prompt": "title: none | text: "}),
        (["--prompt", ""], {"prompt": ""}),
        (["--truncate-dim", "32"], {"truncate_dim": 32}),
        (["--batch-tokens", "64"], {"batch_tokens": 64}),
        (["--precision", "int8"], {"precision": "int8"}),
        (["--precision", "ubinary", "--truncate-dim", "64"], {"precision": "ubinary", "truncate_dim": 64}),
    ],
)
def test_vectors_are_the_encoders(run: Run, encoder: Encoder, arguments: list[str], options: dict[str, Any]) -> None:
    expected = encoder.encode(TEXTS, **options)
    printed = run("embed", *TEXTS, *arguments)
    assert (printed.code, printed.err) == (0, "")
    np.testing.assert_array_equal(np.array([line["embedding"] for line in printed.lines], expected.dtype), expected)
    assert run("embed", *arguments, "--output", "v.npy", "--", *TEXTS) == (0, "", "")
    stored = np.load("v.npy")
    assert stored.dtype == expected.dtype
    np.testing.assert_array_equal(stored, expected)


OBJECTS = [{"text": text, "id": number, "kept": [1, None]} for number, text in enumerate(TEXTS, 7)]


@pytest.mark.parametrize("source", ["texts.txt", "strings.jsonl", "objects.jsonl"])
def test_formats(run: Run, encoder: Encoder, source: str) -> None:
    Path("texts.txt").write_text("\n".join(TEXTS) + "\n")
    Path("strings.jsonl").write_text("\n\n".join(map(json.dumps, TEXTS)))
    Path("objects.jsonl").write_text("".join(json.dumps(fields, ensure_ascii=False) + "\r\n" for fields in OBJECTS))
    expected = encoder.encode(TEXTS)
    for name in ("v.npy", "v.npz", "v.jsonl", "V.NPY"):
        assert run("embed", "--input", source, "--output", name) == (0, "", "")
    np.testing.assert_array_equal(np.load("v.npy"), expected)
    assert Path("V.NPY").read_bytes() == Path("v.npy").read_bytes()

    stored = np.load("v.npz")
    np.testing.assert_array_equal(stored["embeddings"], expected)
    if source == "objects.jsonl":
        assert sorted(stored) == ["embeddings", "ids"] and stored["ids"].tolist() == ["7", "8", "9", "10"]
    else:
        assert sorted(stored) == ["embeddings", "texts"] and stored["texts"].tolist() == TEXTS

    text = Path("v.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    np.testing.assert_array_equal(np.array([line.pop("embedding") for line in lines], np.float32), expected)
    assert lines == (OBJECTS if source == "objects.jsonl" else [{"text": text} for text in TEXTS])
    assert run("embed", "--input", source).out == text
    # What was written reads back as an input.
    assert run("embed", "--input", "v.jsonl").out == text


def test_json_gives_every_float32_back() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, (50, 256), np.uint64).astype(np.uint32)
    floats = np.nan_to_num(bits.view(np.float32))
    lines = [json.loads(line)["embedding"] for line in json_lines([SimpleNamespace(fields={})] * 50, floats)]  # type: ignore[list-item]
    np.testing.assert_array_equal(np.array(lines, np.float32), floats)


def test_lines_of_text(run: Run) -> None:
    given = "\ufefffirst\r\n\n third\u2028still third\x0b \nlast"
    expected = ["first", "", " third\u2028still third\x0b ", "last"]
    Path("t.txt").write_bytes(given.encode())
    assert [line["text"] for line in run("embed", "--input", "t.txt").lines] == expected
    assert [line["text"] for line in run("embed", "--input", "-", stdin=given.encode()).lines] == expected


@pytest.mark.parametrize("precision", vectors.PRECISIONS)
def test_no_texts(run: Run, encoder: Encoder, precision: vectors.Precision) -> None:
    for source in ("empty.txt", "empty.jsonl"):
        Path(source).write_bytes(b"" if source == "empty.txt" else b"\n \n")
        assert run("embed", "--input", source, "--precision", precision) == (0, "", "")
        for name in ("v.npy", "v.npz", "v.jsonl"):
            assert run("embed", "--input", source, "--output", name, "--precision", precision) == (0, "", "")
        expected = encoder.encode([], precision=precision)
        for stored in (np.load("v.npy"), np.load("v.npz")["embeddings"]):
            assert (stored.shape, stored.dtype) == (expected.shape, expected.dtype)
        assert np.load("v.npz")["texts"].tolist() == [] and Path("v.jsonl").read_bytes() == b""


def test_titles(run: Run, encoder: Encoder) -> None:
    given = [{"text": "one", "title": "A"}, {"text": "two"}, {"text": "three", "title": ""}, "four"]
    Path("d.jsonl").write_text("\n".join(map(json.dumps, given)))
    texts = ["title: A | text: one", *(f"title: none | text: {text}" for text in ("two", "three", "four"))]
    expected = encoder.encode(texts, prompt="")
    for arguments in ([], ["--prompt-name", "document"], ["--prompt", "title: none | text: "]):
        done = run("embed", "--input", "d.jsonl", *arguments)
        np.testing.assert_array_equal(done.embeddings(), expected)
        assert [line.get("title") for line in done.lines] == ["A", None, "", None]
    for arguments in (["--prompt-name", "query"], ["--prompt", ""]):
        assert_one_error(run("embed", "--input", "d.jsonl", *arguments), "d.jsonl:1: has a title", "document prompt")
    # Without any title the prompt is a free choice.
    Path("n.jsonl").write_text('{"text": "two", "title": null}\n{"text": "three"}')
    done = run("embed", "--input", "n.jsonl", "--prompt-name", "query")
    np.testing.assert_array_equal(done.embeddings(), encoder.encode_query(["two", "three"]))


def test_truncation(run: Run, encoder: Encoder) -> None:
    done = run("embed", "--max-length", 5, "--truncate", *TEXTS)
    with pytest.warns(UserWarning, match="3 of 4 texts cut to 5 tokens"):
        expected = encoder.encode(TEXTS, max_length=5, truncation=True)
    np.testing.assert_array_equal(done.embeddings(), expected)
    assert (done.code, done.err) == (0, "egemma-mlx: warning: 3 of 4 texts cut to 5 tokens\n")

    Path("t.jsonl").write_text('"short"\n\n"' + "long " * 9000 + '"\n')
    done = run("embed", "--input", "t.jsonl", "--output", "v.npy", "--prompt-name", "query")
    assert_one_error(done, "t.jsonl:3: prompt + text has 9", "where 8192 are allowed")
    assert names() == ["t.jsonl"]


def test_both_prompts_warn_once(run: Run, encoder: Encoder) -> None:
    done = run("embed", "a text", "--prompt", "p: ", "--prompt-name", "query")
    np.testing.assert_array_equal(done.embeddings()[0], encoder.encode("a text", prompt="p: "))
    assert done.err == "egemma-mlx: warning: prompt_name 'query' is ignored: prompt was given too\n"


# --- an output file is complete or absent ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (egemma_mlx.EgemmaError("expected more"), 2, "egemma-mlx: error: expected more\n"),
        (OSError(28, "Disk full"), 2, "egemma-mlx: error: {path}: cannot be written (Disk full)\n"),
        (KeyboardInterrupt(), 130, "egemma-mlx: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("name", ["v.npy", "v.npz", "v.jsonl"])
@pytest.mark.parametrize("before", [None, b"an older result"])
@pytest.mark.parametrize("where", ["encode", "write"])
def test_a_failure_leaves_what_was_there(
    run: Run, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int, message: str, name: str,
    before: bytes | None, where: str,
) -> None:  # fmt: skip
    if before is not None:
        Path(name).write_bytes(before)

    class Vectors:
        """Fails when it is written, after some bytes of a .jsonl."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise failure

        def __iter__(self) -> Iterator[np.ndarray]:
            yield np.zeros(2, np.float32)
            raise failure

    def encode(*_: Any, **__: Any) -> Any:
        assert any(path.suffix == ".partial" for path in Path().iterdir())
        if where == "encode":
            raise failure
        return Vectors()

    monkeypatch.setattr(Encoder, "encode", encode)
    assert run("embed", "one", "two", "--output", name) == (code, "", message.format(path=name))
    assert names() == ([] if before is None else [name])
    assert before is None or Path(name).read_bytes() == before


def test_a_result_replaces_an_older_one(run: Run, encoder: Encoder) -> None:
    Path("v.npy").write_bytes(b"an older result")
    umask = os.umask(0o027)
    try:
        assert run("embed", "a text", "--output", "v.npy").code == 0
    finally:
        os.umask(umask)
    np.testing.assert_array_equal(np.load("v.npy"), encoder.encode(["a text"]))
    assert names() == ["v.npy"] and Path("v.npy").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("absent/v.npy", "absent/v.npy: cannot be written (No such file or directory)"),
        ("file/v.npy", "file/v.npy: cannot be written (Not a directory)"),
        ("folder.npy", "folder.npy: cannot be written (it is a folder)"),
        ("v.csv", "--output v.csv: expected a name that ends in .npy, .jsonl, .npz"),
        ("v", "--output v: expected a name that ends in .npy, .jsonl, .npz"),
        (".npy", "--output .npy: expected a name that ends in"),
    ],
)
def test_bad_output_is_refused_before_the_work(
    run: Run, monkeypatch: pytest.MonkeyPatch, output: str, message: str
) -> None:
    Path("file").touch()
    Path("folder.npy").mkdir()
    monkeypatch.setattr(Encoder, "encode", lambda *_, **__: pytest.fail("computed"))
    assert_one_error(run("embed", "a text", "--output", output), message)
    assert names() == ["file", "folder.npy"] and names("folder.npy") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    assert_one_error(run("embed", "a text", "--output", folder / "v.npy"), "cannot be written (Permission denied)")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 5}', '"text" to be a string but got a number'),
        (b'{"text": null}', '"text" to be a string but got null'),
        (b'{"text": ["a"]}', '"text" to be a string but got an array'),
        (b'{"text": "a", "title": {}}', '"title" to be a string but got an object'),
        (b'{"body": "a"}', 'a string or an object with "text" or "image" but got an object with body'),
        (b"{}", "but got an object with nothing"),
        (b"7", 'a string or an object with "text" or "image" but got a number'),
        (b"true", "but got a boolean"),
        (b'{"text": "a"', "not JSON (Expecting ',' delimiter at column 13)"),
        (b"plain text", "not JSON (Expecting value at column 1)"),
        (b"[" * 100_000, "not JSON ("),
        (b'{"text": "\xff"}', "expected UTF-8 but got byte 0xff"),
        (b'"\\ud800"', "text: expected Unicode text but got a lone surrogate"),
        (b'"see <|image|>"', "text contains '<|image|>', which stands for media"),
    ],
)
def test_bad_line_is_named(run: Run, line: bytes, message: str) -> None:
    Path("bad.jsonl").write_bytes(b'"good"\n\n' + line + b'\n"good"\n')
    for output in ([], ["--output", "v.jsonl"]):
        assert_one_error(run("embed", "--input", "bad.jsonl", *output), "bad.jsonl:3: ", message)
    assert names() == ["bad.jsonl"]


def test_bytes_that_are_no_text(run: Run) -> None:
    given = b"good\n\xe4 latin\n"
    Path("t.txt").write_bytes(given)
    assert_one_error(run("embed", "--input", "t.txt", "--output", "v.npy"), "t.txt:2: expected UTF-8 but got byte 0xe4")
    assert_one_error(run("embed", "--input", "-", stdin=given), "<stdin>:2: expected UTF-8")
    assert names() == ["t.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["embed"], "expected either TEXT_OR_IMAGE… or --input"),
        (["embed", "a", "--input", "-"], "expected either TEXT_OR_IMAGE… or --input"),
        (["embed", "--input", "absent.txt"], "absent.txt: No such file or directory"),
        (["embed", "--input", "table.csv"], "table.csv: expected a .txt or .jsonl file, or - for standard input"),
        (["embed", "--input", "folder.txt"], "folder.txt: Is a directory"),
        (["embed", "a", "--prompt-name", "nonsense"], "unknown prompt name 'nonsense'; the names are: "),
        (["embed", "a", "--truncate-dim", "97"], "truncate_dim in 1…96 but got 97"),
        (["embed", "a", "--truncate-dim", "0"], "--truncate-dim: expected a positive integer but got '0'"),
        (["embed", "a", "--batch-tokens", "many"], "--batch-tokens: expected a positive integer but got 'many'"),
        (["embed", "a", "--precision", "int4"], "--precision: invalid choice: 'int4'"),
        (["embed", "a", "--precision", "int8"], "'int8' takes its ranges from the vectors: expected two or more"),
        (["embed", "a", "--max-length", "9000"], "max_length from 2 (BOS and EOS) to 8192"),
        (["embed", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["embed", "a\udcff"], "text 1: text: expected Unicode text but got a lone surrogate"),
        (["search", "a"], "FILE_OR_FOLDER"),
        (["search", "a", "absent"], "absent: no such file or folder"),
        (["search", "a", "folder.txt"], "nothing to search: 0 paragraphs in 0 files"),
        (["search", "a", "table.csv", "--top", "-1"], "--top: expected a positive integer but got '-1'"),
        (["checkpoint", "--size", "huge", "out"], "--size: invalid choice: 'huge'"),
        (["checkpoint", "folder.txt", "--modalities", "text", "smell"], "--modalities: invalid choice: 'smell'"),
        (["checkpoint", "table.csv"], "table.csv: expected a new or empty folder"),
        (["info", "--model", "absent/at/all"], "'absent/at/all' is neither a folder nor a hub id"),
        (["info", "--revision", "v1"], "revision: expected a hub id beside revision 'v1'"),
    ],
)  # fmt: skip
def test_bad_arguments(run: Run, arguments: list[str], message: str) -> None:
    Path("table.csv").write_text("a")
    Path("folder.txt").mkdir()
    assert_one_error(run(*arguments), message)
    assert names() == ["folder.txt", "table.csv"]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_config(f, model_type="gemma3_text"), "expected model_type 'embedding_gemma2' but got "),
        (lambda f: change_config(f, text_config={}), "config.json: text_config: missing required key"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: expected JSON but got "),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json: cannot be read ("),
        (lambda f: (f / "config.json").unlink(), "config.json: no such file"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: the tokenizers library cannot read it"),
        (lambda f: os.truncate(f / "model.safetensors", 70_000), "model.safetensors: truncated or corrupt safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "expected model.safetensors or model.safetensors.index.json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["embed", "info"])
def test_bad_checkpoint(run: Run, damage: Callable[[Path], Any], message: str, name: str) -> None:
    model = random_checkpoint.write_checkpoint("model", modalities=("text",))
    damage(model)
    arguments = ["a text", "--output", "v.npy"] if name == "embed" else []
    assert_one_error(run(name, *arguments, "--model", "model"), "model", message)
    assert names() == ["model"]


def test_no_traceback_from_a_shell() -> None:
    Path("bad.jsonl").write_text("5")
    assert_one_error(shell("embed", "--input", "bad.jsonl", "--output", "v.npy"), "bad.jsonl:1: expected a string")
    assert_one_error(shell("embed", "--input"), "--input", "see egemma-mlx embed --help")
    assert names() == ["bad.jsonl"]


# --- search ----------------------------------------------------------------------------------------------------------

NOTES = {
    "rivers.md": "# Rivers\n\nThe river comes from the mountain.\n\n"
    "## Lakes\n\nA lake has 水水水水水水水水水水水水 \x1b[31mred\n",
    "deep/code.py": "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # see <|image|>\n",
    "film.bin": "\0",
}  # fmt: skip


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    for name, text in NOTES.items():
        path = tmp_path / "notes" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return Path("notes")


def test_search_ranks_paragraphs(run: Run, encoder: Encoder, notes: Path) -> None:
    done = run("search", "where rivers begin", notes, "--json")
    assert done.err == "egemma-mlx: 4 paragraphs in 2 files (1 more are unreadable as text)\n"
    found = {(Path(line["file"]).name, line["line"]): line for line in done.lines}
    expected = [
        ("rivers.md", 3, "Rivers", "The river comes from the mountain."),
        ("rivers.md", 7, "Lakes", "A lake has 水水水水水水水水水水水水 \x1b[31mred"),
        ("code.py", 1, "code.py", "def add(a, b):\n    return a + b"),
        ("code.py", 5, "code.py", "print(add(1, 2))  # see <|image|>"),
    ]
    documents = [Tokenizer.document(text, title).replace("<|image|>", "< |image|>") for *_, title, text in expected]
    scores = encoder.similarity(encoder.encode_query("where rivers begin"), encoder.encode(documents, prompt=""))[0]
    assert len(done.lines) == len(expected)
    for (file, line, title, text), score in zip(expected, scores, strict=True):
        hit = found[file, line]
        assert (hit["title"], hit["text"]) == (title, text) and hit["score"] == pytest.approx(score, abs=1e-6)
    ranked = [line["score"] for line in done.lines]
    assert ranked == sorted(ranked, reverse=True)

    two = run("search", "where rivers begin", notes, "--json", "--top", 2)
    assert two.lines == done.lines[:2]
    other = run("search", "where rivers begin", notes, "--json", "--prompt-name", "FactChecking")
    assert {line["score"] for line in other.lines}.isdisjoint(ranked)


def test_search_fits_the_terminal(run: Run, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = run("search", "where rivers begin", notes)
    lines = done.out.splitlines()
    assert len(lines) == 8
    shown = dict(zip((line.split()[1] for line in lines[::2]), lines[1::2], strict=True))
    assert shown["notes/rivers.md:3"] == "        The river comes from the mounta…"
    assert shown["notes/rivers.md:7"] == "        A lake has 水水水水水水水水水水…"
    assert shown["notes/deep/code.py:1"] == "        def add(a, b): return a + b"
    assert "\x1b" not in done.out
    scores = [float(line.split()[0]) for line in lines[::2]]
    assert scores == sorted(scores, reverse=True)


def test_search_on_a_terminal_without_unicode(notes: Path) -> None:
    done = shell("search", "lakes", notes, PYTHONIOENCODING="ascii:strict")
    assert done.code == 0 and "A lake has ????" in done.out


def test_search_cuts_nothing_off(run: Run, encoder: Encoder) -> None:
    """A paragraph past the model's limit: all of it is embedded, in pieces that know their lines."""
    lines = [f"Line {number} of a long, long log of the system." for number in range(1, 1001)]
    Path("x.log").write_text("\n".join(lines))
    done = run("search", "a log", "x.log", "--top", 1000, "--json")
    hits = sorted(
        (Paragraph(**{k: line[k] for k in Paragraph._fields}) for line in done.lines), key=lambda hit: hit.line
    )
    assert "\n".join(hit.text for hit in hits) == "\n".join(lines)
    assert all(hit.text.startswith(f"Line {hit.line} of") for hit in hits)
    lengths = [len(ids) for ids in encoder.tokenizer.ids([Tokenizer.document(hit.text, hit.title) for hit in hits]).ids]
    assert min(lengths) > 100 and max(lengths) <= 512 and len(hits) > 20


# --- info ------------------------------------------------------------------------------------------------------------


def test_info(run: Run, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "load_tensors", lambda *_, **__: pytest.fail("weights were loaded"))
    model = random_checkpoint.write_checkpoint("model", modalities=("text", "audio"), shard_bytes=400_000)
    done = run("info", "--model", model, "--json")
    (facts,) = done.lines
    config = json.loads((model / "config.json").read_text())["text_config"]
    assert facts["config"]["text"]["hidden_size"] == config["hidden_size"]
    assert facts["config"]["vision"] is None and facts["config"]["audio"]["num_hidden_layers"] == 2
    assert [layer["window"] for layer in facts["config"]["text"]["layers"]] == [8, 8, None, 8, 8, None]
    assert facts["parameters"] == checkpoint.tower_sizes(model, encoder.model.config) | {
        "audio": facts["parameters"]["audio"]
    }
    assert facts["parameters"]["audio"] > 0
    shards = sorted(model.glob("*.safetensors"))
    assert len(shards) > 2 and facts["files"] == {shard.name: shard.stat().st_size for shard in shards}
    assert facts["prompts"] == encoder.prompts and facts["default_prompt_name"] is None
    assert (facts["vocabulary"], facts["max_tokens"]) == (len(encoder.tokenizer), 8192)
    assert facts["version"] == egemma_mlx.__version__ and facts["kernels"] == picked("auto")
    assert facts["device"] in ("cpu", "gpu") and facts["blas"]["name"]

    done = run("info", "--model", model)
    rows = [(line[:12].strip(), line[12:]) for line in done.out.splitlines()]
    assert ("text", "6 layers of width 64, vectors of 96") in rows
    assert ("attention", "4 layers within ±8 tokens: 4 heads over 2 of 16") in rows
    assert ("attention", "2 layers full: 4 heads over 1 of 32") in rows
    assert dict(rows)["parameters"] == ", ".join(f"{name} {count:,}" for name, count in facts["parameters"].items())
    assert "query" in dict(rows)["prompts"] and facts["mlx"] in dict(rows)["runs on"]
    assert facts["blas"]["name"] in dict(rows)["BLAS"]


# --- checkpoint ------------------------------------------------------------------------------------------------------


def test_checkpoint(run: Run) -> None:
    done = run("checkpoint", "out", "--modalities", "image", "text", "--seed", 5, "--dtype", "float32")
    assert done.code == 0
    expected = random_checkpoint.write_checkpoint("expected", modalities=("text", "image"), seed=5, dtype="float32")
    files = sorted(path.relative_to(expected) for path in expected.rglob("*"))
    assert files == sorted(path.relative_to("out") for path in Path("out").rglob("*"))
    assert all((expected / f).read_bytes() == Path("out", f).read_bytes() for f in files if (expected / f).is_file())
    assert run("embed", "a text", "--model", "out").code == 0
    assert_one_error(run("checkpoint", "out"), "out: expected a new or empty folder")
