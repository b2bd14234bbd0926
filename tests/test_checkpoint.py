"""Finding a checkpoint, the table of its tensors, and reading exactly those."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import mlx.core as mx
import numpy as np
import pytest

from egemma_mlx.checkpoint import MODALITIES, load_tensors, resolve, tensor_shapes, tower_sizes
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

FACTS = Path(__file__).parents[2] / "shared/facts"
TOWER = {
    "text": ("language_model.",),
    "image": ("vision_tower.", "embed_vision."),
    "audio": ("audio_tower.", "embed_audio."),
}
QUERY_NORM = "language_model.layers.0.self_attn.q_norm.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def config_of(folder: Path) -> Config:
    return Config.from_file(folder / "config.json")


def rewrite(folder: Path, edit: Callable[[dict[str, mx.array]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    edit(tensors)
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


# --- the table -------------------------------------------------------------------------------------------------------


def test_table_is_the_published_checkpoint() -> None:
    if not FACTS.exists():
        pytest.skip("needs ../shared/facts (config.json and tensors.tsv of the published checkpoint)")
    rows = (line.split("\t") for line in (FACTS / "tensors.tsv").read_text().splitlines())
    published = {name: tuple(json.loads(shape)) for name, _, shape in rows}
    config = config_of(FACTS / "hf_files")
    assert tensor_shapes(config, MODALITIES) == published
    for modality in MODALITIES:
        expected = {n: s for n, s in published.items() if n.startswith(TOWER["text"] + TOWER[modality])}
        assert tensor_shapes(config, [modality]) == expected


@pytest.mark.parametrize("vision", [{}, {"standardize": True, "use_clipped_linears": True, "num_key_value_heads": 1}])
@pytest.mark.parametrize("audio", [{}, {"use_clipped_linears": False, "conv_kernel_size": 3}])
@pytest.mark.parametrize(
    "text", [{}, {"per_layer_config": {i: {"head_dim": 8, "num_key_value_heads": 4} for i in "25"}}]
)
def test_table_is_the_reference_model(
    tiny: Path, vision: dict[str, Any], audio: dict[str, Any], text: dict[str, Any]
) -> None:
    import oracle
    from transformers.models.embedding_gemma2 import EmbeddingGemma2Config
    from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2Model

    raw = json.loads((tiny / "config.json").read_text())
    for section, changes in (("text_config", text), ("vision_config", vision), ("audio_config", audio)):
        raw[section] |= changes
    with oracle.torch.device("meta"):
        model = EmbeddingGemma2Model(EmbeddingGemma2Config.from_dict(raw))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert tensor_shapes(Config.from_dict(raw), MODALITIES) == expected


def test_modalities_are_checked(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EgemmaError, match="expected some of text, image, audio but got 'video', 'smell'"):
        tensor_shapes(config_of(tiny), ("text", "video", "smell"))
    text_only = write_checkpoint(tmp_path / "text", modalities=("text",))
    with pytest.raises(EgemmaError, match="audio was asked for, but this checkpoint's config"):
        load_tensors(text_only, config_of(text_only), ("text", "audio"))
    assert tensor_shapes(config_of(tiny), ()) == tensor_shapes(config_of(tiny), "text")


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", mx.bfloat16), ("float32", mx.float32)])
def test_loads_the_stored_values(tmp_path: Path, dtype: Any, expected: mx.Dtype) -> None:
    folder = write_checkpoint(tmp_path / "c", dtype=dtype)
    tensors = load_tensors(folder, config_of(folder), MODALITIES)
    shapes = tensor_shapes(config_of(folder), MODALITIES)
    assert {name: tensor.shape for name, tensor in tensors.items()} == shapes
    assert {tensor.dtype for tensor in tensors.values()} == {expected}

    # The file again, by its format alone.
    blob = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + length])
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        raw = blob[8 + length + start : 8 + length + end]
        bits = np.array(tensor.view(mx.uint16 if dtype == "bfloat16" else mx.uint32))
        assert bits.tobytes() == raw, name


def test_sharded_equals_single(tiny: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", shard_bytes=300_000)
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 4 and not (sharded / "model.safetensors").exists()
    single = load_tensors(tiny, config_of(tiny), MODALITIES)
    tensors = load_tensors(sharded, config_of(sharded), MODALITIES)
    assert tensors.keys() == single.keys()
    assert all(mx.array_equal(tensors[name], single[name]) for name in single)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts the bytes read with Linux's /proc/self/io")
@pytest.mark.parametrize("shard_bytes", [None, 300_000])
@pytest.mark.parametrize("modalities", [("text",), ("text", "image"), ("text", "audio"), MODALITIES])
def test_reads_only_the_chosen_towers(tmp_path: Path, modalities: tuple[str, ...], shard_bytes: int | None) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    folder = write_checkpoint(tmp_path / "c", shard_bytes=shard_bytes)
    config = config_of(folder)
    load_tensors(folder, config, modalities)  # whatever is imported or initialised at first use
    headers = sum(8 + struct.unpack("<Q", file.open("rb").read(8))[0] for file in folder.glob("*.safetensors"))
    index = sum(file.stat().st_size for file in folder.glob("model.safetensors.index.json"))
    before = bytes_read()
    tensors = load_tensors(folder, config, modalities)
    read = bytes_read() - before
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    assert wanted <= read <= wanted + headers + index + 4096
    everything = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert modalities == MODALITIES or read < 0.95 * everything


def test_arrays_can_be_used_from_another_thread(tiny: Path) -> None:
    from threading import Thread

    tensors = load_tensors(tiny, config_of(tiny))
    sums: list[float] = []
    thread = Thread(target=lambda: sums.extend(float(np.array(t.astype(mx.float32)).sum()) for t in tensors.values()))
    thread.start()
    thread.join()
    assert len(sums) == len(tensors)


def test_tower_sizes(tiny: Path, copy: Path) -> None:
    sizes = tower_sizes(tiny, config_of(tiny))
    tensors = load_tensors(tiny, config_of(tiny), MODALITIES)
    for modality in MODALITIES:
        assert sizes[modality] == sum(t.size for name, t in tensors.items() if name.startswith(TOWER[modality]))
    raw = json.loads((copy / "config.json").read_text()) | {"audio_config": None}
    assert tower_sizes(copy, Config.from_dict(raw)) == {"text": sizes["text"], "image": sizes["image"]}


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_all_faults_in_one_error(copy: Path) -> None:
    def damage(tensors: dict[str, mx.array]) -> None:
        del tensors["language_model.norm.weight"]
        del tensors["audio_tower.output_proj.bias"]
        tensors["language_model.layers.6.layer_scalar"] = mx.ones(1, mx.bfloat16)
        tensors["lm_head.weight"] = mx.ones(1, mx.bfloat16)
        tensors[QUERY_NORM] = mx.ones(17, mx.bfloat16)
        tensors["vision_tower.patch_embedder.input_proj.weight"] = mx.ones((32, 768), mx.int8)

    rewrite(copy, damage)
    with pytest.raises(EgemmaError) as error:
        load_tensors(copy, config_of(copy), MODALITIES)
    message = str(error.value)
    assert message.startswith(f"{copy}: tensors do not fit config.json: ") and "\n" not in message
    for part in (
        "2 missing: ",
        "language_model.norm.weight",
        "audio_tower.output_proj.bias",
        "2 unexpected: ",
        "language_model.layers.6.layer_scalar",
        "lm_head.weight",
        f"1 misshapen: {QUERY_NORM} expected [16] but got [17]",
        "1 neither BF16 nor F32: vision_tower.patch_embedder.input_proj.weight is I8",
    ):
        assert part in message
    # Text alone: its own faults and the name of no tower, not those of the towers left out.
    with pytest.raises(EgemmaError, match=r"1 missing: language_model\.norm\.weight; 2 unexpected") as error:
        load_tensors(copy, config_of(copy), ("text",))
    assert "audio_tower" not in str(error.value) and "vision_tower" not in str(error.value)


def test_faults_of_towers_left_out_do_not_matter(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop("vision_tower.patch_embedder.input_proj.weight"))
    rewrite(copy, lambda tensors: tensors.update({"audio_tower.surprise": mx.ones(3)}))
    assert len(load_tensors(copy, config_of(copy), ("text",))) == len(tensor_shapes(config_of(copy)))


def test_long_lists_are_cut(copy: Path) -> None:
    rewrite(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name])
    with pytest.raises(EgemmaError, match=r"24 missing: .* and 16 more") as error:
        load_tensors(copy, config_of(copy), MODALITIES)
    assert str(error.value).count(".mlp.") == 8


def test_float16_is_refused_with_the_reason(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({name: t.astype(mx.float16) for name, t in tensors.items()}))
    with pytest.raises(EgemmaError, match=r"is F16.*float16 is refused because the residual stream overflows it"):
        load_tensors(copy, config_of(copy))


def test_the_check_comes_before_the_data(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(copy, lambda tensors: tensors.update({QUERY_NORM: mx.ones(17)}))
    monkeypatch.setattr(mx, "load", lambda path: pytest.fail(f"{path} was opened for reading"))
    with pytest.raises(EgemmaError, match="1 misshapen"):
        load_tensors(copy, config_of(copy))


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[:-1],
        lambda blob: blob[:1000],
        lambda blob: blob[:5],
        lambda blob: b"",
        lambda blob: blob + b"\0",
        lambda blob: struct.pack("<Q", 1 << 60) + blob[8:],
        lambda blob: blob[:8] + b"}" + blob[9:],
        lambda blob: blob.replace(b'"BF16"', b'"BF17"', 1),
        lambda blob: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1488915288\n",
    ],
    ids=[
        "cut",
        "in header",
        "in length",
        "empty",
        "trailing byte",
        "huge header",
        "bad JSON",
        "bad dtype",
        "LFS pointer",
    ],
)
@pytest.mark.parametrize("read", [load_tensors, tower_sizes])
def test_truncated_or_corrupt_file_is_named(copy: Path, damage: Callable[[bytes], bytes], read: Any) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EgemmaError, match="truncated or corrupt safetensors file") as error:
        read(copy, config_of(copy))
    assert str(error.value).startswith(f"{path}: ")


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(EgemmaError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        load_tensors(copy, config_of(copy))


def test_shard_faults(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", shard_bytes=1_000_000)
    index = folder / "model.safetensors.index.json"
    shards = sorted(folder.glob("model-*.safetensors"))
    config = config_of(folder)

    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-7])
    with pytest.raises(EgemmaError, match=f"{shards[1].name}: truncated or corrupt"):
        load_tensors(folder, config)
    shards[1].unlink()
    with pytest.raises(EgemmaError, match=f"{shards[1].name}: no such file, but model.safetensors.index.json names it"):
        load_tensors(folder, config)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(EgemmaError, match=f"{shards[1].name}: tensor .* is also in {shards[0].name}"):
        load_tensors(folder, config)

    for text, message in (
        ("{", "expected JSON"),
        ("{}", "expected weight_map"),
        ('{"weight_map": {"a": 1}}', "weight_map"),
    ):
        index.write_text(text)
        with pytest.raises(EgemmaError, match=message) as error:
            load_tensors(folder, config)
        assert str(error.value).startswith(f"{index}: ")


# --- finding ---------------------------------------------------------------------------------------------------------


def test_resolve_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tiny) == resolve(str(tiny)) == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert resolve("~/tiny") == tiny
    monkeypatch.chdir(tiny.parent.parent)
    assert resolve(f"{tiny.parent.name}/tiny").samefile(tiny)  # a folder goes before a hub id of the same name
    with pytest.raises(EgemmaError, match="revision: expected a hub id"):
        resolve(tiny, revision="main")


@pytest.mark.parametrize(
    "name", ["", "nowhere", "/nowhere/at-all", "./no/where", "~/no/where", "~no-such-user/x", "a/b/c", Path("org/name")]
)
def test_resolve_what_is_no_folder_and_no_hub_id(name: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(EgemmaError, match="is neither a folder nor a hub id") as error:
        resolve(name)
    assert_names_the_ways_out(str(error.value))


class Hub:
    """The hub's client over a cache of `cached` and a hub of `served`: a folder, or what asking for it raises."""

    def __init__(self, cached: Path | Exception, served: Path | Exception) -> None:
        self.cached, self.served = cached, served
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, repo_id: str, *, local_files_only: bool = False, **arguments: Any) -> str:
        self.calls.append((f"{'cache' if local_files_only else 'hub'}: {repo_id}", arguments))
        return str(self.found(self.cached if local_files_only else self.served))

    def model_info(self, repo_id: str, *, timeout: float, **arguments: Any) -> None:
        assert 1 <= timeout <= 10
        self.calls.append((f"info: {repo_id}", arguments))
        self.found(self.served)

    @staticmethod
    def found(what: Path | Exception) -> Path:
        if isinstance(what, Exception):
            raise what
        return what


