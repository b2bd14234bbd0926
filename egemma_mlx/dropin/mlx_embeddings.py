"""`mlx_embeddings.models.embedding_gemma2`, as `register("mlx_embeddings")` provides it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from egemma_mlx import checkpoint
from egemma_mlx.config import Config, read_json_object
from egemma_mlx.dropin.model import Model
from egemma_mlx.errors import EgemmaError
from egemma_mlx.media.image import ImageProcessor, ImageSource, Patches
from egemma_mlx.tokenizer import IMAGE_TOKEN, BatchEncoding, Padding, Tensors, Tokenizer, right_padded

__all__ = ["Model", "ModelArgs", "Processor"]

ModelArgs = Config


class Processor:
    """Texts and images → what the model is called with.

    Attributes:
        tokenizer: the checkpoint's; its other names (`encode`, `decode`, `prompts`, `mask_token_id`, …) are the
            processor's too.
        image_processor: the checkpoint's; None where it has no vision tower.
    """

    def __init__(self, tokenizer: Tokenizer, image_processor: ImageProcessor | None) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor

    @classmethod
    def from_pretrained(cls, path_or_hf_repo: str | Path, *, trust_remote_code: bool = False) -> Processor:
        """The processor of a checkpoint folder or hub id.

        Args:
            trust_remote_code: ignored: no code of a checkpoint is ever run.

        Raises:
            EgemmaError: a file is missing or not what it should be.
        """
        folder = checkpoint.resolve(path_or_hf_repo)
        path = folder / "config.json"
        config = Config.from_dict(read_json_object(path), str(path))
        images = None if config.vision is None else ImageProcessor.from_folder(folder, config.vision)
        return cls(Tokenizer.from_folder(folder, config), images)

    def __getattr__(self, name: str) -> Any:
        if name in ("tokenizer", "image_processor"):  # being unpickled
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        images: ImageSource | Sequence[ImageSource] | None = None,
        *,
        padding: Padding = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
    ) -> BatchEncoding:
        """Texts alone, or texts with images in them; no prompt is added.

        Args:
            text: one or several, with `<|image|>` where an image goes. None: each image alone.
            images: of all texts, in order.
            padding, return_tensors: as `Tokenizer.batch_encode_plus` has them; with images the batch is always padded
                to its longest, and always of arrays (numpy's without `return_tensors`).
            truncation, max_length: cut to `max_length` tokens, or to the model's limit where that is less. Without
                `truncation` the model's limit alone counts.

        Returns:
            `input_ids` and `attention_mask` [B, L]; with images also `pixel_values` [images, patches, 3·patch²] float32
            and `image_position_ids` [images, patches, 2] int32, −1 for padding.

        Raises:
            EgemmaError: whatever the tokenizer or the image processor refuses; other counts of images and `<|image|>`.
        """
        tokenizer = self.tokenizer
        longest = tokenizer.max_length
        limit = (longest if max_length is None else min(max_length, longest)) if truncation else None
        if images is None:
            if text is None:
                raise EgemmaError("[processor] expected text or images but got neither")
            length = limit or (max_length if padding == "max_length" else None)
            return tokenizer(
                text, padding=padding, truncation=truncation, max_length=length, return_tensors=return_tensors
            )
        if self.image_processor is None:
            raise EgemmaError("[processor] expected no images: the checkpoint has no vision tower")
        sources: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
        texts = [IMAGE_TOKEN] * len(sources) if text is None else [text] if isinstance(text, str) else list(text)
        patches = [self.image_processor(source) for source in sources]
        counts = _by_text(texts, [len(image.pixels) // self.image_processor.pooling**2 for image in patches])
        ids = tokenizer.ids(texts, max_length=limit, truncation=truncation, images=counts).ids
        arrays = {**_padded_ids(ids, tokenizer.pad_token_id), **_padded_patches(patches)}
        return BatchEncoding({name: mx.array(a) if return_tensors == "mlx" else a for name, a in arrays.items()})

    def batch_encode_plus(self, texts: Sequence[str], **options: Any) -> BatchEncoding:
        """A call with texts alone."""
        return self(texts, **options)


def _by_text(texts: Sequence[str], counts: Sequence[int]) -> list[list[int]]:
    """The soft tokens of each text's images, which are counted in order."""
    places = [text.count(IMAGE_TOKEN) for text in texts]
    if sum(places) != len(counts):
        raise EgemmaError(
            f"[processor] expected one image for each {IMAGE_TOKEN} but got {len(counts)} images and {sum(places)} "
            f"{IMAGE_TOKEN} in {len(texts)} texts"
        )
    left = iter(counts)
    return [[next(left) for _ in range(n)] for n in places]


def _padded_ids(rows: Sequence[np.ndarray], pad: int) -> dict[str, np.ndarray]:
    width = max(map(len, rows))
    return {
        "input_ids": np.stack([right_padded(row, width, pad) for row in rows]),
        "attention_mask": np.stack([right_padded(np.ones_like(row), width, 0) for row in rows]),
    }


def _padded_patches(images: Sequence[Patches]) -> dict[str, np.ndarray]:
    most = max(len(image.pixels) for image in images)
    padding = [((0, most - len(image.pixels)), (0, 0)) for image in images]
    return {
        "pixel_values": np.stack([np.pad(image.pixels, pad) for image, pad in zip(images, padding, strict=True)]),
        "image_position_ids": np.stack(
            [np.pad(image.positions, pad, constant_values=-1) for image, pad in zip(images, padding, strict=True)]
        ),
    }
