"""The checkpoint's `config.json` as frozen dataclasses.

Field names are those of `transformers.models.embedding_gemma2`; unknown keys are ignored, a missing key that fixes
a shape is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egemma_mlx.errors import EgemmaError
from egemma_mlx.quantized import Quantization

MODEL_TYPE = "embedding_gemma2"
# The longest input the model was made for (its model card); RoPE itself goes further.
MAX_TOKENS = 8192

_SLIDING = "sliding_attention"
_FULL = "full_attention"
_DEFAULT_THETA = {_SLIDING: 1e4, _FULL: 1e6}


@dataclass(frozen=True)
class LayerConfig:
    """Attention of one text layer: `heads` query heads over `kv_heads` key/value heads of `head_dim`.

    `window` is the inclusive radius |i − j| ≤ window, or None for full attention; `rope_theta` the RoPE base.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rope_theta: float


@dataclass(frozen=True)
class TextConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    hidden_size_per_layer_input: int
    embedding_dim: int
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]

    @property
    def max_tokens(self) -> int:
        """The longest input accepted without asking for truncation."""
        return min(MAX_TOKENS, self.max_position_embeddings)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "text_config") -> TextConfig:
        get = _Reader(raw, source)
        depth = get.size("num_hidden_layers")
        kinds = _layer_types(raw, depth, source)
        get.only("attention_bias", False)
        get.only("hidden_activation", "gelu_pytorch_tanh")
        return cls(
            vocab_size=get.size("vocab_size"),
            hidden_size=get.size("hidden_size"),
            intermediate_size=get.size("intermediate_size"),
            num_hidden_layers=depth,
            hidden_size_per_layer_input=get.size("hidden_size_per_layer_input"),
            embedding_dim=get.size("embedding_dim"),
            rms_norm_eps=get.number("rms_norm_eps", 1e-6),
            bos_token_id=get.integer("bos_token_id", 2),
            eos_token_id=get.integer("eos_token_id", 1),
            pad_token_id=get.integer("pad_token_id", 0),
            max_position_embeddings=get.integer("max_position_embeddings", 262_144),
            layers=_layers(raw, kinds, get, source),
        )


@dataclass(frozen=True)
class VisionConfig:
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    patch_size: int
    pooling_kernel_size: int
    position_embedding_size: int
    rms_norm_eps: float
    rope_theta: float
    standardize: bool
    use_clipped_linears: bool

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "vision_config") -> VisionConfig:
        get = _Reader(raw, source)
        get.only("attention_bias", False)
        get.only("hidden_activation", "gelu_pytorch_tanh")
        return cls(
            hidden_size=get.size("hidden_size"),
            intermediate_size=get.size("intermediate_size"),
            num_hidden_layers=get.size("num_hidden_layers"),
            num_attention_heads=get.size("num_attention_heads"),
            num_key_value_heads=get.size("num_key_value_heads"),
            head_dim=get.size("head_dim"),
            patch_size=get.size("patch_size"),
            pooling_kernel_size=get.size("pooling_kernel_size"),
            position_embedding_size=get.size("position_embedding_size"),
            rms_norm_eps=get.number("rms_norm_eps", 1e-6),
            rope_theta=get.section("rope_parameters").number("rope_theta", 100.0),
            standardize=bool(raw.get("standardize", False)),
            use_clipped_linears=bool(raw.get("use_clipped_linears", False)),
        )


