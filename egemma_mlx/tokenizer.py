"""Text to token ids and back on the `tokenizers` library alone, with the checkpoint's prompt table.

`Tokenizer.ids` is what this package itself calls. `tokenizer(...)`, `encode`, `batch_encode_plus` and `decode` are
the calls that pipelines written for transformers or mlx-embeddings make; they go through the same path.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
import tokenizers
from numpy.typing import NDArray

from egemma_mlx.config import Config, read_json_object
from egemma_mlx.errors import EgemmaError

Padding = Literal[False, True, "longest", "max_length"]
Tensors = Literal["mlx", "np"]

# Nothing shorter holds BOS and EOS.
_MIN_LENGTH = 2
_MASK_TOKEN = "<mask>"

IMAGE_TOKEN = "<|image|>"
"""What stands for an image in a text; in ids, for each of its soft tokens, between `_IMAGE_BEGIN` and `_IMAGE_END`."""
_IMAGE_BEGIN, _IMAGE_END = "<|image>", "<image|>"


class Encoded(NamedTuple):
    """`ids`: one int32 array [L] a text, from BOS to EOS. `truncated`: how many of the texts were cut."""

    ids: list[NDArray[np.int32]]
    truncated: int


class BatchEncoding(dict[str, Any]):
    """`input_ids` and `attention_mask` as a dict, for `model(**inputs)`, that also answers `inputs.input_ids`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """The checkpoint's tokenizer and prompt table; no call changes it, so threads may share one.

    Attributes:
        max_length: the longest sequence of ids, with BOS and EOS, that the model accepts.
        vocab_size: number of tokens; `len(tokenizer)` is the same. Their ids need not be dense.
        default_prompt_name: the prompt used when none is asked for, or None.
        bos_token_id, eos_token_id, pad_token_id, mask_token_id: their literals are `bos_token`, ….
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Config,
        prompts: Mapping[str, str],
        default_prompt_name: str | None,
    ) -> None:
        self._backend = backend
        self._prompts = dict(prompts)
        self._placeholders = {i: literal for i in config.placeholder_ids if (literal := backend.id_to_token(i))}
        self._image_id = config.image_token_id
        self._image_ends = backend.token_to_id(_IMAGE_BEGIN), backend.token_to_id(_IMAGE_END)
        self.default_prompt_name = default_prompt_name
        self.max_length = config.text.max_tokens
        self.vocab_size: int = backend.get_vocab_size()
        self.bos_token_id, self.bos_token = config.text.bos_token_id, backend.id_to_token(config.text.bos_token_id)
        self.eos_token_id, self.eos_token = config.text.eos_token_id, backend.id_to_token(config.text.eos_token_id)
        self.pad_token_id, self.pad_token = config.text.pad_token_id, backend.id_to_token(config.text.pad_token_id)
        self.mask_token_id, self.mask_token = backend.token_to_id(_MASK_TOKEN), _MASK_TOKEN

    @classmethod
    def from_folder(cls, folder: str | Path, config: Config) -> Tokenizer:
        """Read `tokenizer.json` and, where there is one, `config_sentence_transformers.json`.

        Raises:
            EgemmaError: a file is missing or broken, has more ids than the model has embeddings, does not put
                BOS before and EOS behind a text, or names a default prompt that its table lacks.
        """
        backend = _read_backend(Path(folder) / "tokenizer.json", config)
        prompts, default_prompt_name = _read_prompts(Path(folder) / "config_sentence_transformers.json")
        return cls(backend, config, prompts, default_prompt_name)

    def __len__(self) -> int:
        return self.vocab_size

    # Prompts

    @property
    def prompts(self) -> Mapping[str, str]:
        """The checkpoint's prompts by name, read-only; empty when it was saved without any."""
        return MappingProxyType(self._prompts)

    def prompt(self, prompt_name: str | None = None, prompt: str | None = None) -> str:
        """The text to put before each input, chosen as sentence-transformers does.

        `prompt` wins, "" included, over `prompt_name` (with a warning when both are given), which wins over
        `default_prompt_name`; with none of the three it is "".

        Raises:
            EgemmaError: `prompt_name` is not in the table; the message lists the names.
        """
        if prompt is not None:
            if prompt_name is not None:
                warnings.warn(f"prompt_name {prompt_name!r} is ignored: prompt was given too", stacklevel=2)
            return _checked(prompt, "prompt")
        name = self.default_prompt_name if prompt_name is None else prompt_name
        if name is None:
            return ""
        if name not in self._prompts:
            names = ", ".join(self._prompts) or "none, the checkpoint has no prompt table"
            raise EgemmaError(f"unknown prompt name {name!r}; the names are: {names}")
        return self._prompts[name]

    @staticmethod
    def document(text: str, title: str | None = None) -> str:
        """`title: {title} | text: {text}`, the document prompt with a title; an absent or empty one is `none`."""
        return f"title: {_checked(title or 'none', 'title')} | text: {_checked(text, 'text')}"

    # Ids

    def ids(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        max_length: int | None = None,
        truncation: bool = False,
        images: Sequence[Sequence[int]] | None = None,
    ) -> Encoded:
        """The ids of `prompt + text` for each text, in order.

        Args:
            texts: any number of texts; "" gives [BOS, EOS].
            prompt: what `Tokenizer.prompt` returned.
            max_length: most ids a text may have, BOS and EOS included; None is the model's own limit.
            truncation: cut longer texts to `max_length`, EOS kept, instead of refusing them.
            images: for each text the soft tokens of its images, which go where its `IMAGE_TOKEN`s are.

        Raises:
            EgemmaError: a text that is not a str or holds a lone surrogate, a text with more or fewer placeholders
                than media (the rows of the input would be overwritten by media that did not come), a text longer
                than `max_length` without `truncation`, or whose images reach beyond it, a `max_length` out of range.
        """
        limit = self._limit(max_length)
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
            raise EgemmaError(f"expected a sequence of texts but got {type(texts).__name__}")
        prompt = _checked(prompt, "prompt")
        kind = "text" if images is None else "input"
        strings = [prompt + _checked(text, f"{kind} {index}") for index, text in enumerate(texts)]
        kind = f"prompt + {kind}" if prompt else kind
        rows, truncated = [], 0
        for index, encoding in enumerate(self._backend.encode_batch_fast(strings)):
            name, counts = f"{kind} {index}", images[index] if images is not None else ()
            ids = self._with_images(encoding.ids, counts, name)
            if len(ids) > limit:
                if not truncation:
                    raise EgemmaError(
                        f"{name} has {len(ids)} tokens where {limit} are allowed: "
                        f"shorten it, or pass truncation=True to have it cut"
                    )
                ids = self._cut(ids, limit, name)
                truncated += 1
            rows.append(np.array(ids, dtype=np.int32))
        return Encoded(rows, truncated)

    def _with_images(self, ids: list[int], counts: Sequence[int], name: str) -> list[int]:
        """Each image's placeholder as its beginning, a placeholder for each soft token, its end."""
        # Ids, not the string: how a literal is matched is the tokenizer's business.
        found = [] if self._placeholders.keys().isdisjoint(ids) else [i for i in ids if i in self._placeholders]
        strange = [i for i in found if i != self._image_id] if counts else found
        if strange:
            literal = self._placeholders[strange[0]]
            raise EgemmaError(f"{name} contains {literal!r}, which stands for media, but no media came with it")
        if len(found) != len(counts):
            raise EgemmaError(f"{name} has {len(found)} {IMAGE_TOKEN!r} but {len(counts)} images came with it")
        if not found:
            return ids
        begin, end = self._image_ends
        if begin is None or end is None:
            raise EgemmaError(f"{name} has images, but the tokenizer has no {_IMAGE_BEGIN!r} and {_IMAGE_END!r}")
        soft = iter(counts)
        parts = ([begin, *[i] * next(soft), end] if i == self._image_id else [i] for i in ids)
        return [i for part in parts for i in part]

    def _cut(self, ids: list[int], limit: int, name: str) -> list[int]:
        """The first `limit` ids, EOS last."""
        if self._image_id in ids[limit - 2 :]:  # a soft token, or the end of its image, would go
            raise EgemmaError(
                f"{name} has images that reach beyond {limit} tokens: expected fewer, or a smaller max_soft_tokens"
            )
        return [*ids[: limit - 1], self.eos_token_id]

    def _limit(self, max_length: int | None) -> int:
        if max_length is None:
            return self.max_length
        if not isinstance(max_length, (int, np.integer)) or not _MIN_LENGTH <= max_length <= self.max_length:
            raise EgemmaError(
                f"expected max_length from {_MIN_LENGTH} (BOS and EOS) to {self.max_length} (the model's limit) "
                f"but got {max_length!r}"
            )
        return int(max_length)

    # The calls of transformers and mlx-embeddings

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: Padding = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
    ) -> BatchEncoding:
        """`batch_encode_plus`, which also takes one str: flat lists, or tensors with B = 1."""
        return self._batch(text, padding, truncation, max_length, return_tensors)

    def batch_encode_plus(
        self,
        texts: Sequence[str],
        *,
        padding: Padding = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
    ) -> BatchEncoding:
        """`input_ids` and `attention_mask` of `texts`, as lists or as int32 arrays [B, L].

        Args:
            texts: the texts, prompts included: none is added here.
            padding: fill up with `pad_token_id` on the right, to the longest text (True or "longest") or to
                `max_length` ("max_length").
            truncation: cut to `max_length`, EOS kept, with one warning that says how many texts were cut.
            max_length: as in `ids`, None is the model's own limit.
            return_tensors: "mlx" for `mx.array`, "np" for numpy, None for lists of int.

        Raises:
            EgemmaError: whatever `ids` refuses, an unknown option, tensors asked of no text or of texts of
                different lengths without padding.
        """
        if isinstance(texts, str):
            raise EgemmaError("expected a sequence of texts but got str")
        return self._batch(texts, padding, truncation, max_length, return_tensors)

    def encode(
        self,
        text: str,
        *,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
    ) -> Any:
        """The ids of one text: a list of int, or an int32 array [1, L] in the library `return_tensors` names."""
        return self._batch(_checked(text, "text"), False, truncation, max_length, return_tensors)["input_ids"]

    def _batch(
        self,
        text: str | Sequence[str],
        padding: Padding,
        truncation: bool,
        max_length: int | None,
        return_tensors: Tensors | None,
    ) -> BatchEncoding:
        _check_option("padding", padding, (False, True, "longest", "max_length"))
        _check_option("truncation", truncation, (False, True))
        _check_option("return_tensors", return_tensors, (None, "mlx", "np"))
        limit, single = self._limit(max_length), isinstance(text, str)
        rows, truncated = self.ids([text] if isinstance(text, str) else text, max_length=limit, truncation=truncation)
        if truncated:
            # Level 3 is whoever called the public method.
            warnings.warn(f"{truncated} of {len(rows)} texts cut to {limit} tokens", stacklevel=3)
        masks = [np.ones_like(row) for row in rows]
        if padding:
            width = limit if padding == "max_length" else max(map(len, rows), default=0)
            rows = [right_padded(row, width, self.pad_token_id) for row in rows]
            masks = [right_padded(mask, width, 0) for mask in masks]
        if return_tensors is not None:
            return BatchEncoding(
                input_ids=_stacked(rows, return_tensors), attention_mask=_stacked(masks, return_tensors)
            )
        lists = {"input_ids": [row.tolist() for row in rows], "attention_mask": [mask.tolist() for mask in masks]}
        return BatchEncoding({key: value[0] for key, value in lists.items()} if single else lists)

    # Back to text

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of one id or of a flat sequence of ids (list, numpy or MLX array).

        Raises:
            EgemmaError: anything but ids of the vocabulary in at most one dimension.
        """
        return str(self._backend.decode(self._known(token_ids), skip_special_tokens=skip_special_tokens))

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each element: rows of ids, or single ids."""
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The vocabulary's own spelling of one id (str) or of a flat sequence of ids (list of str)."""
        tokens = [self._backend.id_to_token(i) for i in self._known(ids)]
        return tokens if np.ndim(ids) else tokens[0]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of one token of the vocabulary (int) or of several (list of int); EgemmaError for any other text."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._backend.token_to_id(tokens)
        if found is None:
            raise EgemmaError(f"{tokens!r} is not a token of the vocabulary")
        return found

    def _known(self, token_ids: Any) -> list[int]:
        try:
            ids = np.asarray(token_ids)
        except ValueError:
            raise EgemmaError("expected one flat sequence of token ids but got rows of different lengths") from None
        if ids.ndim > 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise EgemmaError(f"expected one flat sequence of token ids but got {ids.dtype} of shape {ids.shape}")
        flat: list[int] = ids.reshape(-1).tolist()
        # The library's ids are u32, and it decodes unknown ones to nothing at all.
        unknown = [i for i in flat if not 0 <= i < 2**32 or self._backend.id_to_token(i) is None]
        if unknown:
            raise EgemmaError(f"no token of the vocabulary has the id {unknown[0]}")
        return flat


