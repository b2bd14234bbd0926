"""Random checkpoints: the published layout, the same bytes for the same arguments, well-conditioned, loadable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from egemma_mlx.checkpoint import MODALITIES, load_tensors, tensor_shapes
from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import _config, _round_to_bfloat16, write_checkpoint

HF_FILES = Path(__file__).parents[2] / "shared/facts/hf_files"
ENGLISH = (
    "The river comes down from the mountains in the north, and most of the people in the city have their water from "
    "it. Every summer the school takes the children there to look at plants and animals."
)
TEXTS = ("", " ", "a", ENGLISH, "task: search result | query: naïve “prices” in €…", "日本語 🙂\n\n\ttabs  spaces\0")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("random") / "tiny")


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def published(name: str) -> Any:
    if not HF_FILES.exists():
        pytest.skip("needs ../shared/facts/hf_files (the published checkpoint's small files)")
    return json.loads((HF_FILES / name).read_text())


# --- layout ----------------------------------------------------------------------------------------------------------


def test_same_arguments_same_bytes(tiny: Path, tmp_path: Path) -> None:
    assert files(write_checkpoint(tmp_path / "again")) == files(tiny)
    other = files(write_checkpoint(tmp_path / "other", seed=1))
    assert {name for name, content in files(tiny).items() if other[name] != content} == {"model.safetensors"}


def test_leaving_out_a_tower_changes_no_other_tensor(tiny: Path, tmp_path: Path) -> None:
    every = load_tensors(tiny, Config.from_file(tiny / "config.json"), MODALITIES)
    for modalities in (("text",), ("image",), ("text", "audio")):
        folder = write_checkpoint(tmp_path / "-".join(modalities), modalities=modalities)
        config = Config.from_file(folder / "config.json")
        assert (config.vision is not None, config.audio is not None) == ("image" in modalities, "audio" in modalities)
        some = load_tensors(folder, config, modalities)
        assert all(mx.array_equal(tensor, every[name]) for name, tensor in some.items())
        size = (folder / "model.safetensors").stat().st_size
        assert size - sum(tensor.nbytes for tensor in some.values()) < 64_000  # a header, and no other tower


def test_shards_are_as_large_as_allowed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", shard_bytes=200_000, modalities=("text",))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    config = Config.from_file(folder / "config.json")
    tensors = load_tensors(folder, config)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    sizes: dict[str, list[int]] = {}
    for name, file in index["weight_map"].items():
        sizes.setdefault(file, []).append(tensors[name].nbytes)
    assert len(sizes) > 3 and all(sum(held) <= 200_000 or len(held) == 1 for held in sizes.values())
    assert sorted(sizes) == [f"model-{i:05}-of-{len(sizes):05}.safetensors" for i in range(1, len(sizes) + 1)]


def test_full_has_the_published_sizes() -> None:
    ours, theirs = _config("full", "bfloat16", {}), published("config.json")
    assert tensor_shapes(Config.from_dict(ours), MODALITIES) == tensor_shapes(Config.from_dict(theirs), MODALITIES)
    assert Config.from_dict(ours) == Config.from_dict(theirs)
    for section in (None, "text_config", "vision_config", "audio_config"):
        mine, published_keys = (ours, theirs) if section is None else (ours[section], theirs[section])
        values = {key: value for key, value in mine.items() if not key.endswith("_config") or key == "per_layer_config"}
        assert {key: published_keys[key] for key in values if key in published_keys} == values


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "modules.json",
        "1_Pooling/config.json",
        "2_Normalize/config.json",
        "sentence_bert_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "config_sentence_transformers.json",
    ],
)
def test_small_files_are_the_published_ones(tiny: Path, name: str) -> None:
    ours, theirs = json.loads((tiny / name).read_text()), published(name)
    for key in ("__version__", "requirements", "is_local", "local_files_only"):  # of the machine that saved it
        for content in (ours, theirs):
            if isinstance(content, dict):
                content.pop(key, None)
    if name == "1_Pooling/config.json":
        theirs["embedding_dimension"] = 96
    assert ours == theirs


@pytest.mark.slow
def test_full_file_has_the_published_size(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "full", "full")
    assert (folder / "model.safetensors").stat().st_size == 1_488_915_288
    assert len(load_tensors(folder, Config.from_file(folder / "config.json"), MODALITIES)) == 1_376


def test_needs_no_mlx(tmp_path: Path) -> None:
    program = (
        "import sys; from egemma_mlx.random_checkpoint import write_checkpoint; write_checkpoint(sys.argv[1]); "
        "sys.exit(', '.join(m for m in ('mlx', 'tokenizers', 'torch') if m in sys.modules) or 0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "c")]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# --- arguments -------------------------------------------------------------------------------------------------------


def test_text_overrides(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "c",
        modalities=("text",),
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        sliding_window=5,
        embedding_dim=40,
        vocab_size=500,
    )
    text = Config.from_file(folder / "config.json").text
    assert [(layer.heads, layer.kv_heads, layer.head_dim, layer.window) for layer in text.layers] == [
        (6, 1, 48, None),
        (6, 3, 24, 5),
        (6, 1, 48, None),
    ]
    tensors = load_tensors(folder, Config.from_file(folder / "config.json"))
    assert tensors["language_model.embed_tokens.weight"].shape == (500, 64)
    assert json.loads((folder / "1_Pooling/config.json").read_text())["embedding_dimension"] == 40
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert max(tokenizer.get_vocab().values()) == 499
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in TEXTS)


def test_depth_alone_and_given_per_layer_config(tmp_path: Path) -> None:
    def layers(name: str, **overrides: Any) -> list[tuple[int | None, int]]:
        folder = write_checkpoint(tmp_path / name, modalities=("text",), **overrides)
        return [(layer.window, layer.head_dim) for layer in Config.from_file(folder / "config.json").text.layers]

    assert layers("depth", num_hidden_layers=4) == [(8, 16), (8, 16), (None, 32), (None, 32)]
    given = layers("given", num_hidden_layers=2, per_layer_config={"00": {"head_dim": 64}})
    assert given == [(8, 64), (None, 16)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "size: expected one of full, tiny but got 'huge'"),
        ({"dtype": "float16"}, "dtype: expected one of bfloat16, float32 but got 'float16'"),
        ({"modalities": ("smell",)}, "modalities: .* got 'smell'"),
        ({"hidden": 3}, "text_overrides: expected keys of text_config but got hidden"),
        ({"head_dim": 3}, "head_dim to be a multiple of 8"),
        ({"vocab_size": 300}, "vocab_size: expected room for special, byte and character tokens but got 300"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(EgemmaError, match=message):
        write_checkpoint(tmp_path / "c", **arguments)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_never_writes_over_anything(tiny: Path) -> None:
    before = files(tiny)
    with pytest.raises(EgemmaError, match="expected a new or empty folder"):
        write_checkpoint(tiny, seed=5)
    with pytest.raises(EgemmaError, match=r"config\.json: expected a new or empty folder"):
        write_checkpoint(tiny / "config.json")
    assert files(tiny) == before


def test_interrupted_run_leaves_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("egemma_mlx.random_checkpoint._round_to_bfloat16", full_disk)
    with pytest.raises(EgemmaError, match=r"c: cannot be written .*No space left on device"):
        write_checkpoint(tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == []
    monkeypatch.undo()
    assert (write_checkpoint(tmp_path / "c") / "config.json").exists()


# --- values ----------------------------------------------------------------------------------------------------------


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0, 0x80000000, 0x00012345], np.uint32)
    values = np.concatenate([bits.view(np.float32), np.random.default_rng(0).standard_normal(4096, np.float32)])
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(_round_to_bfloat16(values), expected)


def test_values_are_conditioned(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", dtype="float32")
    tensors = load_tensors(folder, Config.from_file(folder / "config.json"), MODALITIES)
    for name, tensor in tensors.items():
        value = np.array(tensor)
        low, high = value.min(), value.max()
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert low * value.size**0.25 >= 0.9 and high * value.size**0.25 <= 1.1, name
        elif name.endswith("layer_scalar"):
            assert 0.8 <= low <= high <= 0.9, name
        elif name.endswith("put_min"):
            assert -4 <= value <= -3, name
        elif name.endswith("put_max"):
            assert 3 <= value <= 4, name
        elif name.endswith("norm.weight") or (name.endswith(".weight") and value.ndim == 1):
            assert 0.8 <= low < high <= 1.2, name
        elif name.endswith("weight") and value.size > 500:
            fan_in = value[0].size
            assert value.std() * fan_in**0.5 == pytest.approx(1, rel=0.1), name
            assert abs(value.mean()) * fan_in**0.5 < 0.15, name
    assert len({np.array(t).tobytes() for t in tensors.values()}) == len(tensors)  # no two tensors share a stream


# --- tokenizer -------------------------------------------------------------------------------------------------------


def test_tokenizer(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    config = json.loads((tiny / "config.json").read_text())
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 2 and ids[-1] == 1 and max(ids) < config["text_config"]["vocab_size"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("").ids == [2, 1]
    assert len(ENGLISH) / len(tokenizer.encode(ENGLISH).ids) > 3  # characters per token
    assert tokenizer.encode(" the river").tokens == ["<bos>", "▁the", "▁river", "<eos>"]
    assert tokenizer.encode("日").tokens == ["<bos>", "<0xE6>", "<0x97>", "<0xA5>", "<eos>"]
    for key, token in (
        ("image_token_id", "<|image|>"),
        ("audio_token_id", "<|audio|>"),
        ("video_token_id", "<|video|>"),
    ):
        assert tokenizer.encode(f"a{token}b").ids[2:-2] == [config[key]]


def test_full_tokenizer_has_the_published_special_ids(tmp_path: Path) -> None:
    """Full-size ids with a small model: the vocabulary is what `full` is about."""
    theirs = published("tokenizer.json")
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8, "embedding_dim": 8}
    folder = write_checkpoint(
        tmp_path / "c", "full", modalities=("text",), hidden_size_per_layer_input=8, per_layer_config={}, **small
    )
    ours = json.loads((folder / "tokenizer.json").read_text())
    for key in theirs.keys() - {"model"}:
        assert ours[key] == theirs[key], key
    for key in theirs["model"].keys() - {"vocab", "merges"}:
        assert ours["model"][key] == theirs["model"][key], key
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), "<bos>", "<|image|>", "<|video|>"]:
        assert ours["model"]["vocab"][token] == theirs["model"]["vocab"][token]
    assert len(set(ours["model"]["vocab"].values())) == len(ours["model"]["vocab"])


def test_chat_template_is_the_published_one(tiny: Path) -> None:
    jinja2 = pytest.importorskip("jinja2")
    published("config.json")
    ours, theirs = (jinja2.Template((folder / "chat_template.jinja").read_text()) for folder in (tiny, HF_FILES))
    text, image, audio, video = (
        {"type": "text", "text": " a b\n"},
        {"type": "image"},
        {"type": "audio"},
        {"type": "video"},
    )
    placed = {"type": "text", "text": "see <|image|> here"}
    for contents in (
        ["plain "],
        [[text]],
        [[image, text, audio, video]],
        [[image, placed]],
        [[text], [image, image]],
        [],
    ):
        for roles in (("user", "user"), ("user", "system"), ("system", "user")):
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
            assert ours.render(messages=messages) == theirs.render(messages=messages)


# --- the reference implementations -----------------------------------------------------------------------------------


def test_transformers_loads_it_and_it_is_well_conditioned(tiny: Path) -> None:
    import oracle
    from transformers import AutoTokenizer
    from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2Model

    _, info = EmbeddingGemma2Model.from_pretrained(tiny, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rust = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    rows = [tokenizer(text)["input_ids"] for text in (ENGLISH, TEXTS[4])]
    assert rows == [rust.encode(text).ids for text in (ENGLISH, TEXTS[4])]
    single, double = (oracle.text_vectors(tiny, rows, dtype) for dtype in ("float32", "float64"))
    assert np.abs(single - double).max() < 1e-6
    assert abs(float(double[0] @ double[1])) < 0.9  # and not so tame that everything looks alike


@pytest.mark.parametrize("modalities", [("text",), MODALITIES])
def test_sentence_transformers_loads_it(tmp_path: Path, modalities: tuple[str, ...]) -> None:
    import oracle

    folder = write_checkpoint(tmp_path / "c", modalities=modalities)
    model = oracle.sentence_transformer(folder)
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [ENGLISH, "a", TEXTS[4]]
    expected = oracle.text_vectors(folder, [rust.encode(text).ids for text in texts])
    assert np.abs(model.encode(texts) - expected).max() < 1e-6
    if "image" in modalities:
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (96, 144, 3), dtype=np.uint8)
        sound = {
            "array": np.random.default_rng(1).standard_normal(16_000).astype(np.float32) / 10,
            "sampling_rate": 16_000,
        }
        vectors = np.concatenate([model.encode([Image.fromarray(pixels)]), model.encode([sound])])
        assert vectors.shape == (2, 96) and np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
        assert abs(float(vectors[0] @ vectors[1])) < 0.99