@dataclass(frozen=True)
class AudioConfig:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    output_proj_dims: int
    subsampling_conv_channels: tuple[int, int]
    conv_kernel_size: int
    attention_chunk_size: int
    attention_context_left: int
    attention_context_right: int
    attention_logit_cap: float
    attention_invalid_logits_value: float
    gradient_clipping: float
    residual_weight: float
    rms_norm_eps: float
    use_clipped_linears: bool

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "audio_config") -> AudioConfig:
        get = _Reader(raw, source)
        get.only("hidden_act", "silu")
        channels = get("subsampling_conv_channels")
        if not (isinstance(channels, list) and len(channels) == 2):
            raise EgemmaError(f"{source}: expected two subsampling_conv_channels but got {channels!r}")
        first, second = (_positive(count, "subsampling_conv_channels", source) for count in channels)
        return cls(
            hidden_size=get.size("hidden_size"),
            num_hidden_layers=get.size("num_hidden_layers"),
            num_attention_heads=get.size("num_attention_heads"),
            output_proj_dims=get.size("output_proj_dims"),
            subsampling_conv_channels=(first, second),
            conv_kernel_size=get.size("conv_kernel_size"),
            attention_chunk_size=get.size("attention_chunk_size"),
            attention_context_left=get.integer("attention_context_left", 13),
            attention_context_right=get.integer("attention_context_right", 0),
            attention_logit_cap=get.number("attention_logit_cap", 50.0),
            attention_invalid_logits_value=get.number("attention_invalid_logits_value", -1e9),
            gradient_clipping=get.number("gradient_clipping", 1e10),
            residual_weight=get.number("residual_weight", 0.5),
            rms_norm_eps=get.number("rms_norm_eps", 1e-6),
            use_clipped_linears=bool(raw.get("use_clipped_linears", True)),
        )