NOT_CACHED = huggingface_hub.errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def make(cached: Path | Exception, served: Path | Exception) -> Hub:
        hub = Hub(cached, served)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "model_info", hub.model_info)
        return hub

    return make


def test_resolve_asks_the_hub_for_what_is_needed(tiny: Path, hub: Callable[..., Hub]) -> None:
    empty = hub(NOT_CACHED, tiny)
    assert resolve("org/name", revision="v1") == tiny
    wanted = {"revision": "v1", "allow_patterns": ["*.json", "*.safetensors", "*.jinja"]}
    assert empty.calls == [
        ("cache: org/name", wanted),
        ("info: org/name", {"revision": "v1"}),
        ("hub: org/name", wanted),
    ]


@pytest.mark.parametrize("shard_bytes", [None, 300_000])
def test_resolve_takes_a_complete_cache_as_it_is(
    tmp_path: Path, hub: Callable[..., Hub], shard_bytes: int | None
) -> None:
    folder = write_checkpoint(tmp_path / "c", modalities=("text",), shard_bytes=shard_bytes)
    network = hub(folder, AssertionError("asked the hub"))
    assert resolve("org/name") == folder
    assert [call for call, _ in network.calls] == ["cache: org/name"]


@pytest.mark.parametrize(
    "lost",
    [
        "config.json",
        "tokenizer.json",
        "config_sentence_transformers.json",
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
    ],
)
def test_resolve_completes_a_cache_that_lacks_a_file(
    tiny: Path, tmp_path: Path, hub: Callable[..., Hub], lost: str
) -> None:
    """What an interrupted download, or transformers, leaves there; without network it is all there is."""
    folder = write_checkpoint(tmp_path / "c", modalities=("text",), shard_bytes=300_000)
    (folder / lost).unlink()
    hub(folder, tiny)
    assert resolve("org/name") == tiny
    hub(folder, ConnectionError("Name or service not known"))
    assert resolve("org/name") == folder


