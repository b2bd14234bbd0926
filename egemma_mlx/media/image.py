"""Images to the patches that the vision tower reads, as transformers' processor for the model makes them.

The reference treats one picture differently by the way it comes, and so does this module:

    a file, bytes, a data URI    `load_image`: EXIF orientation applied, alpha dropped (the colour behind it shows),
                                 yet a palette's or tRNS's one transparent colour laid over white
    a PIL image                  `convert_to_rgb`: alpha laid over white, EXIF orientation left alone
    an array                     alpha laid over white, in float32

Gray levels beyond 8 bits ("I;16", "I", "F") are clipped to 255 by Pillow's conversion, not scaled: most of a 16-bit
scan turns white, in the reference and here.

Pillow resizes, as in the reference's Pillow processor, to the bit. Its torchvision processor keeps the filter's weights
in 15 bits where Pillow has 22: below 1% of values are off by one level of 255, and a few in a million by two.
"""

from __future__ import annotations

import base64
import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from egemma_mlx.config import VisionConfig, read_json_object
from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from PIL import Image

# A str is a path, or a "data:image/…;base64,…" URI; an array is uint8 [H, W], or [H, W, C] with 1, 3 or 4 channels.
ImageSource: TypeAlias = "str | Path | bytes | Image.Image | NDArray[np.uint8]"

BUDGETS = (70, 140, 280, 560, 1120)
_LISTED = f"{', '.join(map(str, BUDGETS[:-1]))} or {BUDGETS[-1]}"

_DEFAULT_BUDGET = 280
_RESCALE = 1 / 255
_BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, which is not imported yet

# What processor_config.json may say of the steps: nothing else is implemented.
_STEPS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "resample": _BICUBIC,
    "do_rescale": True,
    "rescale_factor": _RESCALE,
    "do_normalize": False,
}

_DATA_URI = re.compile(r"data:image/[^,]*;base64,")


