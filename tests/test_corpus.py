"""A corpus to a folder: every record once, in order, as the encoder has it, whatever is killed or shared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egemma_mlx import blas, cli, corpus
from egemma_mlx.corpus import folder as folders
from egemma_mlx.corpus.ranks import Ranks, join
from egemma_mlx.corpus.source import scan
from egemma_mlx.encoder import Encoder
from egemma_mlx.errors import EgemmaError

ROOT = Path(__file__).parents[1]
WORDS = ("the", "of", "a", "river", "north", "mountain", "computer", "memory", "search", "train", "coffee", "history")
ROWS, SHARD_ROWS = 70, 20


def some_texts(count: int, seed: int = 0) -> list[str]:
    choice = random.Random(seed)
    return [" ".join(choice.choices(WORDS, k=choice.randint(1, 12))) for _ in range(count)]


TEXTS = some_texts(ROWS)


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_corpus(folder: Path) -> Path:
    return write_lines(folder / "corpus.jsonl", [{"id": f"doc-{i}", "text": text} for i, text in enumerate(TEXTS)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    corpus.embed(write_corpus(folder), folder / "out", tiny_text, shard_rows=SHARD_ROWS)
    return folder / "out"


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """The folder that `embed` makes, finished."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


@pytest.fixture
def embed(tiny_text: Path, source: Path) -> Callable[..., None]:
    def call(output: Path, **options: Any) -> None:
        corpus.embed(source, output, tiny_text, **{"shard_rows": SHARD_ROWS, **options})

    return call


@pytest.fixture(scope="module")
def encoder(tiny_text: Path) -> Encoder:
    return Encoder(tiny_text)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- what is in the folder -------------------------------------------------------------------------------------------


def test_rows_are_the_encoders(out: Path, encoder: Encoder) -> None:
    vectors = corpus.open(out)
    assert vectors.ids == [f"doc-{i}" for i in range(ROWS)]
    assert [len(part) for part in vectors.parts] == [20, 20, 20, 10]
    assert all(isinstance(part, np.memmap) for part in vectors.parts)
    for number, part in enumerate(vectors.parts):
        with blas.one_thread():
            expected = encoder.encode(TEXTS[number * SHARD_ROWS : (number + 1) * SHARD_ROWS])
        assert part.dtype == np.float32 and np.array_equal(part, expected)
    assert np.abs(np.concatenate(vectors.parts) - encoder.encode(TEXTS)).max() < 2e-6

    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["rows"], manifest["width"], manifest["dtype"]) == (
        ROWS,
        encoder.get_embedding_dimension(),
        "float32",
    )
    for part in manifest["parts"]:
        assert hashlib.sha256((out / part["file"]).read_bytes()).hexdigest() == part["sha256"]


