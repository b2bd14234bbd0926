"""A checkpoint on disk: where it is, which tensors it must hold, and its arrays.

`tensor_shapes` is the architecture as a table of the official names; every header that is read is compared with it
before a byte of data is. mlx and huggingface_hub are imported by the functions that call them, so that headers and
shapes cost neither.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from egemma_mlx.config import AudioConfig, Config, LayerConfig, TextConfig, VisionConfig, read_json_object
from egemma_mlx.errors import EgemmaError
from egemma_mlx.layouts import official_axes, official_name, official_shape
from egemma_mlx.quantized import Stored, expected_tensors

if TYPE_CHECKING:
    import mlx.core as mx

Shape = tuple[int, ...]

DEFAULT_MODEL = "google/embeddinggemma-2"
MINI = "mini"
"""The name of the small model in this package: a stand-in, not Google's (assets/mini/README.md)."""
GET_REAL = f"hf download {DEFAULT_MODEL}"
_MINI_FOLDER = Path(__file__).parent / "assets" / MINI

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODALITIES = ("text", "image", "audio")
# Tensors of a modality start with one of these: the tower, and its projection into the text model's width.
_PREFIXES = {
    "text": ("language_model.",),
    "image": ("vision_tower.", "embed_vision."),
    "audio": ("audio_tower.", "embed_audio."),
}
# What a folder needs to run: weights, configuration, tokenizer; the hub's readme and pictures stay there.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_HUB_TIMEOUT = 5.0  # seconds for its first answer


