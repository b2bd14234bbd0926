"""`egemma-mlx export`: the file holds the model's forward, and is complete or absent."""

from __future__ import annotations

import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx import cli, export
from egemma_mlx.errors import EgemmaError
from egemma_mlx.export import export_forward
from egemma_mlx.loading import load

README = Path(__file__).parents[1] / "README.md"
METAL = mx.metal.is_available()
# Three texts and an empty slot in 24 rows: a hole in the positions of the second, and the last row of none.
TOKENS, SEGMENTS = 24, 4
TABLE = np.array([[0, 7], [7, 6], [13, 10], [24, 0]], np.int32)
POSITIONS = np.array([*range(7), 0, 1, 2, -1, 4, 5, *range(10), -1], np.int32)
IDS = (np.arange(TOKENS) * 37 % 199 + 3).astype(np.int32)
BATCH = [mx.array(part) for part in (IDS, POSITIONS, TABLE)]


def expected(folder: Path) -> np.ndarray:
    model, _ = load(folder, backend="ops")
    ids, positions, segments = BATCH
    return np.array(model(ids, segments=segments, positions=positions).text_embeds)


def streams(path: Path, names: Iterable[str]) -> dict[tuple[int, ...], int]:
    """How many of the named operations of a file are on each stream (index, device, its number)."""
    records = b"|".join(re.escape(struct.pack("<Q", len(name)) + name.encode()) for name in names)
    found: dict[tuple[int, ...], int] = {}
    for match in re.finditer(rb"(.{12})(?:%s)" % records, path.read_bytes(), re.S):
        stream = struct.unpack("<iii", match[1])
        found[stream] = found.get(stream, 0) + 1
    return found


def operations(folder: Path) -> set[str]:
    """The names of a forward's operations."""
    return set(export._primitives(export.forward(load(folder, backend="ops")[0]), export.example(TOKENS, 1)))


# --- what the file computes ------------------------------------------------------------------------------------------


def test_plain_operations_give_the_models_vectors(tiny_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "forward.mlxfn"
    export_forward(tiny_text, out, tokens=TOKENS, segments=SEGMENTS, backend="ops")
    (vectors,) = mx.import_function(str(out))(*BATCH)
    assert (vectors.shape, vectors.dtype) == ((SEGMENTS, 96), mx.float32)
    np.testing.assert_allclose(np.array(vectors), expected(tiny_text), atol=1e-6)
    assert not np.array(vectors)[3].any()  # the empty slot
    with pytest.raises(ValueError, match="No imported function found which matches"):
        mx.import_function(str(out))(*(mx.zeros(TOKENS + 1, mx.int32) for _ in range(2)), BATCH[2])


def test_one_token_is_a_batch(tiny_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "forward.mlxfn"
    export_forward(tiny_text, out, tokens=1, backend="ops")
    (vector,) = mx.import_function(str(out))(mx.array([5]), mx.array([0]), mx.array([[0, 1]]))
    model, _ = load(tiny_text, backend="ops")
    np.testing.assert_allclose(np.array(vector), np.array(model(mx.array([[5]])).text_embeds), atol=1e-6)


def test_the_kernels_are_in_the_file(tiny_text: Path, tmp_path: Path) -> None:
    out = tmp_path / "forward.mlxfn"
    export_forward(tiny_text, out, tokens=TOKENS, segments=SEGMENTS)
    data = out.read_bytes()
    for kernel in ("linear_short_3", "qkv_prep", "attention_bounds", "flash", "add_norm_next", "gated_short", "pool"):
        assert f'#line 1 "{kernel}.metal"'.encode() in data
    # Weights as they are stored, bfloat16; the tiny checkpoint's weights are most of the file.
    assert len(data) < 2 * (tiny_text / "model.safetensors").stat().st_size + 2**22
    imported: list[mx.array] = []

    def run() -> None:
        imported[:] = mx.import_function(str(out))(*BATCH)
        mx.eval(imported)

    if METAL:
        run()
        np.testing.assert_allclose(np.array(imported[0]), expected(tiny_text), atol=2e-6)
    else:
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)gpu"):
            run()


def test_no_operation_waits_for_the_cpu(tiny_text: Path, tmp_path: Path) -> None:
    """Traced without a GPU, plain operations would run on a Mac's CPU, between kernels on its GPU."""
    out = tmp_path / "forward.mlxfn"
    names = operations(tiny_text)
    export_forward(tiny_text, out, tokens=TOKENS)
    ((_, device, _),) = streams(out, {*names, "CustomKernel"})
    assert device == 1
    assert sum(streams(out, {*names, "CustomKernel"}).values()) > 100
    export_forward(tiny_text, out, tokens=TOKENS, backend="ops")
    assert {device for _, device, _ in streams(out, names)} == {0 if mx.default_device() == mx.Device(mx.cpu) else 1}


@pytest.mark.skipif(METAL, reason="there everything is on the GPU from the start")
def test_nothing_but_streams_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "small.mlxfn"
    kernel = mx.fast.metal_kernel(name="k", input_names=["x"], output_names=["y"], source="y[0] = x[0];")
    launch = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(8,)], "output_dtypes": [mx.float32]}

    def function(x: mx.array) -> mx.array:
        return mx.exp(kernel(inputs=[x * 2.0], **launch)[0]) + 1.0

    mx.export_function(str(path), function, mx.zeros(8))
    before = path.read_bytes()
    names = export._primitives(function, (mx.zeros(8),))
    export._join_kernels(path, names)
    after = path.read_bytes()
    assert set(streams(path, names)) == {(-1, 1, 0)}
    undone, at = after, 0
    for name in names:
        at = before.index(struct.pack("<Q", len(name)) + name.encode(), at)
        undone = undone[: at - 12] + before[at - 12 : at] + undone[at:]
    assert undone == before != after