class Patches(NamedTuple):
    """One image, cut up row by row.

    Attributes:
        pixels: [n, 3·patch²] float32 in 0…1, each patch in (row, column, channel) order.
        positions: [n, 2] int32 (x, y) of each patch, counted in patches.
    """

    pixels: NDArray[np.float32]
    positions: NDArray[np.int32]


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes an image to whole soft tokens, at most `budget` of them, and cuts it up. Threads may share one.

    Attributes:
        patch_size: pixels along the side of a patch.
        pooling: patches along the side of a soft token.
        budget: the most soft tokens an image may become, one of `BUDGETS`.
    """

    patch_size: int = 16
    pooling: int = 3
    budget: int = _DEFAULT_BUDGET

    def __post_init__(self) -> None:
        if not _is_budget(self.budget):
            raise EgemmaError(f"expected an image budget of {_LISTED} soft tokens but got {self.budget!r}")

    @classmethod
    def from_folder(cls, folder: str | Path, config: VisionConfig, budget: int | None = None) -> ImageProcessor:
        """The processor of a checkpoint, with its own budget (280 where it names none) unless one is given.

        Raises:
            EgemmaError: an unknown budget; a processor_config.json that is broken, contradicts `config` or asks for
                other steps than this module's.
        """
        path = Path(folder) / "processor_config.json"
        raw = (read_json_object(path) if path.exists() else {}).get("image_processor") or {}
        if not isinstance(raw, dict):
            raise EgemmaError(f"{path}: expected image_processor to be an object but got {raw!r}")
        sizes = {"patch_size": config.patch_size, "pooling_kernel_size": config.pooling_kernel_size}
        for key, expected in {**_STEPS, **sizes}.items():
            if raw.get(key, expected) != expected:
                raise EgemmaError(f"{path}: expected image_processor.{key} to be {expected} but got {raw[key]!r}")
        if budget is None:
            budget = raw.get("max_soft_tokens", _DEFAULT_BUDGET)
            if not _is_budget(budget):
                raise EgemmaError(f"{path}: expected image_processor.max_soft_tokens of {_LISTED} but got {budget!r}")
        return cls(config.patch_size, config.pooling_kernel_size, budget)

    def with_budget(self, budget: int) -> ImageProcessor:
        """The same processor with another budget; EgemmaError for one that is not in `BUDGETS`."""
        return replace(self, budget=budget)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The (width, height) that an image of this size is resized to.

        Enlarged or reduced to the budget's area, each side is rounded down to whole soft tokens; where that leaves
        nothing of one side, it is one soft token long, and the other as many as the ratio and the budget give.

        Raises:
            EgemmaError: a side without a pixel.
        """
        _check_sides("image", width, height)
        side = self.patch_size * self.pooling
        # The reference's expression term by term, because the floor below turns a last bit into a soft token.
        factor = math.sqrt(self.budget * side**2 / (height * width))
        across, down = math.floor(factor * width / side), math.floor(factor * height / side)
        # Their product before rounding is the budget, so that they are never both 0 and never beyond it: what the
        # reference raises for cannot happen.
        if down == 0:
            across, down = min(width // height, self.budget), 1
        elif across == 0:
            across, down = 1, min(height // width, self.budget)
        return across * side, down * side

    def soft_tokens(self, source: ImageSource) -> int:
        """How many soft tokens `source` becomes, from its header alone.

        Raises:
            EgemmaError: whatever a call raises, except for what only decoding finds.
        """
        if isinstance(source, np.ndarray):
            height, width = _checked(source).shape[:2]
        else:
            with _opened(source) as (_, image):
                # EXIF orientation may swap the sides, but `size` is symmetric: the count stays.
                width, height = image.size
        across, down = self.size(width, height)
        return across * down // (self.patch_size * self.pooling) ** 2

    def __call__(self, source: ImageSource) -> Patches:
        """The patches of one image; of an animated file, of its first frame, with a warning that names the file.

        Raises:
            EgemmaError: no Pillow; no such file; one that is no image, is broken or has more pixels than
                `PIL.Image.MAX_IMAGE_PIXELS`; an array of another dtype or shape; an image without a pixel.
        """
        image = _to_rgb(source)
        resized = image.resize(self.size(*image.size), _BICUBIC)
        return self._patches(np.asarray(resized))

    def _patches(self, rgb: NDArray[np.uint8]) -> Patches:
        """[H, W, 3] uint8, both sides multiples of the patch's → patches."""
        side = self.patch_size
        down, across = rgb.shape[0] // side, rgb.shape[1] // side
        patches = rgb.reshape(down, side, across, side, 3).swapaxes(1, 2).reshape(down * across, -1)
        # A float32 product as in torch: dividing by 255 rounds half of the levels differently.
        pixels = patches * np.float32(_RESCALE)
        rows, columns = np.divmod(np.arange(down * across, dtype=np.int32), np.int32(across))
        return Patches(pixels, np.stack([columns, rows], axis=1))


def _is_budget(value: object) -> bool:
    return isinstance(value, int) and value in BUDGETS


# --- to RGB ----------------------------------------------------------------------------------------------------------


def _to_rgb(source: ImageSource) -> Image.Image:
    if isinstance(source, np.ndarray):
        return _from_array(_checked(source))
    with _opened(source) as (name, image):
        if image is source:
            return _over_white(image)
        from PIL import ImageOps

        # The further pictures of an MPO, which many phones write, are previews and depth maps.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            warnings.warn(f"{name}: has several frames, and only the first is used", stacklevel=3)
        ImageOps.exif_transpose(image, in_place=True)
        return _over_white(image.convert("RGB"))


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _from_array(array: NDArray[np.uint8]) -> Image.Image:
    _require_pillow()
    from PIL import Image

    channels = 1 if array.ndim == 2 else array.shape[2]
    if channels == 4:
        # torchvision's arithmetic, with 255.999 and a cut where others round.
        unit = array * np.float32(1 / 255)
        color, alpha = unit[..., :3], unit[..., 3:]
        array = ((color * alpha + (1 - alpha)) * np.float32(255.999)).astype(np.uint8)
    elif channels == 1:
        array = array.reshape(array.shape[:2])
    return Image.fromarray(array).convert("RGB")


def _checked(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    shape_fits = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))
    if array.dtype != np.uint8 or not shape_fits:
        raise EgemmaError(
            f"image: expected a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] but got {array.dtype} "
            f"of shape {list(array.shape)}"
        )
    _check_sides("image", array.shape[1], array.shape[0])
    return array


# --- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(source: str | Path | bytes | Image.Image) -> Iterator[tuple[str, Image.Image]]:
    """(name for errors, image with its header read); whatever the block raises becomes an EgemmaError of that name."""
    _require_pillow()
    from PIL import Image

    if isinstance(source, Image.Image):
        name = str(getattr(source, "filename", "") or "image")
        with _named_errors(name):
            _check_sides(name, *source.size)
            yield name, source
        return
    name, stream = _stream(source)
    with stream, _named_errors(name):
        if not stream.read(1):
            raise EgemmaError(f"{name}: expected an image but it is empty")
        image = Image.open(stream)  # Pillow itself rewinds
        width, height = image.size
        _check_sides(name, width, height)
        # Pillow only warns of up to twice as many.
        if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
            raise EgemmaError(
                f"{name}: not decoded, its {width}×{height} = {width * height} pixels are more than "
                f"PIL.Image.MAX_IMAGE_PIXELS = {Image.MAX_IMAGE_PIXELS}"
            )
        yield name, image


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except EgemmaError:
        raise
    except UnidentifiedImageError:
        raise EgemmaError(f"{name}: expected an image but its bytes are of no format that Pillow reads") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise EgemmaError(f"{name}: not decoded ({error})") from None
    except Exception as error:  # Pillow raises nearly anything over a broken file
        raise EgemmaError(f"{name}: the image cannot be decoded ({error})") from None


def _stream(source: str | Path | bytes) -> tuple[str, BinaryIO]:
    if isinstance(source, bytes):
        return "image", io.BytesIO(source)
    if isinstance(source, str) and source.startswith("data:"):
        return _from_uri(source)
    if not isinstance(source, (str, Path)):
        raise EgemmaError(
            f"image: expected a path, a data URI, bytes, a PIL image or a uint8 array but got {type(source).__name__}"
        )
    try:
        return str(source), Path(source).open("rb")
    except FileNotFoundError:
        raise EgemmaError(f"{source}: no such file") from None
    except IsADirectoryError:
        raise EgemmaError(f"{source}: expected an image file but it is a folder") from None
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise EgemmaError(f"{source}: cannot be read ({getattr(error, 'strerror', error)})") from None


def _from_uri(uri: str) -> tuple[str, BinaryIO]:
    name = uri if len(uri) <= 40 else f"{uri[:40]}…"
    head = _DATA_URI.match(uri)
    if head is None:
        raise EgemmaError(f"{name}: expected a data URI that begins with data:image/…;base64,")
    try:
        # White space is allowed between the characters; anything else that is foreign is an error.
        payload = base64.b64decode("".join(uri[head.end() :].split()), validate=True)
    except ValueError as error:
        raise EgemmaError(f"{name}: expected base64 ({error})") from None
    return name, io.BytesIO(payload)


def _check_sides(name: str, width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise EgemmaError(f"{name}: expected at least 1×1 pixels but got {width}×{height}")


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise EgemmaError("images need Pillow: pip install 'egemma-mlx[image]'") from None