def _read_backend(path: Path, config: Config) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise EgemmaError(f"{path}: no such file")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise EgemmaError(f"{path}: the tokenizers library cannot read it ({error})") from None
    # The file may carry settings for both, and the library would then cut texts without a word.
    backend.no_truncation()
    backend.no_padding()
    text = config.text
    # Ids need not be dense: n of them reach n - 1 at least, and special tokens may lie further out.
    last = max([backend.get_vocab_size() - 1, *backend.get_added_tokens_decoder()])
    if last >= text.vocab_size:
        raise EgemmaError(f"{path}: expected ids below {text.vocab_size} (the model's vocab_size) but got {last}")
    empty = backend.encode("").ids
    if empty[:1] != [text.bos_token_id] or empty[-1:] != [text.eos_token_id]:
        raise EgemmaError(
            f"{path}: expected a post-processor that puts {text.bos_token_id} (BOS) before and "
            f"{text.eos_token_id} (EOS) behind a text but the ids of an empty text are {empty}"
        )
    return backend


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    if not path.exists():
        return {}, None
    raw = read_json_object(path)
    table, default = raw.get("prompts") or {}, raw.get("default_prompt_name")
    if not isinstance(table, dict) or any(not isinstance(prompt, (str, type(None))) for prompt in table.values()):
        raise EgemmaError(f"{path}: expected prompts to map names to texts but got {table!r}")
    if default not in [None, *table]:
        raise EgemmaError(f"{path}: expected default_prompt_name to be one of {list(table)} but got {default!r}")
    return {name: prompt or "" for name, prompt in table.items()}, default


def right_padded(row: NDArray[np.int32], width: int, value: int) -> NDArray[np.int32]:
    """`row` and as many of `value` as make it `width` long."""
    padded = np.full(width, value, dtype=np.int32)
    padded[: len(row)] = row
    return padded


def _stacked(rows: list[NDArray[np.int32]], return_tensors: Tensors) -> Any:
    lengths = {len(row) for row in rows}
    if not lengths:
        raise EgemmaError(f"expected at least one text for return_tensors={return_tensors!r} but got none")
    if len(lengths) > 1:
        raise EgemmaError(f"texts of {min(lengths)} to {max(lengths)} tokens do not make one array: pass padding=True")
    array = np.stack(rows)
    return mx.array(array) if return_tensors == "mlx" else array


def _checked(text: str, name: str) -> str:
    if not isinstance(text, str):
        raise EgemmaError(f"{name}: expected str but got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EgemmaError(
            f"{name}: expected Unicode text but got a lone surrogate {text[error.start]!r} at character {error.start}"
        ) from None
    return text


def _check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise EgemmaError(f"expected {name} to be one of {list(allowed)} but got {value!r}")