@pytest.mark.parametrize(
    "failure",
    [
        huggingface_hub.errors.LocalEntryNotFoundError("Got: ConnectError\nsecond line"),
        huggingface_hub.errors.HFValidationError("Cannot have -- or .. in repo_id"),
        ConnectionError("Name or service not known"),
        TimeoutError("timed out"),
        PermissionError(13, "Permission denied"),
    ],
    ids=lambda failure: type(failure).__name__,
)
@pytest.mark.parametrize("at_hub", [True, False], ids=["at the hub", "in the cache"])
def test_resolve_failure_is_one_line(failure: Exception, hub: Callable[..., Hub], at_hub: bool) -> None:
    hub(NOT_CACHED if at_hub else failure, failure)
    with pytest.raises(EgemmaError, match="'org/name' is not a folder and the hub did not give it") as error:
        resolve("org/name")
    assert type(failure).__name__ in str(error.value) and "second line" not in str(error.value)
    assert_names_the_ways_out(str(error.value))


def test_resolve_does_not_wait_for_a_hub_that_is_silent(tmp_path: Path) -> None:
    """The hub's own client, and a server that takes connections and never answers."""
    program = "from egemma_mlx import checkpoint as c; c._HUB_TIMEOUT = 0.5; c.resolve('org/name')"
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            **{key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"},
            "HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}",
            "HF_HUB_CACHE": str(tmp_path),
            "NO_PROXY": "127.0.0.1",
        }
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert "EgemmaError: 'org/name' is not a folder and the hub did not give it" in run.stderr
    assert "Timeout" in run.stderr


