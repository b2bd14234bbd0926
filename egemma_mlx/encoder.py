"""`Encoder`: texts and images in, numpy vectors out, under the names of sentence-transformers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from egemma_mlx import checkpoint, lanes, vectors
from egemma_mlx.errors import EgemmaError
from egemma_mlx.inputs import is_single, read
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.loading import load
from egemma_mlx.media.decoding import Decoder
from egemma_mlx.media.image import ImageProcessor
from egemma_mlx.packing import pack, token_batches

if TYPE_CHECKING:
    from egemma_mlx.inputs import AnyInput

OnError = Literal["raise", "skip"]

# Tokens of one forward: on a GPU enough to fill it; on the CPU little, so that batches share the cores evenly.
_BATCH_TOKENS = {"gpu": 16_384, "cpu": 512}
# Seconds before a progress bar shows that was not asked for.
_BAR_DELAY = 2.0


class Embedded(NamedTuple):
    """What `Encoder.encode` returns with `on_error="skip"`.

    Attributes:
        vectors: [M, D], of the inputs whose images could be read, in the caller's order.
        indices: [M] int64, which inputs those are.
        errors: why the others could not, by index.
    """

    vectors: Any
    indices: NDArray[np.int64]
    errors: dict[int, EgemmaError]


class Encoder:
    """Embeds texts and images with one checkpoint.

    Calls from several threads are safe: they tokenize and decode side by side, and take turns at the model, which runs
    on threads of its own (`egemma_mlx.lanes`).

    Args:
        path_or_hf_repo: a folder, a hub id or "mini"; None: as `egemma_mlx.load` has it.
        revision: of the hub repository.
        load_options: what else `egemma_mlx.load` takes: `modalities=("text", "image")` for images. (Its `precision` is
            of the arithmetic, that of `encode` of the vectors.)

    Attributes:
        model, tokenizer: as `load` returns them.
        image_processor: of the checkpoint; None without the image modality.
        prompts: the checkpoint's prompts by name.
    """

    def __init__(
        self, path_or_hf_repo: str | Path | None = None, *, revision: str | None = None, **load_options: Any
    ) -> None:
        folder = checkpoint.resolve(path_or_hf_repo, revision)
        self.model, self.tokenizer = load(folder, **load_options)
        self.image_processor: ImageProcessor | None = None
        if self.model.vision_tower is not None:
            self.image_processor = ImageProcessor.from_folder(folder, self.model.vision_tower.config)

    @property
    def prompts(self) -> Any:
        return self.tokenizer.prompts

    def get_embedding_dimension(self) -> int:
        """Width of a vector before any truncation."""
        return self.model.config.text.embedding_dim

    def encode(
        self,
        inputs: AnyInput | Sequence[AnyInput],
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
        max_soft_tokens: int | None = None,
        on_error: OnError = "raise",
    ) -> Any:
        """Embed one input or several.

        An input is a text; with the image modality also an image (a path, the bytes of a file, a PIL image or an array
        of uint8 [height, width, 3]); or a dict of `text` and `image`, one or a list each, that is embedded as one, its
        parts in order. With the image modality a string is an image where it is the name of an existing image file or
        a data URI; a dict says which it is. Images are decoded batch by batch.

        Args:
            inputs: an input → [D], or a sequence of inputs → [N, D].
            prompt_name: a name of `prompts`, put before every input; default: the checkpoint's default prompt.
            prompt: the prompt itself; wins over `prompt_name`.
            batch_size: most inputs of one forward.
            batch_tokens: most tokens of one forward, an image's soft tokens among them. Memory goes with it; inputs
                are sorted by length first.
            show_progress_bar: None: on a terminal, once the work has taken two seconds.
            normalize_embeddings: unit vectors; False: as pooled and projected.
            truncate_dim: keep the first so many components (768, 512, 256 and 128 were trained for) and normalise
                again.
            precision: "float32", or quantised as `vectors.quantize` says.
            convert_to_numpy: False: an `mx.array`.
            max_length, truncation: cut inputs to so many tokens, EOS kept; without `truncation` an input longer than
                the model's limit is an error, and so are images that a cut would reach.
            max_soft_tokens: most soft tokens of an image, one of 70, 140, 280, 560 and 1120: its resolution. Default:
                the checkpoint's, 280.
            on_error: "skip": leave out inputs whose images cannot be read, and return an `Embedded`.

        Returns:
            [N, D] (or [D] for one input) in the caller's order; (0, D) for no inputs. With `on_error="skip"` an
            `Embedded`, for one input too.

        Raises:
            EgemmaError: an input, by its index, or an option that does not fit.
        """
        vectors.check(self.get_embedding_dimension(), truncate_dim, precision)
        if on_error not in get_args(OnError):
            raise EgemmaError(f"expected on_error 'raise' or 'skip' but got {on_error!r}")
        processor = self._image_processor(max_soft_tokens)
        prefix = self.tokenizer.prompt(prompt_name, prompt)
        single = is_single(inputs)
        items = read([inputs] if single else inputs, images=processor is not None)

        with Decoder(processor, [item.images for item in items], skip=on_error == "skip") as images:
            ids, truncated = self.tokenizer.ids(
                # What is left out keeps its place, so that errors name the caller's index.
                ["" if index in images.errors else item.text for index, item in enumerate(items)],
                prompt=prefix,
                max_length=max_length,
                truncation=truncation,
                images=images.soft_tokens if processor else None,
            )
            if truncated:
                kind, length = "inputs" if processor else "texts", max_length or self.tokenizer.max_length
                warnings.warn(f"{truncated} of {len(ids)} {kind} cut to {length} tokens", stacklevel=2)
            pooled = self._pooled(ids, images, batch_tokens, batch_size, show_progress_bar)
        kept = np.array([index for index in range(len(items)) if index not in images.errors], np.int64)
        out = vectors.truncate(pooled[kept] if images.errors else pooled, truncate_dim)
        if normalize_embeddings:
            out = vectors.normalize(out)
        quantized = vectors.quantize(out, precision)
        result = quantized if convert_to_numpy else mx.array(quantized)
        if on_error == "skip":
            return Embedded(result, kept, dict(sorted(images.errors.items())))
        return result[0] if single else result

    def _pooled(
        self,
        ids: Sequence[NDArray[np.int32]],
        images: Decoder,
        batch_tokens: int | None,
        batch_size: int | None,
        show_progress_bar: bool | None,
    ) -> NDArray[np.float32]:
        """[N, D] as pooled and projected; zeros where an image could not be read."""
        readable = [index for index in range(len(ids)) if index not in images.errors]
        batches = [
            [readable[i] for i in batch]
            for batch in token_batches(
                [len(ids[index]) for index in readable],
                _positive(batch_tokens, "batch_tokens") or default_batch_tokens(),
                _positive(batch_size, "batch_size"),
                apart=self.model.kernels.apart,
            )
        ]
        images.schedule(batches)
        pooled = np.zeros((len(ids), self.get_embedding_dimension()), np.float32)

        def run(number: int) -> int:
            batch, patches = images.take(number)
            if batch:
                soft = self.model.embed_images(patches) if patches else None
                pooled[batch] = np.array(self.model.pooled(pack([ids[index] for index in batch]), soft))
            return len(batches[number])

        with _bar(len(ids), show_progress_bar) as bar:
            bar.update(len(ids) - len(readable))
            for done in lanes.run(run, range(len(batches))):
                bar.update(done)
        return pooled

    def encode_query(self, inputs: AnyInput | Sequence[AnyInput], **options: Any) -> Any:
        """`encode` with the checkpoint's "query" prompt, unless a prompt is given."""
        return self._encode_as("query", inputs, options)

    def encode_document(self, inputs: AnyInput | Sequence[AnyInput], **options: Any) -> Any:
        """`encode` with the checkpoint's "document" prompt, unless a prompt is given.

        For documents with titles, pass `tokenizer.document(text, title)` with `prompt=""`.
        """
        return self._encode_as("document", inputs, options)

    def similarity(self, a: Any, b: Any) -> NDArray[np.float32]:
        """Cosine similarities [N, M] of vectors [N, D] and [M, D]."""
        return vectors.similarity(a, b)

    def _encode_as(self, role: str, inputs: AnyInput | Sequence[AnyInput], options: dict[str, Any]) -> Any:
        if options.get("prompt") is None and options.get("prompt_name") is None:
            options = {**options, "prompt": self.prompts.get(role, "")}
        return self.encode(inputs, **options)

    def _image_processor(self, max_soft_tokens: int | None) -> ImageProcessor | None:
        """The checkpoint's, or one of another budget."""
        if max_soft_tokens is None or self.image_processor is None:
            if max_soft_tokens is not None:
                raise EgemmaError('max_soft_tokens is about images: load with modalities=("text", "image")')
            return self.image_processor
        return self.image_processor.with_budget(max_soft_tokens)


def default_batch_tokens() -> int:
    """Most tokens of one forward where the caller does not say."""
    return _BATCH_TOKENS["cpu" if on_cpu() else "gpu"]


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise EgemmaError(f"expected {name} to be a positive integer but got {value!r}")
    return value


def _bar(total: int, show: bool | None) -> tqdm[Any]:
    quiet = not sys.stderr.isatty() if show is None else not show
    return tqdm(total=total, unit="input", delay=_BAR_DELAY if show is None else 0.0, disable=quiet)