# --- complete or absent ----------------------------------------------------------------------------------------------


def fail_to_write(path: str, *_: Any) -> None:
    Path(path).write_bytes(b"half of it")
    raise RuntimeError("[write] Unable to write 7 bytes to file.")


@pytest.mark.parametrize("before", [None, b"an older file"])
@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ((mx, "export_function"), fail_to_write, r"f\.mlxfn: cannot be written \(\[write\] Unable to write 7 bytes"),
        ((export, "_primitives"), lambda *_: ["Nothing"], r"expected Nothing in the file but MLX .* another format"),
    ],
    ids=["disk", "format"],
)
def test_a_failure_leaves_what_was_there(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None,
    target: tuple[Any, str], value: Any, message: str,
) -> None:  # fmt: skip
    out = tmp_path / "f.mlxfn"
    if before is not None:
        out.write_bytes(before)
    monkeypatch.setattr(*target, value)
    with pytest.raises(EgemmaError, match=message):
        export_forward(tiny_text, out, tokens=TOKENS)
    assert list(tmp_path.iterdir()) == ([] if before is None else [out])
    assert before is None or out.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("f.mlxfn", {"tokens": 0}, r"expected tokens in 1…8192 but got 0"),
        ("f.mlxfn", {"tokens": 8193}, r"expected tokens in 1…8192 but got 8193"),
        ("f.mlxfn", {"tokens": 8, "segments": 9}, r"expected segments in 1…8, the tokens, but got 9"),
        ("f.mlxfn", {"tokens": 8, "segments": 0}, r"expected segments in 1…8, the tokens, but got 0"),
        ("f.mlxfn", {"tokens": 8, "backend": "auto"}, r"expected backend 'metal' or 'ops' but got 'auto'"),
        ("f.npy", {"tokens": 8}, r"f\.npy: expected a name that ends in \.mlxfn"),
        ("absent/f.mlxfn", {"tokens": 8}, r"f\.mlxfn: cannot be written \(No such file or directory\)"),
    ],
)
def test_bad_arguments_are_refused_before_the_work(
    tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, message: str
) -> None:
    monkeypatch.setattr(export, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(EgemmaError, match=message):
        export_forward(tiny_text, tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


# --- the command, and the README's programs --------------------------------------------------------------------------


@pytest.fixture
def handler() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


@pytest.fixture
def exported(
    tiny_text: Path, tmp_path: Path, handler: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EGEMMA_MODEL", str(tiny_text))
    return lambda *arguments: (cli.main(["export", *arguments]), *capsys.readouterr())


def test_the_command(exported: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = exported("f.mlxfn", "--tokens", "16")
    assert (code, err) == (0, "") and re.fullmatch(r"f\.mlxfn: tokens 16, segments 1, kernels metal, \d+\.\d MB\n", out)
    assert b"linear_short_3.metal" in Path("f.mlxfn").read_bytes()
    assert exported("f.mlxfn", "--tokens", "16", "--segments", "2", "--backend", "ops")[0] == 0
    (vectors,) = mx.import_function("f.mlxfn")(*export.example(16, 2))
    assert vectors.shape == (2, 96)
    for arguments, message in (
        (["g.mlxfn"], "--tokens"),
        (["g.mlxfn", "--tokens", "none"], "expected a positive integer but got 'none'"),
        (["g.mlxfn", "--tokens", "9000"], "expected tokens in 1…8192 but got 9000"),
        (["g.mlxfn", "--tokens", "8", "--backend", "simulator"], "invalid choice: 'simulator'"),
        (["g.mlxfn", "--tokens", "8", "--model", "absent/at/all"], "is neither a folder nor a hub id"),
    ):
        code, out, err = exported(*arguments)
        assert (code, out) == (2, "") and message in err
    assert [path.name for path in Path().iterdir()] == ["f.mlxfn"]


def readme(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    return block


def test_the_readmes_python(exported: Callable[..., Any], tiny_text: Path) -> None:
    assert exported("forward.mlxfn", "--tokens", "32", "--backend", "ops")[0] == 0
    names: dict[str, Any] = {}
    exec(readme("python"), names)
    model, _ = load(tiny_text, backend="ops")
    np.testing.assert_allclose(
        np.array(names["vectors"]), np.array(model(mx.array([names["ids"]])).text_embeds), atol=1e-6
    )


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="compiled with Linux's g++ against MLX's wheel"
)
def test_the_readmes_cpp(exported: Callable[..., Any], tiny_text: Path) -> None:
    assert exported("forward.mlxfn", "--tokens", "32", "--backend", "ops")[0] == 0
    Path("embed.cpp").write_text(readme("cpp"))
    home = Path(mx.__file__).parent
    libraries = [f"-L{home / 'lib'}", "-lmlx", f"-Wl,-rpath,{home / 'lib'}"]
    subprocess.run(["g++", "-std=c++20", f"-I{home / 'include'}", "embed.cpp", *libraries, "-o", "embed"], check=True)
    done = subprocess.run(["./embed"], capture_output=True, text=True, check=True)
    printed = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-\d+)?", done.stdout)]
    model, _ = load(tiny_text, backend="ops")
    vector = np.array(model(mx.array([[2, 17, 5, 1]])).text_embeds)[0]
    np.testing.assert_allclose(printed, [*vector[:3], *vector[-3:]], rtol=1e-4, atol=1e-6)


def test_models_made_before_do_not_deepen_a_trace(tiny_text: Path) -> None:
    """Layers draw first weights from keys that follow each other; a long chain would end MLX's tracing in a crash."""
    program = (
        "import sys, mlx.core as mx; from pathlib import Path; from egemma_mlx.config import Config\n"
        "from egemma_mlx.models.encoder import EmbeddingGemma2\n"
        "config = Config.from_file(Path(sys.argv[1], 'config.json'))\n"
        "models = [EmbeddingGemma2(config) for _ in range(600)]\n"
        "mx.export_function(lambda event: None, models[-1].language_model.embed, mx.array([1, 2]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny_text)], check=True)