def test_resolve_offline_takes_the_cache(tiny: Path, tmp_path: Path) -> None:
    """The hub's own client, without network, over a cache in its layout."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(tiny, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0" * 40)
    command = "import sys, egemma_mlx.checkpoint as c; print(c.resolve(*sys.argv[1:]))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", command, *arguments]
        root = Path(__file__).parents[1]
        return subprocess.run(program, env=environment, cwd=root, capture_output=True, text=True, check=False)

    assert run("org/name").stdout.strip() == str(snapshot)
    missing = run("org/other")
    assert "EgemmaError: 'org/other' is not a folder and the hub did not give it" in missing.stderr


def assert_names_the_ways_out(message: str) -> None:
    assert "\n" not in message
    for way in ("local checkpoint folder", "EGEMMA_MODEL", "hf download", "egemma-mlx checkpoint"):
        assert way in message


def test_headers_and_shapes_need_no_mlx(tiny: Path) -> None:
    program = (
        "import sys; from egemma_mlx.checkpoint import *; from egemma_mlx.config import Config; "
        "folder = resolve(sys.argv[1]); config = Config.from_file(folder / 'config.json'); "
        "tensor_shapes(config); tower_sizes(folder, config); "
        "sys.exit(', '.join(m for m in ('mlx', 'huggingface_hub', 'torch') if m in sys.modules) or 0)"
    )
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", program, str(tiny)], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
