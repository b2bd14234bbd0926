"""The small model in this package: that it finds things, agrees with every implementation, and is the default."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executors import simulated
from huggingface_hub import constants
from numpy.typing import NDArray

from egemma_mlx import Encoder, checkpoint, cli, load
from egemma_mlx.checkpoint import DEFAULT_MODEL, resolve
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[1]
MINI = ROOT / "egemma_mlx" / "assets" / "mini"
UNIT = 2e-6
NOTICE = (
    f"egemma-mlx: {DEFAULT_MODEL} is not in the local cache (`hf download {DEFAULT_MODEL}` gets it): "
    "using mini, a small stand-in that is not Google's\n"
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder("mini")


@functools.cache
def everyday() -> Any:
    return json.loads((ROOT / "tests" / "everyday" / "everyday.json").read_text())


def texts() -> list[str]:
    """Of one word to more tokens than the window reaches."""
    passages: list[str] = everyday()["passages"]
    return ["tea", "", passages[0], " ".join(passages[:4]), " ".join(passages[:12])]


def apart(a: Any, b: Any) -> float:
    assert np.shape(a) == np.shape(b)
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())


# --- what it is worth ------------------------------------------------------------------------------------------------


def test_everyday_search(encoder: Encoder) -> None:
    """Questions of daily life, one right passage of 300 each (tests/everyday/README.md)."""
    questions = everyday()["questions"]
    near = encoder.encode_query([question["question"] for question in questions])
    scores = encoder.similarity(near, encoder.encode_document(everyday()["passages"]))
    right = scores[np.arange(len(questions)), [question["passage"] for question in questions]]
    ranks = 1 + (scores > right[:, None]).sum(axis=1)
    assert scores.shape == (80, 300)
    assert (ranks == 1).mean() >= 0.65
    assert (ranks <= 3).mean() >= 0.85


# --- the files -------------------------------------------------------------------------------------------------------


def test_files_are_those_of_the_official_checkpoint(tmp_path: Path) -> None:
    def names(folder: Path) -> set[str]:
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}

    official = names(write_checkpoint(tmp_path / "official", modalities=("text",)))
    media = {"chat_template.jinja", "preprocessor_config.json", "processor_config.json"}
    assert official - media <= names(MINI) <= official | {"README.md"}
    assert sum(path.stat().st_size for path in MINI.rglob("*") if path.is_file()) <= 12_000_000


# --- every implementation --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> NDArray[np.float32]:
    return Encoder("mini", backend="ops").encode_query(texts())


@simulated
def test_metal_kernels_agree(plain: NDArray[np.float32]) -> None:
    few = [0, 2]
    kernels = Encoder("mini", backend="simulator").encode_query([texts()[index] for index in few])
    assert apart(kernels, plain[few]) <= UNIT


def test_transformers_agrees(encoder: Encoder, plain: NDArray[np.float32]) -> None:
    import oracle

    prompt = encoder.prompts["query"]
    ids = [encoder.tokenizer.encode(prompt + text) for text in texts()]
    assert max(map(len, ids)) > 2 * 128  # both sides of the window
    assert apart(oracle.text_vectors(MINI, ids), plain) <= UNIT


def test_sentence_transformers_agrees(plain: NDArray[np.float32]) -> None:
    import oracle

    assert apart(oracle.sentence_transformer(MINI).encode_query(texts()), plain) <= UNIT


def test_bfloat16_agrees(encoder: Encoder, plain: NDArray[np.float32]) -> None:
    assert max(len(encoder.tokenizer.encode(text)) for text in texts()) > 256  # some are rounded
    rounded = Encoder("mini", precision="bfloat16").encode_query(texts())
    assert apart(rounded, plain) > 0
    assert (rounded * plain).sum(axis=1).min() >= 0.999


def test_a_batch_equals_its_texts(encoder: Encoder) -> None:
    single = np.stack([encoder.encode_document(text) for text in texts()])
    assert apart(encoder.encode_document(texts()), single) <= UNIT


@pytest.mark.parametrize("dim", [128, 64])
def test_matryoshka(encoder: Encoder, dim: int) -> None:
    whole, cut = encoder.encode(texts()), encoder.encode(texts(), truncate_dim=dim)
    assert whole.shape == (5, 256) and cut.shape == (5, dim)
    assert apart(np.linalg.norm(cut, axis=1), np.ones(5)) <= UNIT
    assert apart(cut, whole[:, :dim] / np.linalg.norm(whole[:, :dim], axis=1, keepdims=True)) <= UNIT


# --- the name --------------------------------------------------------------------------------------------------------


def test_the_name(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("mini").samefile(MINI)
    monkeypatch.setenv("EGEMMA_MODEL", "mini")
    assert resolve().samefile(MINI)
    with pytest.raises(EgemmaError, match="revision: expected a hub id beside revision 'main'"):
        resolve("mini", "main")
    with pytest.raises(EgemmaError, match="neither a folder nor a hub id"):
        resolve(Path("mini"))  # a path is a folder
    Path("mini").mkdir()
    assert resolve("mini").samefile(MINI)
    shutil.copytree(tiny_text, "mini", dirs_exist_ok=True)
    assert resolve("mini").samefile("mini")  # a checkpoint of that name goes before


# --- the default -----------------------------------------------------------------------------------------------------

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, no model in the environment, a working folder of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.delenv("EGEMMA_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def run(cache: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: object) -> tuple[int, str, str]:
        checkpoint._say_that_mini_stands_in.cache_clear()
        code = cli.main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, handler)


def snapshot(cache: Path, source: Path) -> Path:
    """The real repository in the cache of the hub, as far as names go."""
    repo = cache / f"models--{DEFAULT_MODEL.replace('/', '--')}"
    folder = repo / "snapshots" / ("0" * 40)
    shutil.copytree(source, folder)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    return folder


def test_every_command_has_a_model(run: Run, encoder: Encoder) -> None:
    code, out, err = run("embed", "a text")
    assert (code, err) == (0, NOTICE)
    np.testing.assert_array_equal(np.float32(json.loads(out)["embedding"]), encoder.encode("a text"))

    Path("notes.md").write_text("The bread is in the oven.\n\nThe train leaves at nine.\n")
    code, out, err = run("search", "when do we depart", "notes.md")
    assert code == 0 and err.endswith(NOTICE) and err.count("\n") == 2
    assert out.splitlines()[1] == "        The train leaves at nine."

    code, out, err = run("info")
    assert (code, err) == (0, NOTICE) and out.startswith(f"model       {checkpoint._MINI_FOLDER}\n")

    code, out, err = run("export", "mini.mlxfn", "--tokens", 16)
    assert (code, err) == (0, NOTICE) and Path("mini.mlxfn").stat().st_size > 10_000_000


def test_a_folder_named_mini_is_not_the_default(run: Run, tiny_text: Path) -> None:
    shutil.copytree(tiny_text, "mini")
    assert run("info")[1].startswith(f"model       {checkpoint._MINI_FOLDER}\n")


def test_the_real_model_goes_first(run: Run, cache: Path, tiny_text: Path) -> None:
    folder = snapshot(cache, tiny_text)
    code, out, err = run("info")
    assert (code, err) == (0, "") and out.startswith(f"model       {folder}\n")
    (folder / "tokenizer.json").unlink()  # an interrupted download
    code, out, err = run("info")
    assert (code, err) == (0, NOTICE) and out.startswith(f"model       {checkpoint._MINI_FOLDER}\n")


def test_a_revision_is_of_the_real_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(checkpoint, "_from_hub", lambda *arguments: asked.append(arguments) or Path())
    resolve(None, "v1")
    assert asked == [(DEFAULT_MODEL, "v1")]


def test_images_need_the_real_model(run: Run, encoder: Encoder) -> None:
    real = f"{DEFAULT_MODEL} has (`hf download {DEFAULT_MODEL}`)"
    with pytest.raises(EgemmaError) as error:
        load(modalities=("text", "image"))
    assert str(error.value).startswith("modalities: image was asked for, but") and str(error.value).endswith(real)
    Path("photo.png").touch()
    code, out, err = run("embed", "photo.png")
    assert (code, out) == (2, "") and err.startswith(NOTICE) and err.endswith(f"has no image tower; {real}\n")


def test_is_said_once_and_asks_no_network(tmp_path: Path) -> None:
    program = "import egemma_mlx as e; e.load(); print(e.Encoder().encode('a text').shape); e.load()"
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "EGEMMA_"))},
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "HF_HOME": str(tmp_path / "none"),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        hub.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody called
            hub.accept()
    assert (done.stdout, done.stderr) == ("(256,)\n", NOTICE)