@dataclass(frozen=True)
class Config:
    """The whole checkpoint: one text model, and the towers it was saved with (None where it has none); how its layers
    are packed, if they are."""

    text: TextConfig
    vision: VisionConfig | None
    audio: AudioConfig | None
    image_token_id: int
    video_token_id: int
    audio_token_id: int
    model_type: str = MODEL_TYPE
    quantization: Quantization | None = None

    @property
    def placeholder_ids(self) -> tuple[int, int, int]:
        """Ids whose rows are replaced by soft tokens: image, video, audio."""
        return (self.image_token_id, self.video_token_id, self.audio_token_id)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config.json") -> Config:
        """Read a parsed `config.json`; `source` is the file name that errors carry.

        Raises:
            EgemmaError: another `model_type`, a missing or senseless key.
        """
        found = raw.get("model_type")
        if found != MODEL_TYPE:
            raise EgemmaError(f"{source}: expected model_type {MODEL_TYPE!r} but got {found!r}")
        get = _Reader(raw, source)
        get("text_config")  # required, where a tower may be absent: null, or {} as mlx-vlm writes it
        text, vision, audio = (get.section(key) for key in ("text_config", "vision_config", "audio_config"))
        return cls(
            text=TextConfig.from_dict(text.raw, text.source),
            vision=None if not raw.get("vision_config") else VisionConfig.from_dict(vision.raw, vision.source),
            audio=None if not raw.get("audio_config") else AudioConfig.from_dict(audio.raw, audio.source),
            image_token_id=get.integer("image_token_id", 258_880),
            video_token_id=get.integer("video_token_id", 258_884),
            audio_token_id=get.integer("audio_token_id", 258_881),
            quantization=Quantization.from_config(raw, source),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Config:
        """Read `config.json` at `path`, as Google or another tool wrote it (`layouts`).

        Raises:
            EgemmaError: the file is missing, not JSON, or not an EmbeddingGemma 2 config.
        """
        return cls.from_dict(read_json_object(Path(path)), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; EgemmaError names the file when it is missing, broken or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EgemmaError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EgemmaError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise EgemmaError(f"{path}: expected JSON but got {error}") from None
    if not isinstance(value, dict):
        raise EgemmaError(f"{path}: expected a JSON object but got {type(value).__name__}")
    return value


class _Reader:
    """The keys of one section, with the section's name in every error; null is the same as absent."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def __call__(self, key: str) -> Any:
        """A required key."""
        if self.raw.get(key) is None:
            raise EgemmaError(f"{self.source}: missing required key {key}")
        return self.raw[key]

    def size(self, key: str) -> int:
        """A required positive integer."""
        return _positive(self(key), key, self.source)

    def integer(self, key: str, default: int) -> int:
        value = self.raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise EgemmaError(f"{self.source}: expected {key} to be an integer but got {value!r}")
        return default if value is None else value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise EgemmaError(f"{self.source}: expected {key} to be a number but got {value!r}")
        return default if value is None else float(value)

    def only(self, key: str, value: Any) -> None:
        """The one value that this architecture knows for `key`."""
        found = self.raw.get(key)
        if found is not None and found != value:
            raise EgemmaError(f"{self.source}: expected {key} to be {value!r} but got {found!r}")

    def section(self, key: str) -> _Reader:
        """An object inside this one, empty where it is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise EgemmaError(f"{self.source}: expected {key} to be an object but got {type(value).__name__}")
        return _Reader(value or {}, f"{self.source}: {key}")


def _positive(value: Any, key: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EgemmaError(f"{source}: expected {key} to be a positive integer but got {value!r}")
    return value


def _layer_types(raw: Mapping[str, Any], depth: int, source: str) -> list[str]:
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = [_FULL if (i + 1) % 6 == 0 else _SLIDING for i in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise EgemmaError(
            f"{source}: expected layer_types to name {depth} layers as {_SLIDING} or {_FULL} but got {kinds!r}"
        )
    # The reference turns the last layer into a full one, whatever the file says.
    return [*kinds[:-1], _FULL]


def _layers(raw: Mapping[str, Any], kinds: list[str], get: _Reader, source: str) -> tuple[LayerConfig, ...]:
    base = {key: get.size(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    window = get.size("sliding_window")
    rope = get.section("rope_parameters")
    theta = {kind: _rope_theta(rope.section(kind), kind) for kind in set(kinds)}
    by_layer = _per_layer(raw, kinds, source)
    if unknown := sorted({key for values in by_layer.values() for key in values} - base.keys()):
        # Ignoring one (a window, say) would give other vectors without a word.
        raise EgemmaError(f"{source}: expected per_layer_config to set {', '.join(base)} but got {', '.join(unknown)}")

    def layer(index: int, kind: str) -> LayerConfig:
        where = f"{source}: layer {index}"
        size = {key: _positive(by_layer.get(index, {}).get(key, base[key]), key, where) for key in base}
        heads, kv_heads, head_dim = (
            size["num_attention_heads"],
            size["num_key_value_heads"],
            size["head_dim"],
        )
        if heads % kv_heads or head_dim % 8:
            raise EgemmaError(
                f"{where}: expected heads to divide into kv heads and head_dim to be a multiple of 8 "
                f"but got {heads} heads, {kv_heads} kv heads, head_dim {head_dim}"
            )
        return LayerConfig(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window if kind == _SLIDING else None,
            rope_theta=theta[kind],
        )

    return tuple(layer(index, kind) for index, kind in enumerate(kinds))


def _per_layer(raw: Mapping[str, Any], kinds: list[str], source: str) -> dict[int, dict[str, Any]]:
    """`per_layer_config` by layer number (its keys are "05", "5" or 5); an explicit null overrides nothing."""
    if "per_layer_config" not in raw:
        return {i: {"head_dim": 512, "num_key_value_heads": 1} for i, kind in enumerate(kinds) if kind == _FULL}
    try:
        by_layer = {int(index): dict(values) for index, values in (raw["per_layer_config"] or {}).items()}
    except (ValueError, TypeError, AttributeError):
        raise EgemmaError(f"{source}: expected per_layer_config to map layer numbers to objects") from None
    if any(index not in range(len(kinds)) for index in by_layer):
        raise EgemmaError(f"{source}: per_layer_config names layers outside 0…{len(kinds) - 1}: {sorted(by_layer)}")
    return by_layer


def _rope_theta(parameters: _Reader, kind: str) -> float:
    parameters.only("rope_type", "default")
    return parameters.number("rope_theta", _DEFAULT_THETA[kind])
