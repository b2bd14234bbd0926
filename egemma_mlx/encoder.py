"""`Encoder`: texts in, numpy vectors out, under the names of sentence-transformers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from egemma_mlx import lanes, vectors
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.loading import load
from egemma_mlx.packing import pack, token_batches

# Tokens of one forward: on a GPU enough to fill it; on the CPU little, so that batches share the cores evenly.
_BATCH_TOKENS = {"gpu": 16_384, "cpu": 512}
# Seconds before a progress bar shows that was not asked for.
_BAR_DELAY = 2.0


class Encoder:
    """Embeds texts with one checkpoint.

    Calls from several threads are safe: they tokenize side by side, and take turns at the model, which runs on threads
    of its own (`egemma_mlx.lanes`).

    Args:
        path_or_hf_repo: a folder or a hub id; None: $EGEMMA_MODEL, else google/embeddinggemma-2.
        load_options: what `egemma_mlx.load` takes. (Its `precision` is of the arithmetic, that of `encode` of the
            vectors.)

    Attributes:
        model, tokenizer: as `load` returns them.
        prompts: the checkpoint's prompts by name.
    """

    def __init__(self, path_or_hf_repo: str | Path | None = None, **load_options: Any) -> None:
        self.model, self.tokenizer = load(path_or_hf_repo, **load_options)

    @property
    def prompts(self) -> Any:
        return self.tokenizer.prompts

    def get_embedding_dimension(self) -> int:
        """Width of a vector before any truncation."""
        return self.model.config.text.embedding_dim

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        batch_tokens: int | None = None,
        normalize_embeddings: bool = True,
        truncate_dim: int | None = None,
        precision: vectors.Precision = "float32",
        convert_to_numpy: bool = True,
        max_length: int | None = None,
        truncation: bool = False,
    ) -> Any:
        """Embed one text or several.

        Args:
            sentences: a text → [D], or a sequence of texts → [N, D].
            prompt_name: a name of `prompts`, put before every text; default: the checkpoint's default prompt.
            prompt: the prompt itself; wins over `prompt_name`.
            batch_size: most texts of one forward.
            batch_tokens: most tokens of one forward. Memory goes with it; texts are sorted by length first.
            show_progress_bar: None: on a terminal, once the work has taken two seconds.
            normalize_embeddings: unit vectors; False: as pooled and projected.
            truncate_dim: keep the first so many components (768, 512, 256 and 128 were trained for) and normalise
                again.
            precision: "float32", or quantised as `vectors.quantize` says.
            convert_to_numpy: False: an `mx.array`.
            max_length, truncation: cut texts to so many tokens, EOS kept; without `truncation` a text longer than
                the model's limit is an error.

        Returns:
            [N, D] (or [D] for one text) in the caller's order; (0, D) for no texts.

        Raises:
            EgemmaError: a text or an option that does not fit.
        """
        vectors.check(self.get_embedding_dimension(), truncate_dim, precision)
        single = isinstance(sentences, str)
        prefix = self.tokenizer.prompt(prompt_name, prompt)
        texts = [sentences] if isinstance(sentences, str) else sentences
        ids, truncated = self.tokenizer.ids(texts, prompt=prefix, max_length=max_length, truncation=truncation)
        if truncated:
            warnings.warn(
                f"{truncated} of {len(ids)} texts cut to {max_length or self.tokenizer.max_length} tokens", stacklevel=2
            )
        budget = _positive(batch_tokens, "batch_tokens") or default_batch_tokens()
        size, apart = _positive(batch_size, "batch_size"), self.model.kernels.apart
        batches = list(token_batches([len(x) for x in ids], budget, size, apart=apart))
        pooled = np.zeros((len(ids), self.get_embedding_dimension()), np.float32)

        def run(batch: list[int]) -> tuple[list[int], NDArray[np.float32]]:
            return batch, np.array(self.model.pooled(pack([ids[i] for i in batch])))

        with _bar(len(ids), show_progress_bar) as bar:
            for batch, rows in lanes.run(run, batches):
                pooled[batch] = rows
                bar.update(len(batch))
        out = vectors.truncate(pooled, truncate_dim)
        if normalize_embeddings:
            out = vectors.normalize(out)
        quantized = vectors.quantize(out, precision)
        result = quantized[0] if single else quantized
        return result if convert_to_numpy else mx.array(result)

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the checkpoint's "query" prompt, unless a prompt is given."""
        return self._encode_as("query", sentences, options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """`encode` with the checkpoint's "document" prompt, unless a prompt is given.

        For documents with titles, pass `tokenizer.document(text, title)` with `prompt=""`.
        """
        return self._encode_as("document", sentences, options)

    def similarity(self, a: Any, b: Any) -> NDArray[np.float32]:
        """Cosine similarities [N, M] of vectors [N, D] and [M, D]."""
        return vectors.similarity(a, b)

    def _encode_as(self, role: str, sentences: str | Sequence[str], options: dict[str, Any]) -> Any:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options = {**options, "prompt": self.prompts.get(role, "")}
        return self.encode(sentences, **options)


def default_batch_tokens() -> int:
    """Most tokens of one forward where the caller does not say."""
    return _BATCH_TOKENS["cpu" if on_cpu() else "gpu"]


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise EgemmaError(f"expected {name} to be a positive integer but got {value!r}")
    return value


def _bar(total: int, show: bool | None) -> tqdm[Any]:
    quiet = not sys.stderr.isatty() if show is None else not show
    return tqdm(total=total, unit="text", delay=_BAR_DELAY if show is None else 0.0, disable=quiet)
