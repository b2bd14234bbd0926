"""Images as transformers' processor hands them to a model: padded, all inputs' in one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from egemma_mlx.config import VisionConfig
from egemma_mlx.errors import EgemmaError
from egemma_mlx.media.image import Patches


def unpadded(pixel_values: Any, image_position_ids: Any, vision: VisionConfig) -> list[Patches]:
    """The patches of each image, those at −1 left out.

    Args:
        pixel_values: [images, max_patches, 3·patch²] in 0…1.
        image_position_ids: [images, max_patches, 2] integer (x, y).

    Raises:
        EgemmaError: one without the other, shapes or a dtype that do not fit, patches that do not make whole soft
            tokens or lie outside the position table.
    """
    if pixel_values is None or image_position_ids is None:
        missing, given = "image_position_ids", "pixel_values"
        if pixel_values is None:
            missing, given = given, missing
        raise EgemmaError(f"[model] expected {missing} beside {given} but got None")
    pixels = _array(pixel_values, "pixel_values")
    positions = _array(image_position_ids, "image_position_ids")
    width = 3 * vision.patch_size**2
    if pixels.ndim != 3 or pixels.shape[2] != width:
        raise EgemmaError(f"[model] expected pixel_values of shape [images, patches, {width}] but got {pixels.shape}")
    if positions.shape != (*pixels.shape[:2], 2) or positions.dtype.kind not in "iu":
        raise EgemmaError(
            f"[model] expected image_position_ids of shape {(*pixels.shape[:2], 2)} and an integer dtype "
            f"but got {positions.dtype} of shape {positions.shape}"
        )
    valid = (positions != -1).all(axis=2)
    return [
        _checked(Patches(patches[keep].astype(np.float32), places[keep].astype(np.int32)), index, vision)
        for index, (patches, places, keep) in enumerate(zip(pixels, positions, valid, strict=True))
    ]


def check_placeholders(placeholders: Sequence[int], soft_tokens: Sequence[int]) -> None:
    """That the images, in order, fill the placeholders of one input after the other.

    Args:
        placeholders: of each input.
        soft_tokens: of each image.

    Raises:
        EgemmaError: with the first input that has another count than the images left for it, or with the images left
            over.
    """
    image = 0
    for index, wanted in enumerate(placeholders):
        first, got = image, 0
        while got < wanted and image < len(soft_tokens):
            got += soft_tokens[image]
            image += 1
        if got != wanted:
            raise EgemmaError(
                f"[model] input {index} has {wanted} image placeholders but the next images "
                f"({_list(soft_tokens[first:image])} soft tokens) have {got}"
            )
    if image < len(soft_tokens):
        raise EgemmaError(
            f"[model] {len(placeholders)} inputs have {sum(placeholders)} image placeholders in all, none for the last "
            f"{len(soft_tokens) - image} of {len(soft_tokens)} images ({_list(soft_tokens[image:])} soft tokens)"
        )


def _list(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts)) or "0"


def _array(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, mx.array):
        value = value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise EgemmaError(f"[model] expected {name} to be an array but got rows of different lengths") from None
    if array.dtype.kind not in "iuf":
        raise EgemmaError(f"[model] expected {name} to be an array of numbers but got {array.dtype}")
    return array


def _checked(image: Patches, index: int, vision: VisionConfig) -> Patches:
    count, size = len(image.pixels), vision.pooling_kernel_size**2
    if count == 0 or count % size:
        raise EgemmaError(f"[model] image {index}: expected a multiple of {size} patches but got {count}")
    if image.positions.min() < 0 or image.positions.max() >= vision.position_embedding_size:
        raise EgemmaError(
            f"[model] image {index}: expected image_position_ids in 0…{vision.position_embedding_size - 1} "
            f"but got {image.positions.min()}…{image.positions.max()}"
        )
    return image
