"""config.json: the official file, every key that matters when it is absent or senseless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_checkpoint import write_checkpoint

OFFICIAL = Path(__file__).parents[2] / "shared/facts/hf_files/config.json"

REQUIRED = {
    "text_config": (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "sliding_window hidden_size_per_layer_input embedding_dim"
    ),
    "vision_config": (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim patch_size "
        "pooling_kernel_size position_embedding_size"
    ),
    "audio_config": (
        "hidden_size num_hidden_layers num_attention_heads output_proj_dims subsampling_conv_channels conv_kernel_size "
        "attention_chunk_size"
    ),
}


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    """A fresh, valid config.json with all towers; layers 2 and 5 of 6 are full."""
    return json.loads((write_checkpoint(tmp_path / "tiny") / "config.json").read_text())


def test_official_file() -> None:
    if not OFFICIAL.exists():
        pytest.skip("needs ../shared/facts/hf_files/config.json")
    config = Config.from_file(OFFICIAL)
    text, vision, audio = config.text, config.vision, config.audio
    assert (text.vocab_size, text.hidden_size, text.intermediate_size, text.embedding_dim) == (262_144, 512, 2048, 768)
    assert (text.max_tokens, text.rms_norm_eps) == (8192, 1e-6)
    assert (text.pad_token_id, text.eos_token_id, text.bos_token_id) == (0, 1, 2)
    assert len(text.layers) == text.num_hidden_layers == 24
    for index, layer in enumerate(text.layers):
        sizes = (layer.heads, layer.kv_heads, layer.head_dim, layer.window, layer.rope_theta)
        assert sizes == ((4, 1, 512, None, 1e6) if index in (5, 11, 17, 23) else (4, 2, 256, 512, 1e4))
    assert config.placeholder_ids == (258_880, 258_884, 258_881)
    assert vision is not None and (vision.hidden_size, vision.head_dim, vision.rope_theta) == (768, 64, 100.0)
    assert not vision.standardize and not vision.use_clipped_linears
    assert audio is not None and audio.subsampling_conv_channels == (128, 32) and audio.use_clipped_linears
    assert (audio.attention_context_left, audio.attention_context_right, audio.attention_logit_cap) == (13, 0, 50.0)


@pytest.mark.parametrize("keys", [("02", "05"), ("2", "5"), (2, 5)])
def test_per_layer_keys_may_be_padded_strings_or_numbers(raw: dict[str, Any], keys: tuple[Any, Any]) -> None:
    raw["text_config"]["per_layer_config"] = {
        keys[0]: {"head_dim": 48, "num_key_value_heads": 1},
        keys[1]: {"head_dim": 24},
    }
    layers = Config.from_dict(raw).text.layers
    assert [(layer.head_dim, layer.kv_heads) for layer in layers] == [
        *[(16, 2)] * 2,
        (48, 1),
        *[(16, 2)] * 2,
        (24, 2),
    ]


def test_per_layer_config_absent_and_null_differ_as_in_the_reference(raw: dict[str, Any]) -> None:
    del raw["text_config"]["per_layer_config"]
    absent = Config.from_dict(raw).text.layers[5]
    assert (absent.head_dim, absent.kv_heads) == (512, 1)
    raw["text_config"]["per_layer_config"] = None
    null = Config.from_dict(raw).text.layers[5]
    assert (null.head_dim, null.kv_heads) == (16, 2)


def test_layer_types_default_and_forced_last_layer(raw: dict[str, Any]) -> None:
    text = raw["text_config"]
    text["layer_types"] = ["sliding_attention"] * 6
    assert [layer.window for layer in Config.from_dict(raw).text.layers] == [8] * 5 + [None]
    text |= {"layer_types": None, "num_hidden_layers": 8, "per_layer_config": {}}
    assert [layer.window for layer in Config.from_dict(raw).text.layers] == [8] * 5 + [None, 8, None]


def test_unknown_keys_are_ignored(raw: dict[str, Any]) -> None:
    expected = Config.from_dict(raw)
    for section in (raw, raw["text_config"], raw["vision_config"], raw["audio_config"]):
        section["a_key_of_next_year"] = {"with": ["anything"]}
    assert Config.from_dict(raw) == expected


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in REQUIRED.items() for key in keys.split()]
)
def test_missing_required_key_is_named(raw: dict[str, Any], section: str, key: str) -> None:
    del raw[section][key]
    with pytest.raises(EgemmaError, match=rf"^config\.json: {section}: missing required key {key}$"):
        Config.from_dict(raw)


def test_missing_towers_are_none_but_text_is_required(raw: dict[str, Any]) -> None:
    raw["vision_config"] = None
    del raw["audio_config"]
    config = Config.from_dict(raw)
    assert config.vision is None and config.audio is None
    raw["vision_config"] = {}  # as mlx-vlm writes it
    assert Config.from_dict(raw).vision is None
    raw["vision_config"] = {"head_dim": 64}
    with pytest.raises(EgemmaError, match="vision_config: missing required key hidden_size"):
        Config.from_dict(raw)
    del raw["vision_config"], raw["text_config"]
    with pytest.raises(EgemmaError, match="missing required key text_config"):
        Config.from_dict(raw)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("text_config", "hidden_size", 0, "hidden_size to be a positive integer but got 0"),
        ("text_config", "hidden_size", "64", "hidden_size to be a positive integer but got '64'"),
        ("text_config", "hidden_size", True, "hidden_size to be a positive integer but got True"),
        ("text_config", "rms_norm_eps", "1e-6", "rms_norm_eps to be a number but got '1e-6'"),
        ("text_config", "eos_token_id", [1, 106], r"eos_token_id to be an integer but got \[1, 106\]"),
        ("text_config", "attention_bias", True, "attention_bias to be False but got True"),
        ("text_config", "hidden_activation", "silu", "hidden_activation to be 'gelu_pytorch_tanh' but got 'silu'"),
        ("text_config", "layer_types", ["full_attention"], "layer_types to name 6 layers"),
        ("text_config", "layer_types", 6, "layer_types to name 6 layers"),
        ("text_config", "layer_types", [{}] * 6, "layer_types to name 6 layers"),
        ("text_config", "num_key_value_heads", 3, "layer 0: expected heads to divide into kv heads"),
        ("text_config", "head_dim", 12, "layer 0: .* head_dim to be a multiple of 8"),
        ("text_config", "per_layer_config", {"06": {}}, "per_layer_config names layers outside 0…5"),
        ("text_config", "per_layer_config", {"five": {}}, "per_layer_config to map layer numbers to objects"),
        ("text_config", "per_layer_config", [1], "per_layer_config to map layer numbers to objects"),
        ("text_config", "per_layer_config", {"05": {"sliding_window": 3}}, "per_layer_config .* got sliding_window"),
        ("text_config", "rope_parameters", [1], "rope_parameters to be an object but got list"),
        ("text_config", "rope_parameters", {"full_attention": {"rope_type": "yarn"}}, "rope_type to be 'default'"),
        ("vision_config", "rope_parameters", 1, "rope_parameters to be an object but got int"),
        ("vision_config", "hidden_activation", "silu", "hidden_activation to be 'gelu_pytorch_tanh'"),
        ("audio_config", "subsampling_conv_channels", [128], "two subsampling_conv_channels"),
        ("audio_config", "subsampling_conv_channels", [128, -1], "subsampling_conv_channels to be a positive integer"),
        ("audio_config", "hidden_act", "gelu", "hidden_act to be 'silu'"),
    ],
)
def test_senseless_value_is_named(raw: dict[str, Any], section: str, key: str, value: Any, message: str) -> None:
    raw[section][key] = value
    with pytest.raises(EgemmaError, match=message) as error:
        Config.from_dict(raw, "somewhere/config.json")
    assert str(error.value).startswith(f"somewhere/config.json: {section}: ")


def test_wrong_model_type(raw: dict[str, Any]) -> None:
    raw["model_type"] = "gemma3_text"
    with pytest.raises(EgemmaError, match="expected model_type 'embedding_gemma2' but got 'gemma3_text'"):
        Config.from_dict(raw)


def test_section_that_is_no_object(raw: dict[str, Any]) -> None:
    raw["text_config"] = "tiny"
    with pytest.raises(EgemmaError, match="expected text_config to be an object but got str"):
        Config.from_dict(raw)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": ', "expected JSON but got"),
        (b"[1, 2]", "expected a JSON object but got list"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "no such file"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EgemmaError, match=message) as error:
        Config.from_file(path)
    assert str(error.value).startswith(f"{path}: ")