@pytest.mark.parametrize("cores", [1, 7])
def test_bytes_do_not_depend_on_the_number_of_cores(
    cores: int, tmp_path: Path, out: Path, embed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    before = blas.set_threads(3)
    embed(tmp_path / "other")
    assert contents(tmp_path / "other") == contents(out)
    assert blas.set_threads(before or 1) in (3, None)


def test_options_are_the_encoders(tmp_path: Path, embed: Callable[..., None], encoder: Encoder) -> None:
    options: dict[str, Any] = {"prompt_name": "query", "truncate_dim": 16, "precision": "ubinary"}
    embed(tmp_path / "out", **options)
    expected = np.concatenate(
        [encoder.encode(TEXTS[i : i + SHARD_ROWS], **options) for i in range(0, ROWS, SHARD_ROWS)]
    )
    found = np.concatenate(corpus.open(tmp_path / "out").parts)
    assert found.dtype == np.uint8 and np.array_equal(found, expected)


def test_where_one_record_has_a_title_all_are_documents(tmp_path: Path, tiny_text: Path, encoder: Encoder) -> None:
    """In a shard without titles too."""
    records = [{"text": "a river"}, {"text": "a train"}, {"text": "a city", "title": "On cities"}]
    source = write_lines(tmp_path / "t.jsonl", records)
    corpus.embed(source, tmp_path / "out", tiny_text, shard_rows=2)
    texts = [encoder.tokenizer.document(record["text"], record.get("title")) for record in records]
    with blas.one_thread():
        expected = encoder.encode(texts[:2], prompt=""), encoder.encode(texts[2:], prompt="")
    for part, rows in zip(corpus.open(tmp_path / "out").parts, expected, strict=True):
        assert np.array_equal(part, rows)
    with pytest.raises(EgemmaError, match=r"t\.jsonl:3: has a title, which only the document prompt can carry"):
        corpus.embed(source, tmp_path / "other", tiny_text, shard_rows=2, prompt_name="query")


def test_parquet(tmp_path: Path, out: Path, embed: Callable[..., None]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    embed(tmp_path / "parquet", file_format="parquet")
    table = parquet.read_table(sorted((tmp_path / "parquet").glob("*.parquet")))
    assert table["id"].to_pylist() == [f"doc-{i}" for i in range(ROWS)]
    found = np.stack(table["embedding"].to_numpy())
    assert np.array_equal(found, np.concatenate(corpus.open(out).parts))
    with pytest.raises(EgemmaError, match=r"part-00000\.parquet: expected \.npy parts"):
        corpus.open(tmp_path / "parquet")


def test_parquet_without_pyarrow(tmp_path: Path, embed: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    with pytest.raises(EgemmaError, match=r"pip install 'egemma-mlx\[parquet\]'"):
        embed(tmp_path / "out", file_format="parquet")


def test_open_refuses_what_is_not_whole(tmp_path: Path, out: Path) -> None:
    with pytest.raises(EgemmaError, match=r"has no manifest\.json: expected the folder of a finished job"):
        corpus.open(tmp_path)
    part = out / "part-00001.npy"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(EgemmaError, match=r"part-00001\.npy: cannot be read"):
        corpus.open(out)
    np.save(part, np.zeros((3, 4), np.float32))
    with pytest.raises(EgemmaError, match=r"part-00001\.npy: expected 20 ids and rows of \d+ but got 20 and \(3, 4\)"):
        corpus.open(out)


# --- the input -------------------------------------------------------------------------------------------------------


def test_lines_are_those_of_an_ordinary_input(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_bytes("\ufeffone\r\n\n\u2028two\nthree".encode())
    found = scan(str(lines), 3)
    assert [shard.rows for shard in found.shards] == [3, 1] and not found.has_ids
    records, ids = found.read(0)
    assert [record.fields["text"] for record in records] == ["one", "", "\u2028two"] and ids == [1, 2, 3]
    records, ids = found.read(1)
    assert [(record.place, record.fields) for record in records] == [(f"{lines}:4", {"text": "three"})] and ids == [4]

    objects = tmp_path / "a.jsonl"
    objects.write_bytes(b'\xef\xbb\xbf\n"one"\n\n \r\n{"text": "two", "id": 7}\n{"image": "b.png"}\n\n')
    found = scan(str(objects), 2)
    assert [(shard.line, shard.rows) for shard in found.shards] == [(1, 2), (6, 1)]
    assert (found.has_ids, found.has_images, found.titled) == (False, True, None)
    assert [record.place for record in found.read(0)[0]] == [f"{objects}:2", f"{objects}:5"]
    assert found.read(0)[1] == [2, 5]
    (record,), ids = found.read(1)
    assert record.images == [tmp_path / "b.png"] and ids == [6]


def test_ids_are_as_they_are(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"id": value, "text": ""} for value in (3, "x", None)])
    assert scan(str(source), 10).read(0)[1] == [3, "x", None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'"one"\n{"text": 1}\n', r'a\.jsonl:2: expected "text" to be a string'),
        ("a.jsonl", b'"one"\n\n{\n', r"a\.jsonl:3: not JSON"),
        ("a.txt", b"one\n\xe4\n", r"a\.txt:2: expected UTF-8 but got byte 0xe4"),
        ("a.txt", b"", r"a\.txt: holds no records"),
        ("a.csv", b"one\n", r"a\.csv: expected a \.txt or \.jsonl file"),
    ],
)
def test_a_bad_line_is_named_before_the_work(
    tmp_path: Path, tiny_text: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(EgemmaError, match=message):
        corpus.embed(tmp_path / name, tmp_path / "out", tiny_text, shard_rows=1)
    assert not (tmp_path / "out").exists()


def test_a_scan_holds_one_shard(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x" * 1000}] * 10_000)
    tracemalloc.start()
    found = scan(str(source), 100)
    found.read(50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.rows == 10_000 and peak < source.stat().st_size / 10


def test_an_input_that_changes_meanwhile(source: Path) -> None:
    found = scan(str(source), SHARD_ROWS)
    source.write_text(source.read_text().replace("doc-25", "doc-xx"))
    assert len(found.read(0)[0]) == SHARD_ROWS
    with pytest.raises(EgemmaError, match=r"corpus\.jsonl: was changed, behind line 20, while"):
        found.read(1)


# --- going on --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a process, which does not get to clean up."""


# To begin, four shards of two files and to finish: a file is synced and renamed, and the folder synced.
STEPS = 3 * (1 + 4 * 2 + 1)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_killed_at_any_step(step: int, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each sync and rename, without a model: at most the shard in work is made again, and nothing is lost."""
    shards = scan(str(source), SHARD_ROWS)
    made: list[int] = []

    def work(path: Path) -> None:
        folder = folders.Folder(path, shards.shards, "npy")
        folder.begin({"job": 1})
        for number in folder.resume({"job": 1}, Ranks().share(len(shards.shards))):
            ids = shards.read(number)[1]
            made.append(number)
            folder.add(number, ids, np.full((len(ids), 4), number, np.float32))
        folder.finish()

    work(tmp_path / "whole")
    made.clear()
    steps, dead = 0, False
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal steps, dead
            result = function(*arguments, **options)
            steps += 1
            if steps == step:
                dead = True
                raise Killed
            return result

        return call

    monkeypatch.setattr(os, "fsync", counted(fsync))
    monkeypatch.setattr(Path, "replace", counted(replace))
    monkeypatch.setattr(Path, "unlink", lambda path, **options: None if dead else unlink(path, **options))
    with pytest.raises(Killed):
        work(tmp_path / "out")
    dead = False
    assert (tmp_path / "out" / "manifest.json").exists() == (step >= STEPS - 1)
    work(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert set(made) == {0, 1, 2, 3} and len(made) <= 5


def test_finished_shards_are_not_made_again(
    out: Path, embed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    (out / "manifest.json").unlink()
    (out / "part-00002.json").unlink()
    (out / ".part-00002.npy.0123.partial").write_bytes(b"half")
    (out / ".job.json.0123.partial").write_bytes(b"half")
    embed(out)
    assert contents(out) == whole
    changed = {path.name for path in out.glob("part-*") if path.stat().st_mtime_ns != before[path.name]}
    assert changed == {"part-00002.json", "part-00002.npy"}
    # What is complete needs no model.
    monkeypatch.setattr("egemma_mlx.encoder.Encoder", None)
    embed(out)
    assert contents(out) == whole


def test_an_error_keeps_finished_shards_and_may_be_mended(tmp_path: Path, tiny_text: Path) -> None:
    texts = some_texts(30)
    texts[25] = "the " * 60
    source = write_lines(tmp_path / "a.jsonl", texts)
    options: dict[str, Any] = {"shard_rows": 10, "max_length": 50}
    with pytest.raises(EgemmaError, match=r"a\.jsonl:26: text has 63 tokens where 50 are allowed"):
        corpus.embed(source, tmp_path / "out", tiny_text, **options)
    assert sorted(contents(tmp_path / "out")) == [
        *("job.json", "part-00000.json", "part-00000.npy", "part-00001.json", "part-00001.npy")
    ]
    # By the line, which no finished shard has, or by allowing it.
    write_lines(source, [*texts[:25], "short", *texts[26:]])
    shutil.copytree(tmp_path / "out", tmp_path / "cut")
    corpus.embed(source, tmp_path / "out", tiny_text, **options)
    write_lines(source, texts)
    with pytest.warns(UserWarning, match="1 of 10 texts cut"):
        corpus.embed(source, tmp_path / "cut", tiny_text, truncation=True, **options)
    assert len(corpus.open(tmp_path / "out").ids) == len(corpus.open(tmp_path / "cut").ids) == 30


def test_lines_behind_the_last(out: Path, embed: Callable[..., None], source: Path) -> None:
    before = contents(out)
    with source.open("a") as file:
        file.write('{"id": "more", "text": "more"}\n')
    with pytest.raises(EgemmaError, match=r"part-00003\.json: was made of other lines .* from line 61 on\. Remove"):
        embed(out)
    assert contents(out) == before
    (out / "part-00003.json").unlink()
    embed(out)
    assert corpus.open(out).ids[-2:] == [f"doc-{ROWS - 1}", "more"]
    assert all(contents(out)[f"part-0000{i}.npy"] == before[f"part-0000{i}.npy"] for i in range(3))

    source.write_text("".join(source.read_text().splitlines(keepends=True)[:40]))
    with pytest.raises(EgemmaError, match=r"part-00003\.json: was made of lines that the input no longer has"):
        embed(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "binary"}, 'precision "float32", not "binary"'),
        ({"prompt": "a: "}, 'prompt "", not "a: "'),
        ({"truncate_dim": 16, "shard_rows": 10}, "shard_rows 20, not 10; truncate_dim null, not 16"),
        ({"compute_precision": "bfloat16"}, 'compute_precision "float32", not "bfloat16"'),
        ({"max_length": 100}, "max_length null, not 100"),
    ],
)
def test_another_job(out: Path, embed: Callable[..., None], options: dict[str, Any], message: str) -> None:
    before = contents(out)
    with pytest.raises(EgemmaError) as refused:
        embed(out, **options)
    assert f"out: was begun with {message}: ask for the same" in str(refused.value)
    assert contents(out) == before


def test_another_model(tmp_path: Path, tiny_text: Path, source: Path) -> None:
    model = Path(shutil.copytree(tiny_text, tmp_path / "model"))
    corpus.embed(source, tmp_path / "out", model, shard_rows=60)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(EgemmaError, match=r"out: was begun with another model \(model\.safetensors\): ask"):
        corpus.embed(source, tmp_path / "out", model, shard_rows=60)


def test_a_folder_of_something_else(tmp_path: Path, embed: Callable[..., None]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(EgemmaError, match=r"out: expected a new or empty folder, or a job's, but it has thesis\.tex"):
        embed(tmp_path / "out")


# --- several processes -----------------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "egemma_mlx.cli", "embed", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def two_free_ports() -> int:
    """The first of two ports in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return port


@pytest.fixture(scope="module")
def texts_and_vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """160 short texts, and the folder that one process makes of them with mini."""
    folder = tmp_path_factory.mktemp("mini")
    source = write_lines(folder / "corpus.jsonl", some_texts(160))
    corpus.embed(source, folder / "out", "mini", shard_rows=10)
    return source, folder / "out"


def test_alone_no_socket_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr("mlx.core.distributed.init", refuse)
    monkeypatch.delenv("MLX_RANK", raising=False)
    assert join() == Ranks(0, 1)
    (tmp_path / "hosts").touch()
    monkeypatch.setenv("MLX_RANK", "0")
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    assert join() == Ranks(0, 1)  # of mlx.launch -n 1


def test_shares_are_all_shards() -> None:
    shares = [list(Ranks(rank, 3).share(8)) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_two_ranks_make_the_same_bytes(tmp_path: Path, texts_and_vectors: tuple[Path, Path]) -> None:
    source, expected = texts_and_vectors
    launch = [sys.executable, "-c", "from mlx._distributed_utils.launch import main\nmain()"]  # as mlx.launch does
    launch += ["-n", "2", "--backend", "ring", "--starting-port", str(two_free_ports()), "--"]
    done = subprocess.run(
        launch + command("--input", source, "--output", f"{tmp_path / 'out'}/", "--model", "mini", "--shard-rows", 10),
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(expected), done.stderr


def test_a_rank_is_killed_and_the_job_run_again(tmp_path: Path, texts_and_vectors: tuple[Path, Path]) -> None:
    source, expected = texts_and_vectors
    out = tmp_path / "out"
    arguments = command("--input", source, "--output", out, "--model", "mini", "--shard-rows", 10)
    hosts = tmp_path / "hosts.json"
    port = two_free_ports()
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"], [f"127.0.0.1:{port + 1}"]]))
    ranks = [
        subprocess.Popen(
            arguments,
            env=environment(MLX_RANK=str(rank), MLX_HOSTFILE=str(hosts)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while not (out / "part-00001.json").exists():
            assert time.monotonic() < deadline and ranks[1].poll() is None
            time.sleep(0.01)
        ranks[1].kill()
        _, error = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 2
    assert "rank 0 of 2: another rank ended before its work was done" in error
    kept = contents(out)
    assert {f"part-000{number:02}.json" for number in range(0, 16, 2)} <= kept.keys()  # all of rank 0's
    assert "manifest.json" not in kept and len(kept) < len(contents(expected))

    subprocess.run(arguments, env=environment(), check=True, timeout=60)
    assert contents(out) == contents(expected)


def test_kills_at_random_moments(tmp_path: Path, texts_and_vectors: tuple[Path, Path]) -> None:
    source, expected = texts_and_vectors
    out = tmp_path / "out"
    arguments = command("--input", source, "--output", out, "--model", "mini", "--shard-rows", 10)
    seconds = random.Random(0)
    finished: set[str] = set()
    for _ in range(5):
        process = subprocess.Popen(arguments, env=environment())
        # Most of a run's time goes before the first shard: wait for one, and then a moment.
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list(out.glob("part-*.json"))) <= len(finished):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(seconds.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        now = {path.name for path in out.glob("part-*.json")}
        assert finished <= now
        finished = now
    subprocess.run(arguments, env=environment(), check=True, timeout=60)
    assert contents(out) == contents(expected)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    tiny_text: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(source.parent)
    monkeypatch.setenv("EGEMMA_MODEL", str(tiny_text))
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> tuple[int, str]:
        try:
            code = cli.main(["embed", *arguments])
        finally:
            signal.signal(signal.SIGTERM, handler)
        return code, capsys.readouterr().err

    return call


@pytest.mark.parametrize("output", ["out/", "out", "out.v2/", "existing.v2"])
def test_outputs_that_are_folders(run: Callable[..., tuple[int, str]], output: str) -> None:
    Path("existing.v2").mkdir()
    assert run("--input", "corpus.jsonl", "--output", output, "--truncate-dim", "16", "--shard-rows", "50") == (0, "")
    assert [part.shape for part in corpus.open(output).parts] == [(50, 16), (20, 16)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "-", "--output", "out/"], "-: expected a .txt or .jsonl file: a run that resumes reads it again"),
        (["--input", "absent.txt", "--output", "out/"], "absent.txt: No such file or directory"),
        (["--input", "corpus.jsonl", "--output", "v.csv"], "--output v.csv: expected a name that ends in .npy,"),
        (["a text", "--output", "out/"], "--output out: expected a name that ends in .npy, .jsonl, .npz (or, for a"),
        (["--input", "corpus.jsonl", "--output", "v.npy", "--shard-rows", "9"], "--shard-rows and --shard-format are"),
        (["--input", "corpus.jsonl", "--output", "out/", "--precision", "int8"], "takes its ranges from all vectors"),
        (["--input", "corpus.jsonl", "--output", "out/", "--truncate-dim", "9999"], "expected truncate_dim in 1…"),
        (["--input", "corpus.jsonl", "--output", "out/", "--prompt-name", "x"], "unknown prompt name 'x'"),
        (["--input", "corpus.jsonl", "--output", "corpus.jsonl/"], "corpus.jsonl: File exists"),
    ],
)
def test_errors_are_a_line(run: Callable[..., tuple[int, str]], arguments: list[str], message: str) -> None:
    code, error = run(*arguments)
    assert code == 2 and message in error and error.count("\n") == 1
    assert not Path("out").exists()
