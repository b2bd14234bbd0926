"""Random checkpoints in the official layout, for tests and benchmarks where the real weights are not at hand.

They are well-conditioned: with q and k norms near 1 and attention scale 1 a random network is chaotic, and two correct
float32 implementations disagree in the first digit after 24 layers. Here attention scores are O(1) (q and k norms
≈ head_dim^-¼), so float32 and float64 agree to 1e-6 on the unit vector.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from egemma_mlx.checkpoint import INDEX_FILE, WEIGHTS_FILE, Shape, check_modalities, tensor_shapes
from egemma_mlx.config import MODEL_TYPE, Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.random_tokenizer import TOKENIZER_CONFIG, special_ids, tokenizer

Json = dict[str, Any]

_STORED = {"bfloat16": ("BF16", 2), "float32": ("F32", 4)}
_BLOCK = 1 << 20  # values drawn at a time: the embedding table never exists as one float32 array


def write_checkpoint(
    folder: str | Path,
    size: Literal["tiny", "full"] = "tiny",
    *,
    modalities: Iterable[str] = ("text", "image", "audio"),
    seed: int = 0,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    shard_bytes: int | None = None,
    **text_overrides: Any,
) -> Path:
    """Write a random checkpoint into the new or empty `folder` and return it.

    The same arguments give the same bytes, and every tensor has a random stream of its own: leaving out a tower or
    sharding changes no other tensor.

    Args:
        size: "full" has the published shapes (1.49 GB with all towers in bfloat16), "tiny" is a few MB of them.
        modalities: the towers to write; text is always among them.
        dtype: of the stored tensors. bfloat16 values are rounded to nearest even.
        shard_bytes: split the weights into files of at most this many bytes of tensors (one tensor at least).
        text_overrides: keys of `text_config` in config.json. `layer_types` follows `num_hidden_layers` and
            `per_layer_config` (full layers: twice the head_dim, one kv head) follows `layer_types` unless given.

    Raises:
        EgemmaError: an unknown size, dtype, modality or override, sizes that do not fit together, a folder in use.
    """
    if size not in _SIZES:
        raise EgemmaError(f"size: expected one of {', '.join(_SIZES)} but got {size!r}")
    if dtype not in _STORED:
        raise EgemmaError(f"dtype: expected one of {', '.join(_STORED)} but got {dtype!r}")
    raw = _config(size, dtype, text_overrides)
    towers = check_modalities(Config.from_dict(raw), modalities)
    for modality, section in (("image", "vision_config"), ("audio", "audio_config")):
        if modality not in towers:
            raw[section] = None
    shapes = dict(sorted(tensor_shapes(Config.from_dict(raw), towers).items()))
    files = _files(raw, size, towers)

    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise EgemmaError(f"{folder}: expected a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Moved in when complete: an interrupted run leaves an empty folder, not half a checkpoint.
        with TemporaryDirectory(dir=folder) as temporary:
            partial = Path(temporary)
            _write_weights(partial, shapes, seed, dtype, shard_bytes)
            for name, content in files.items():
                text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_text(text, encoding="utf-8")
            for path in partial.iterdir():
                path.rename(folder / path.name)
    except OSError as error:
        raise EgemmaError(f"{folder}: cannot be written ({error})") from error
    return folder


# --- weights ---------------------------------------------------------------------------------------------------------


def _write_weights(folder: Path, shapes: Mapping[str, Shape], seed: int, dtype: str, shard_bytes: int | None) -> None:
    if shard_bytes is None:
        _write_safetensors(folder / WEIGHTS_FILE, shapes, seed, dtype)
        return
    width = _STORED[dtype][1]
    shards: list[dict[str, Shape]] = []
    room = 0
    for name, shape in shapes.items():
        size = width * math.prod(shape)
        if not shards or size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_safetensors(folder / file, shard, seed, dtype)
    index = {
        "metadata": {"total_size": width * sum(map(math.prod, shapes.values()))},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, shapes: Mapping[str, Shape], seed: int, dtype: str) -> None:
    """Stream one safetensors file: header length (u64), JSON header padded to 8 bytes, data."""
    code, width = _STORED[dtype]
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + width * math.prod(shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            for block in _values(name, shape, seed):
                file.write((_round_to_bfloat16(block) if dtype == "bfloat16" else block).tobytes())


def _values(name: str, shape: Shape, seed: int) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor's values in row-major order, in blocks."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    centre, spread, normal = _distribution(name, shape)
    count = math.prod(shape)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        unit = rng.standard_normal(size, np.float32) if normal else rng.random(size, np.float32) * 2 - 1
        yield unit * np.float32(spread) + np.float32(centre)


# Tensors that are neither a norm's weight nor a matrix, by the end of the name: centre, spread, normal or uniform.
_BY_NAME = (
    (".layer_scalar", 0.85, 0.05, False),
    ("put_max", 3.5, 0.5, False),  # clip limits, which a few values in a thousand reach
    ("put_min", -3.5, 0.5, False),
    (".bias", 0.0, 0.1, True),
    (".std_bias", 0.0, 0.1, True),
    (".per_dim_scale", 0.0, 0.1, True),
    (".position_embedding_table", 0.0, 0.5, True),
)


def _distribution(name: str, shape: Shape) -> tuple[float, float, bool]:
    """(centre, spread, normal): N(centre, spread²), or uniform in centre ± spread."""
    for suffix, centre, spread, normal in _BY_NAME:
        if name.endswith(suffix):
            return centre, spread, normal
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        scale = shape[0] ** -0.25
        return scale, 0.1 * scale, False
    if len(shape) == 1:
        return 1.0, 0.2, False
    # A row of the embedding table is as long as a fan-in, and that makes embeddings · √hidden O(1).
    return 0.0, math.prod(shape[1:]) ** -0.5, True


def _round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each finite float32, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


# --- config.json -----------------------------------------------------------------------------------------------------

_SLIDING, _FULL = "sliding_attention", "full_attention"

# What differs between the sizes: text, vision and audio sizes, and the text's period of full layers.
_SIZES: dict[str, Json] = {
    "full": {
        "text": {
            "vocab_size": 262_144,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 512,
            "embedding_dim": 768,
        },
        "full_every": 6,
        "vision": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "head_dim": 64,
            "global_head_dim": 64,
        },
        "audio": {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "output_proj_dims": 1536,
            "subsampling_conv_channels": [128, 32],
        },
    },
    "tiny": {
        "text": {
            "vocab_size": 2048,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 32,
            "embedding_dim": 96,
        },
        "full_every": 3,
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
        },
        "audio": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "output_proj_dims": 48,
            # 128 mel bins: the reference takes the first count for the mel axis, so it cannot shrink.
            "subsampling_conv_channels": [128, 8],
        },
    },
}


def _config(size: str, dtype: str, overrides: Json) -> Json:
    sizes, ids = _SIZES[size], special_ids(size)
    return {
        "architectures": ["EmbeddingGemma2Model"],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        "initializer_range": 0.02,
        "boi_token_id": ids["<|image>"],
        "image_token_id": ids["<|image|>"],
        "eoi_token_id": ids["<image|>"],
        "boa_token_id": ids["<|audio>"],
        "audio_token_id": ids["<|audio|>"],
        "eoa_token_index": ids["<audio|>"],
        "video_token_id": ids["<|video|>"],
        "vision_soft_tokens_per_image": 280,
        "text_config": _text_config(sizes["text"], sizes["full_every"], dtype, overrides),
        "vision_config": {
            **sizes["vision"],
            "model_type": "gemma4_vision",
            "dtype": dtype,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "default_output_length": 280,
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "max_position_embeddings": 131_072,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10_240,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
            "standardize": False,
            "use_clipped_linears": False,
        },
        "audio_config": {
            **sizes["audio"],
            "model_type": "gemma4_audio",
            "dtype": dtype,
            "attention_chunk_size": 12,
            "attention_context_left": 13,
            "attention_context_right": 0,
            "attention_invalid_logits_value": -1e9,
            "attention_logit_cap": 50.0,
            "conv_kernel_size": 5,
            "gradient_clipping": 1e10,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "residual_weight": 0.5,
            "rms_norm_eps": 1e-6,
            "use_clipped_linears": True,
        },
    }


def _text_config(sizes: Json, full_every: int, dtype: str, overrides: Json) -> Json:
    text = {
        **sizes,
        "model_type": f"{MODEL_TYPE}_text",
        "dtype": dtype,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": None,
        "max_position_embeddings": 262_144,
        "per_layer_config": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            _FULL: {"rope_theta": 1e6, "rope_type": "default"},
            _SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
        },
    }
    if unknown := sorted(overrides.keys() - text.keys()):
        raise EgemmaError(f"text_overrides: expected keys of text_config but got {', '.join(unknown)}")
    if overrides.get("layer_types") is not None:
        text["num_hidden_layers"] = len(overrides["layer_types"])
    text |= overrides
    if text["layer_types"] is None:
        depth = text["num_hidden_layers"]
        text["layer_types"] = [_SLIDING if (i + 1) % full_every and i + 1 < depth else _FULL for i in range(depth)]
    if text["per_layer_config"] is None:
        wide = {"head_dim": 2 * text["head_dim"], "num_key_value_heads": 1}
        kinds = [*text["layer_types"][:-1], _FULL]
        text["per_layer_config"] = {f"{i:02}": wide for i, kind in enumerate(kinds) if kind == _FULL}
    return text


# --- the other files -------------------------------------------------------------------------------------------------


def _files(config: Json, size: str, modalities: Iterable[str]) -> dict[str, Json | list[Json] | str]:
    return {
        "config.json": config,
        "tokenizer.json": tokenizer(special_ids(size), config["text_config"]["vocab_size"]),
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "config_sentence_transformers.json": _SENTENCE_TRANSFORMERS,
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_Pooling",
                "type": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
            },
            {
                "idx": 2,
                "name": "2",
                "path": "2_Normalize",
                "type": "sentence_transformers.base.modules.normalize.Normalize",
            },
        ],
        "1_Pooling/config.json": {
            "embedding_dimension": config["text_config"]["embedding_dim"],
            "pooling_mode": "mean",
            "include_prompt": True,
        },
        "2_Normalize/config.json": {
            "module_input_name": "sentence_embedding",
            "module_output_name": "sentence_embedding",
        },
        "sentence_bert_config.json": _sentence_bert(tuple(modalities)),
        "preprocessor_config.json": _FEATURE_EXTRACTOR,
        "processor_config.json": _PROCESSOR,
        "chat_template.jinja": _CHAT_TEMPLATE,
    }


def _sentence_bert(modalities: tuple[str, ...]) -> Json:
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    accepted: Json = dict.fromkeys(modalities, forward)
    if "image" in modalities:
        accepted["video"] = forward
    if len(modalities) > 1:
        accepted["message"] = {**forward, "format": "structured"}
    return {
        "transformer_task": "feature-extraction",
        "modality_config": accepted,
        "module_output_name": "token_embeddings",
    }


_QUERY, _DOCUMENT = "task: {} | query: ", "title: none | text: "

_SENTENCE_TRANSFORMERS: Json = {
    "__version__": {"sentence_transformers": "6.1.0"},
    "model_type": "SentenceTransformer",
    "default_prompt_name": None,
    "similarity_fn_name": "cosine",
    "prompts": {
        "BitextMining": _QUERY.format("search result"),
        "Classification": _QUERY.format("classification"),
        "Clustering": _QUERY.format("clustering"),
        "CodeRetrieval": _QUERY.format("code retrieval"),
        "Document": _DOCUMENT,
        "FactChecking": _QUERY.format("fact checking"),
        "InstructionRetrieval": _QUERY.format("code retrieval"),
        "MultilabelClassification": _QUERY.format("classification"),
        "PairClassification": _QUERY.format("sentence similarity"),
        "QuestionAnswering": _QUERY.format("question answering"),
        "Reranking": _QUERY.format("search result"),
        "Retrieval": _QUERY.format("search result"),
        "Retrieval-document": _DOCUMENT,
        "Retrieval-query": _QUERY.format("search result"),
        "STS": _QUERY.format("sentence similarity"),
        "SearchQuery": _QUERY.format("search result"),
        "SentenceSimilarity": _QUERY.format("sentence similarity"),
        "Summarization": _QUERY.format("sentence similarity"),
        "document": _DOCUMENT,
        "query": _QUERY.format("search result"),
    },
}

_FEATURE_EXTRACTOR: Json = {
    "feature_extractor_type": "Gemma4AudioFeatureExtractor",
    "dither": 0.0,
    "feature_size": 128,
    "fft_length": 512,
    "fft_overdrive": False,
    "frame_length": 320,
    "hop_length": 160,
    "input_scale_factor": 1.0,
    "max_frequency": 8000.0,
    "mel_floor": 0.001,
    "min_frequency": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "per_bin_mean": None,
    "per_bin_stddev": None,
    "preemphasis": 0.0,
    "preemphasis_htk_flavor": True,
    "return_attention_mask": True,
    "sampling_rate": 16_000,
}

_PIXELS: Json = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_std": [1.0, 1.0, 1.0],
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 1 / 255,
}

_PROCESSOR: Json = {
    "processor_class": "EmbeddingGemma2Processor",
    "audio_ms_per_token": 40,
    "audio_seq_length": 280,
    "image_seq_length": 280,
    "feature_extractor": _FEATURE_EXTRACTOR,
    "image_processor": {
        **_PIXELS,
        "image_processor_type": "Gemma4ImageProcessor",
        "image_seq_length": 280,
        "max_soft_tokens": 280,
    },
    "video_processor": {
        **_PIXELS,
        "video_processor_type": "EmbeddingGemma2VideoProcessor",
        "add_timestamps": False,
        "do_sample_frames": True,
        "fps": 1,
        "max_frames": 32,
        "max_soft_tokens": 140,
        "overflow_strategy": "uniform",
        "return_metadata": False,
    },
}

# What sentence-transformers makes one string of a multimodal message with: system messages first, and a placeholder for
# each medium unless the text places them itself.
_CHAT_TEMPLATE = """
{%- set system = messages | selectattr('role', 'equalto', 'system') | list -%}
{%- set others = messages | rejectattr('role', 'equalto', 'system') | list -%}
{%- for message in system + others -%}
    {%- if message['content'] is string -%}
        {{ message['content'] }}
    {%- else -%}
        {%- set text = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
        {%- set placed = '<|image|>' in text or '<|video|>' in text or '<|audio|>' in text -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{ part['text'] }}
            {%- elif message['role'] != 'system' and not placed and part['type'] in ('image', 'video', 'audio') -%}
                {{ '<|' + part['type'] + '|>' }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
"""