def resolve(path_or_hf_repo: str | Path | None = None, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `path_or_hf_repo` itself, or the hub's `org/name` at `revision` in the local cache.

    A complete copy in the cache is taken as it is (`hf download` refreshes it). What the cache lacks is downloaded;
    without network the cache alone decides. "mini" is the model in this package, unless the working directory has a
    checkpoint of that name.

    None is $EGEMMA_MODEL; without that, google/embeddinggemma-2 where the cache has all of it (or a revision is asked
    for), and else "mini", which one line on stderr says. Nothing is downloaded to decide that.

    Raises:
        EgemmaError: neither a folder nor to be had from the hub; a revision of a folder.
    """
    if path_or_hf_repo is None:
        path_or_hf_repo = _default(revision)
    name = str(path_or_hf_repo)
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own raises where a user does not exist
    if path_or_hf_repo == MINI and not (folder / "config.json").is_file():
        folder = _MINI_FOLDER
    if name and folder.is_dir():
        if revision is not None:
            raise EgemmaError(f"revision: expected a hub id beside revision {revision!r} but got the folder {folder}")
        return folder
    if isinstance(path_or_hf_repo, Path) or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise EgemmaError(f"{name!r} is neither a folder nor a hub id (org/name); {_ways_out('ORG/NAME')}")

    try:
        return _from_hub(name, revision)
    except Exception as error:  # of the hub's client, of its HTTP library (two, by version), of the disk
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise EgemmaError(
            f"{name!r} is not a folder and the hub did not give it ({reason}); {_ways_out(name)}"
        ) from error


def _default(revision: str | None) -> str | Path:
    """What is meant where no model is named."""
    if named := os.environ.get("EGEMMA_MODEL"):
        return named
    if revision is not None or _is_at_hand(DEFAULT_MODEL):
        return DEFAULT_MODEL
    _say_that_mini_stands_in()
    return _MINI_FOLDER


@functools.cache
def _say_that_mini_stands_in() -> None:
    print(
        f"egemma-mlx: {DEFAULT_MODEL} is not in the local cache (`{GET_REAL}` gets it): using {MINI}, a small stand-in "
        "that is not Google's",
        file=sys.stderr,
    )


def _is_at_hand(repo: str) -> bool:
    """Whether the local cache has all of a hub repository."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # Asked before the hub's client, whose import takes half a second.
    if not Path(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").is_dir():
        return False
    cached = _cached(repo)
    return cached is not None and _is_complete(cached)


def _from_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import model_info

    cached = _cached(repo, revision)
    if cached is not None and _is_complete(cached):
        return cached
    try:
        # Asked first because snapshot_download has no timeout: where a firewall drops packets it waits for minutes.
        model_info(repo, revision=revision, timeout=_HUB_TIMEOUT)
    except Exception:
        if cached is None:
            raise
        return cached
    return _snapshot(repo, revision)


def _cached(repo: str, revision: str | None = None) -> Path | None:
    """What the local cache has of a hub repository, which may be less than all."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        return _snapshot(repo, revision, local_files_only=True)
    return None


def _snapshot(repo: str, revision: str | None, *, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    allowed = list(_HUB_FILES)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=allowed, local_files_only=local_files_only))


def _is_complete(folder: Path) -> bool:
    """Whether a cached copy has what other programs, or an interrupted download, may have left out."""
    names = ("config.json", "tokenizer.json", "config_sentence_transformers.json")
    try:
        return all(file.is_file() for file in [*map(folder.joinpath, names), *_weight_files(folder)])
    except EgemmaError:
        return False


def _ways_out(repo: str) -> str:
    return (
        f"name a local checkpoint folder (as the argument or in EGEMMA_MODEL) or {MINI}, the small stand-in in this "
        f"package, run `hf download {repo}` where there is network and access, or write a random one with "
        "`egemma-mlx checkpoint FOLDER`"
    )


def load_tensors(folder: Path, config: Config, modalities: Iterable[str] = ("text",)) -> dict[str, mx.array]:
    """The tensors of the chosen towers by their official names, evaluated, in the stored dtype (bfloat16 or float32).

    A quantised checkpoint's are as `quantized` describes them: packed weights are uint32, with scales and biases
    beside them, and floats may be float16. The layouts of other tools are read too (`layouts`).

    Names, shapes and dtypes are checked from the headers before any data is read, and the other towers' data never is.

    Raises:
        EgemmaError: a missing, truncated or corrupt file; or, in one message, every tensor that is missing,
            misshapen, of another dtype, or that belongs to no tower.
    """
    import mlx.core as mx

    headers = _read_headers(folder)
    expected = expected_tensors(config.quantization, tensor_shapes(config, modalities), headers)
    _check(folder, expected, headers, check_modalities(config, modalities))
    lazy: dict[Path, Any] = {file: mx.load(str(file)) for file in {headers[name].file for name in expected}}
    arrays = {
        name: official_axes(name, lazy[headers[name].file][headers[name].name], stored.shape)
        for name, stored in expected.items()
    }
    mx.eval(arrays)
    return arrays


def tower_sizes(folder: Path, config: Config) -> dict[str, int]:
    """Values of the weights per modality that `config` has a tower for, packed ones included, from the headers alone.

    Raises:
        EgemmaError: a missing, truncated or corrupt file.
    """
    headers = _read_headers(folder)
    present = {"text": True, "image": config.vision is not None, "audio": config.audio is not None}
    return {
        modality: sum(_values(name, config, headers) for name in headers if name.startswith(_PREFIXES[modality]))
        for modality in MODALITIES
        if present[modality]
    }


# --- headers ---------------------------------------------------------------------------------------------------------


class _Header(NamedTuple):
    file: Path
    name: str  # in the file
    shape: Shape
    dtype: str


def _read_headers(folder: Path) -> dict[str, _Header]:
    """Every tensor of the checkpoint by its official name, from the headers of its safetensors files."""
    headers: dict[str, _Header] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    official = official_name(name)
                    if official in headers:
                        raise EgemmaError(f"{file}: tensor {name} is also in {headers[official].file.name}")
                    entry = tensors.get_slice(name)
                    headers[official] = _Header(file, name, tuple(entry.get_shape()), entry.get_dtype())
        except FileNotFoundError:
            raise EgemmaError(f"{file}: no such file, but {INDEX_FILE} names it") from None
        except (SafetensorError, OSError) as error:
            raise EgemmaError(f"{file}: truncated or corrupt safetensors file ({error})") from None
    return headers


def _values(name: str, config: Config, headers: Mapping[str, _Header]) -> int:
    """How many values of a weight a tensor holds: none where it is the scales or biases of a packed one."""
    layer, header = name.removesuffix(".weight"), headers[name]
    if config.quantization is None:
        return math.prod(header.shape)
    if name.endswith((".scales", ".biases")):
        return 0
    scheme = config.quantization.scheme(layer, headers) if name.endswith(".weight") else None
    return math.prod(header.shape) * 32 // scheme.bits if scheme else math.prod(header.shape)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        raise EgemmaError(f"{folder}: expected {WEIGHTS_FILE} or {INDEX_FILE} but found neither")
    weight_map = read_json_object(index).get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(file, str) for file in weight_map.values())):
        raise EgemmaError(f"{index}: expected weight_map to map tensor names to file names")
    return [folder / file for file in sorted(set(weight_map.values()))]


def _check(
    folder: Path, expected: Mapping[str, Stored], headers: Mapping[str, _Header], modalities: tuple[str, ...]
) -> None:
    ignored = tuple(prefix for other in MODALITIES if other not in modalities for prefix in _PREFIXES[other])
    present = {name: header for name, header in headers.items() if name in expected}
    faults = {
        "missing": [name for name in expected if name not in headers],
        "unexpected": [name for name in headers if name not in expected and not name.startswith(ignored)],
        "misshapen": [
            f"{name} expected {list(expected[name].shape)} but got {list(header.shape)}"
            for name, header in present.items()
            if official_shape(name, header.shape, expected[name].shape) != expected[name].shape
        ],
    }
    for name, header in present.items():
        if header.dtype not in (known := expected[name].dtypes):
            kind = f"neither {' nor '.join(known)}" if len(known) > 1 else f"not {known[0]}"
            faults.setdefault(kind, []).append(f"{name} is {header.dtype}")
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {fault}: {_some(names)}" for fault, names in faults.items() if names)
        float16 = any(name.endswith(" is F16") for names in faults.values() for name in names)
        reason = "; float16 is refused because the residual stream overflows it" if float16 else ""
        raise EgemmaError(f"{folder}: tensors do not fit config.json: {listed}{reason}")


def _some(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


# --- the architecture ------------------------------------------------------------------------------------------------


def tensor_shapes(config: Config, modalities: Iterable[str] = ("text",)) -> dict[str, Shape]:
    """Name and shape of every tensor that the towers of `modalities` need; text is always among them.

    Raises:
        EgemmaError: a modality that does not exist, or one whose tower `config` lacks.
    """
    chosen = check_modalities(config, modalities)
    shapes = _text_tensors(config.text)
    if "image" in chosen and config.vision is not None:
        shapes |= _vision_tensors(config.vision, config.text.hidden_size)
    if "audio" in chosen and config.audio is not None:
        shapes |= _audio_tensors(config.audio, config.text.hidden_size)
    return shapes


def check_modalities(config: Config, modalities: Iterable[str]) -> tuple[str, ...]:
    """`modalities` with text added, in the order of `MODALITIES`.

    Raises:
        EgemmaError: a modality that does not exist, or one whose tower `config` lacks.
    """
    asked = (modalities,) if isinstance(modalities, str) else tuple(modalities)
    if unknown := [name for name in asked if name not in MODALITIES]:
        raise EgemmaError(
            f"modalities: expected some of {', '.join(MODALITIES)} but got {', '.join(map(repr, unknown))}"
        )
    for name, tower in (("image", config.vision), ("audio", config.audio)):
        if name in asked and tower is None:
            raise EgemmaError(
                f"modalities: {name} was asked for, but this checkpoint's config.json has no such tower; "
                f"{DEFAULT_MODEL} has (`{GET_REAL}`)"
            )
    return tuple(name for name in MODALITIES if name == "text" or name in asked)


def _text_tensors(text: TextConfig) -> dict[str, Shape]:
    hidden, ple = text.hidden_size, text.hidden_size_per_layer_input
    return _under(
        "language_model",
        {
            "embed_tokens.weight": (text.vocab_size, hidden),
            "ple.per_layer_model_projection.weight": (text.num_hidden_layers * ple, hidden),
            "ple.per_layer_projection_norm.weight": (ple,),
            "norm.weight": (hidden,),
            "embedding_projection.weight": (text.embedding_dim, hidden),
        },
        *(_under(f"layers.{index}", _text_layer(text, layer)) for index, layer in enumerate(text.layers)),
    )


def _text_layer(text: TextConfig, layer: LayerConfig) -> dict[str, Shape]:
    hidden, inner, ple = text.hidden_size, text.intermediate_size, text.hidden_size_per_layer_input
    queries, keys = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_feedforward_layernorm.weight": (hidden,),
        "ple_block.per_layer_input_gate.weight": (ple, hidden),
        "ple_block.per_layer_projection.weight": (hidden, ple),
        "ple_block.post_per_layer_input_norm.weight": (hidden,),
        "layer_scalar": (1,),
    }


def _vision_tensors(vision: VisionConfig, text_hidden: int) -> dict[str, Shape]:
    hidden = vision.hidden_size
    standardize = {"std_bias": (hidden,), "std_scale": (hidden,)} if vision.standardize else {}
    layer = _vision_layer(vision)
    return {
        "embed_vision.embedding_projection.weight": (text_hidden, hidden),
        **_under(
            "vision_tower",
            {
                "patch_embedder.input_proj.weight": (hidden, 3 * vision.patch_size**2),
                "patch_embedder.position_embedding_table": (2, vision.position_embedding_size, hidden),
            },
            standardize,
            *(_under(f"encoder.layers.{index}", layer) for index in range(vision.num_hidden_layers)),
        ),
    }


def _vision_layer(vision: VisionConfig) -> dict[str, Shape]:
    hidden, inner, clipped = vision.hidden_size, vision.intermediate_size, vision.use_clipped_linears
    queries, keys = vision.num_attention_heads * vision.head_dim, vision.num_key_value_heads * vision.head_dim
    return {
        "input_layernorm.weight": (hidden,),
        **_clippable("self_attn.q_proj", (queries, hidden), clipped),
        **_clippable("self_attn.k_proj", (keys, hidden), clipped),
        **_clippable("self_attn.v_proj", (keys, hidden), clipped),
        "self_attn.q_norm.weight": (vision.head_dim,),
        "self_attn.k_norm.weight": (vision.head_dim,),
        **_clippable("self_attn.o_proj", (hidden, queries), clipped),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        **_clippable("mlp.gate_proj", (inner, hidden), clipped),
        **_clippable("mlp.up_proj", (inner, hidden), clipped),
        **_clippable("mlp.down_proj", (hidden, inner), clipped),
        "post_feedforward_layernorm.weight": (hidden,),
    }


def _audio_tensors(audio: AudioConfig, text_hidden: int) -> dict[str, Shape]:
    hidden = audio.hidden_size
    first, second = audio.subsampling_conv_channels
    layer = _audio_layer(audio)
    return {
        "embed_audio.embedding_projection.weight": (text_hidden, audio.output_proj_dims),
        **_under(
            "audio_tower",
            {
                "subsample_conv_projection.layer0.conv.weight": (first, 1, 3, 3),
                "subsample_conv_projection.layer0.norm.weight": (first,),
                "subsample_conv_projection.layer1.conv.weight": (second, first, 3, 3),
                "subsample_conv_projection.layer1.norm.weight": (second,),
                # The reference writes the mel axis, a quarter of 128 bins by now, as first // 4.
                "subsample_conv_projection.input_proj_linear.weight": (hidden, first // 4 * second),
                "output_proj.weight": (audio.output_proj_dims, hidden),
                "output_proj.bias": (audio.output_proj_dims,),
            },
            *(_under(f"layers.{index}", layer) for index in range(audio.num_hidden_layers)),
        ),
    }


def _audio_layer(audio: AudioConfig) -> dict[str, Shape]:
    hidden, clipped = audio.hidden_size, audio.use_clipped_linears
    head_dim = hidden // audio.num_attention_heads
    heads = audio.num_attention_heads * head_dim
    feed_forward = {
        "pre_layer_norm.weight": (hidden,),
        **_clippable("ffw_layer_1", (4 * hidden, hidden), clipped),
        **_clippable("ffw_layer_2", (hidden, 4 * hidden), clipped),
        "post_layer_norm.weight": (hidden,),
    }
    return {
        **_under("feed_forward1", feed_forward),
        "norm_pre_attn.weight": (hidden,),
        **_clippable("self_attn.q_proj", (heads, hidden), clipped),
        **_clippable("self_attn.k_proj", (heads, hidden), clipped),
        **_clippable("self_attn.v_proj", (heads, hidden), clipped),
        "self_attn.per_dim_scale": (head_dim,),
        "self_attn.relative_k_proj.weight": (heads, hidden),
        **_clippable("self_attn.post", (hidden, hidden), clipped),
        "norm_post_attn.weight": (hidden,),
        "lconv1d.pre_layer_norm.weight": (hidden,),
        **_clippable("lconv1d.linear_start", (2 * hidden, hidden), clipped),
        "lconv1d.depthwise_conv1d.weight": (hidden, 1, audio.conv_kernel_size),
        "lconv1d.conv_norm.weight": (hidden,),
        **_clippable("lconv1d.linear_end", (hidden, hidden), clipped),
        **_under("feed_forward2", feed_forward),
        "norm_out.weight": (hidden,),
    }


def _clippable(name: str, shape: Shape, clipped: bool) -> dict[str, Shape]:
    """Gemma 4's linear layer: its weight one level down and, where it clips, four scalar limits beside it."""
    limits = ("input_min", "input_max", "output_min", "output_max") if clipped else ()
    return {f"{name}.linear.weight": shape, **{f"{name}.{limit}": () for limit in limits}}


def _under(prefix: str, *tables: Mapping[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for table in tables for name, shape in table.items()}
