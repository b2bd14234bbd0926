"""What a caller's input is: a text, an image, or a dict of both.

The rules are those of sentence-transformers 6.2 and the checkpoint's chat template: parts in the order of the dict, no
space between them; a string is an image where it names one and the model takes images, and else a text.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from egemma_mlx.documents import IMAGE_SUFFIXES
from egemma_mlx.errors import EgemmaError
from egemma_mlx.tokenizer import IMAGE_TOKEN

if TYPE_CHECKING:
    from egemma_mlx.media.image import ImageSource

    AnyInput = ImageSource | Mapping[str, Any]
    """A text, an image, or a dict of `text` and `image`, one or a list each."""

_KEYS = ("text", "image")
_LATER = ("audio", "video")


class Input(NamedTuple):
    """`text` has one `<|image|>` where each of `images` goes."""

    text: str
    images: tuple[ImageSource, ...] = ()


def is_single(inputs: Any) -> bool:
    """Whether `inputs` is one input, not several: a text, an image, a dict."""
    return isinstance(inputs, (str, Mapping)) or _is_image(inputs)


def read(inputs: Any, *, images: bool) -> list[Input]:
    """The inputs of a sequence; `is_single` says whether there is one.

    Args:
        images: whether the model takes them.

    Raises:
        EgemmaError: what is no input, or one that needs an image model, by its index.
    """
    if not isinstance(inputs, Iterable):
        raise EgemmaError(f"expected a sequence of {'inputs' if images else 'texts'} but got {type(inputs).__name__}")
    return [_read(value, f"{'input' if images else 'text'} {index}", images) for index, value in enumerate(inputs)]


def _read(value: Any, name: str, images: bool) -> Input:
    if isinstance(value, str):
        return Input(IMAGE_TOKEN, (_image(value, name),)) if images and _names_an_image(value) else Input(value)
    if isinstance(value, Mapping):
        return _read_dict(value, name, images)
    if not _is_image(value):
        expected = "a text, an image or a dict of them" if images else "str"
        raise EgemmaError(f"{name}: expected {expected} but got {type(value).__name__}")
    if not images:
        raise _needs_images(name, type(value).__name__)
    return Input(IMAGE_TOKEN, (_image(value, name),))


def _read_dict(value: Mapping[Any, Any], name: str, images: bool) -> Input:
    if unknown := [key for key in value if key not in _KEYS]:
        later = " (audio and video are not in this version)" if set(unknown) & set(_LATER) else ""
        raise EgemmaError(f"{name}: expected the keys text and image but got {', '.join(map(repr, unknown))}{later}")
    parts = [(key, item) for key, items in value.items() for item in _items(items)]
    if not parts:
        raise EgemmaError(f"{name}: expected a text or an image in the dict but it holds none")
    texts = [item for key, item in parts if key == "text"]
    if odd := [text for text in texts if not isinstance(text, str)]:
        raise EgemmaError(f"{name}: expected text to be str or a list of them but got {type(odd[0]).__name__}")
    sources = tuple(_image(item, name) for key, item in parts if key == "image")
    if sources and not images:
        raise _needs_images(name, "a dict with an image")
    if sources and any(IMAGE_TOKEN in text for text in texts):  # the caller says where they go
        return Input("".join(texts), sources)
    return Input("".join(item if key == "text" else IMAGE_TOKEN for key, item in parts), sources)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _image(value: Any, name: str) -> ImageSource:
    if isinstance(value, str) and _is_url(value):
        raise EgemmaError(f"{name}: {value}: nothing is read from the network; download it first")
    if not (isinstance(value, str) or _is_image(value)):
        raise EgemmaError(
            f"{name}: expected image to be a path, the bytes of a file, a PIL image or an array, or a list of them, "
            f"but got {type(value).__name__}"
        )
    source: ImageSource = value
    return source


def _is_image(value: Any) -> bool:
    """Whether a value that is not a str is an image by its type."""
    pillow = sys.modules.get("PIL.Image")  # where nobody imported it, nothing is an image of it
    numbers = isinstance(value, np.ndarray) and value.dtype.kind not in "OUS"
    return isinstance(value, (Path, bytes)) or numbers or (pillow is not None and isinstance(value, pillow.Image))


def _names_an_image(text: str) -> bool:
    if text.startswith("data:image/"):
        return True
    if _is_url(text):
        try:
            return urlsplit(text).path.lower().endswith(IMAGE_SUFFIXES)
        except ValueError:
            return False
    return text.lower().endswith(IMAGE_SUFFIXES) and os.path.isfile(text)  # noqa: PTH113 - Path's own raises for long texts


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://")) and " " not in text


def _needs_images(name: str, got: str) -> EgemmaError:
    return EgemmaError(f'{name}: expected str but got {got}: load with modalities=("text", "image") for images')
