"""Images to patches, against transformers' processors: the Pillow one always, the torchvision one where it imports."""

import base64
import importlib.util
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from egemma_mlx.config import Config
from egemma_mlx.errors import EgemmaError
from egemma_mlx.media.image import BUDGETS, ImageProcessor, Patches
from egemma_mlx.random_checkpoint import write_checkpoint

pytest.importorskip("PIL", reason="images need Pillow")
from PIL import Image, ImageOps

FIXTURES = Path(__file__).parents[2] / "shared/facts/fixtures/image_sizes.json"
ORIENTATION = 0x0112

SIZES = [
    (641, 479),
    (96, 64),
    (1000, 300),
    (48, 48),
    (1, 1),
    (3000, 20),
    (20, 3000),
    (1920, 1080),
    (768, 768),
    (10, 5000),
    (1, 10000),
    (301, 7),
]

processor = ImageProcessor()
small = ImageProcessor(budget=70)  # a quarter of the work where the size says nothing


def picture(width: int, height: int, channels: int = 3) -> np.ndarray:
    """Gradients under noise, so that every level, both edges of the range and every frequency occur."""
    y, x = np.mgrid[0:height, 0:width]
    ramps = [x / width, y / height, (x + y) / (width + height), 1 - x / width]
    noise = np.random.default_rng(width * 10_007 + height).normal(0, 20, (height, width, channels))
    return np.clip(np.stack(ramps[:channels], axis=-1) * 300 - 20 + noise, 0, 255).astype(np.uint8)


def _palette() -> Image.Image:
    return Image.fromarray(picture(200, 120)).quantize(64)


def _transparent_palette() -> Image.Image:
    image = _palette()
    image.info["transparency"] = 7
    return image


def _gray16() -> Image.Image:
    return Image.fromarray(picture(200, 120, 1)[..., 0].astype(np.uint16) * 4)


MODES: dict[str, tuple[Callable[[], Image.Image], str]] = {
    "1": (lambda: Image.fromarray(picture(200, 120)).convert("1"), "png"),
    "L": (lambda: Image.fromarray(picture(200, 120, 1)[..., 0]), "png"),
    "LA": (lambda: Image.fromarray(picture(200, 120, 2)), "png"),
    "P": (_palette, "png"),
    "P transparent": (_transparent_palette, "png"),
    "P transparent gif": (_transparent_palette, "gif"),
    "RGBA": (lambda: Image.fromarray(picture(200, 120, 4)), "png"),
    "RGBA webp": (lambda: Image.fromarray(picture(200, 120, 4)), "webp"),
    "CMYK": (lambda: Image.fromarray(picture(200, 120)).convert("CMYK"), "jpeg"),
    "YCbCr": (lambda: Image.fromarray(picture(200, 120)).convert("YCbCr"), "jpeg"),
    "I;16": (_gray16, "png"),
    "I": (lambda: Image.fromarray(picture(200, 120, 1)[..., 0].astype(np.int32) * 4), "tiff"),
    "F": (lambda: Image.fromarray(picture(200, 120, 1)[..., 0].astype(np.float32) * 1.7), "tiff"),
}


def _torchvision_processor() -> Any:
    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec("torch") is None:
        pytest.skip("no torchvision")
    import oracle  # noqa: F401  # makes torchvision import beside a CPU torch
    from transformers.models.gemma4.image_processing_gemma4 import Gemma4ImageProcessor

    return Gemma4ImageProcessor


def _pillow_processor() -> Any:
    if importlib.util.find_spec("torch") is not None:
        import oracle  # noqa: F401  # before any transformers model, as it says
    pytest.importorskip("transformers")
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil


class Reference:
    """One of transformers' two processors for the model."""

    def __init__(self, kind: str) -> None:
        self.pillow = kind == "pillow"
        self._make = _pillow_processor() if self.pillow else _torchvision_processor()

    def __call__(self, image: Any, budget: int = 280) -> Patches:
        # Channels are said to be last: the reference would guess from the sizes.
        output = self._make(max_soft_tokens=budget)(image, return_tensors="np", input_data_format="channels_last")
        count = int(np.ravel(output["num_soft_tokens_per_image"])[0]) * 9
        positions = np.asarray(output["image_position_ids"])[0, :count]
        return Patches(np.asarray(output["pixel_values"])[0, :count], positions)

    def check(self, ours: Patches, image: Any, budget: int = 280) -> None:
        """The levels of the Pillow processor, and those of the torchvision one but for a level on 1% of values.

        torch keeps the weights of the filter in 15 bits where Pillow has 22, which puts the two processors two levels
        apart on a few values in a million, and on up to a hundred where a few pixels are enlarged a hundredfold.
        """
        theirs = self(image, budget)
        assert np.array_equal(ours.positions, theirs.positions)
        assert ours.pixels.shape == theirs.pixels.shape
        assert ours.pixels.dtype == np.float32
        levels = np.abs(ours.pixels - theirs.pixels) * 255
        if self.pillow:
            assert levels.max() < 1e-4
        else:
            assert (levels <= 0.5).mean() >= 0.99
            assert (levels <= 1.001).mean() >= 1 - 1e-4
            assert levels.max() < 2.001


@pytest.fixture(scope="module", params=["pillow", "torchvision"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def opened_as_reference(data: bytes) -> Image.Image:
    load_image = pytest.importorskip("transformers.image_utils").load_image
    return load_image("data:image/any;base64," + base64.b64encode(data).decode())


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_of_all_sizes(size: tuple[int, int], reference: Reference) -> None:
    image = Image.fromarray(picture(*size))
    reference.check(processor(image), image)


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, reference: Reference, tmp_path: Path) -> None:
    make, kind = MODES[mode]
    image = make()
    reference.check(small(image), image, 70)
    path = tmp_path / f"image.{kind}"
    path.write_bytes(saved(image, kind))
    reference.check(small(path), opened_as_reference(path.read_bytes()), 70)


def test_alpha_is_white_in_memory_and_dropped_in_a_file() -> None:
    clear = Image.new("RGBA", (48, 48), (255, 0, 0, 0))
    assert np.unique(processor(clear).pixels).tolist() == [1.0]
    red = processor(saved(clear, "png")).pixels.reshape(-1, 3)
    assert np.unique(red, axis=0).tolist() == [[1.0, 0.0, 0.0]]


def test_deep_gray_is_clipped_as_in_the_reference() -> None:
    deep = Image.fromarray(np.full((48, 48), 1000, np.uint16))
    assert np.unique(processor(saved(deep, "png")).pixels).tolist() == [1.0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "tiff"])
def test_exif_orientation(orientation: int, kind: str, reference: Reference) -> None:
    image = Image.fromarray(picture(160, 60))
    exif = image.getexif()
    exif[ORIENTATION] = orientation
    data = saved(image, kind, exif=exif)
    ours = small(data)
    reference.check(ours, opened_as_reference(data), 70)
    width, height = ours.positions.max(axis=0) + 1
    assert (width < height) == (orientation >= 5)
    assert small.soft_tokens(data) * 9 == len(ours.pixels)


def test_a_pil_image_is_not_turned(reference: Reference) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = Image.open(io.BytesIO(saved(Image.fromarray(picture(160, 60)), "jpeg", exif=exif)))
    reference.check(processor(image), image)
    reference.check(processor(ImageOps.exif_transpose(image)), ImageOps.exif_transpose(image))


@pytest.mark.parametrize("channels", [0, 1, 3, 4])
@pytest.mark.parametrize("size", [(200, 120), (60, 40)], ids=str)
def test_arrays(channels: int, size: tuple[int, int], reference: Reference) -> None:
    array = picture(*size, channels or 1)
    if channels == 4 and reference.pillow:
        pytest.skip("the references lay alpha over white a level apart in arrays; ours is the torchvision one")
    reference.check(small(array if channels else array[..., 0]), array, 70)  # the reference takes no [H, W]


def test_arrays_in_any_memory_order() -> None:
    array = picture(64, 48)
    expected = processor(array.copy()).pixels
    assert np.array_equal(processor(np.asfortranarray(array)).pixels, expected)
    assert np.array_equal(processor(array[::-1][::-1]).pixels, expected)


def test_every_way_to_pass_an_image(tmp_path: Path) -> None:
    data = saved(Image.fromarray(picture(200, 120)), "png")
    path = tmp_path / "name without extension"
    path.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    expected = processor(picture(200, 120))
    sources = [path, str(path), data, Image.open(path), f"data:image/png;base64,{encoded[:40]}\n{encoded[40:]}"]
    for source in sources:
        ours = processor(source)
        assert np.array_equal(ours.pixels, expected.pixels)
        assert np.array_equal(ours.positions, expected.positions)
        assert processor.soft_tokens(source) * 9 == len(ours.pixels)


def test_patches_are_rows_of_pixels() -> None:
    image = picture(768, 768)  # the size it would be resized to
    pixels, positions = processor(image)
    assert positions.dtype == np.int32
    assert positions[:3].tolist() == [[0, 0], [1, 0], [2, 0]]
    for index in (0, 47, 48, 2303):
        x, y = positions[index] * 16
        patch = image[y : y + 16, x : x + 16].reshape(-1) * np.float32(1 / 255)
        assert np.array_equal(pixels[index], patch)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not FIXTURES.exists(), reason="no ../shared/facts")
def test_sizes_of_the_fixtures() -> None:
    for width, height, new_width, new_height, tokens in json.loads(FIXTURES.read_text()):
        assert processor.size(width, height) == (new_width, new_height)
        assert processor.soft_tokens(np.zeros((height, width), np.uint8)) == tokens


@pytest.mark.parametrize("budget", BUDGETS)
def test_sizes_against_the_reference(budget: int) -> None:
    _pillow_processor()
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    rng = np.random.default_rng(budget)
    sizes = [*np.exp(rng.uniform(0, np.log(20_000), (4000, 2))).astype(int).tolist(), *SIZES]
    sizes += [(48 * a, 48 * b) for a in range(1, 40) for b in range(1, 40)]  # where a last bit decides
    ours = ImageProcessor(budget=budget)
    for width, height in sizes:
        down, across = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
        assert ours.size(width, height) == (across, down)
        assert ours.size(height, width) == (down, across)
        assert across * down <= budget * 48**2


@pytest.mark.parametrize("budget", BUDGETS)
def test_pixels_of_all_budgets(budget: int, reference: Reference) -> None:
    image = Image.fromarray(picture(300, 200))
    ours = ImageProcessor(budget=budget)
    reference.check(ours(image), image, budget)
    assert ours.soft_tokens(image) * 9 == len(ours(image).pixels)


def test_soft_tokens_reads_the_header_alone(tmp_path: Path) -> None:
    data = saved(Image.fromarray(picture(641, 479)), "png")
    header = tmp_path / "header.png"
    header.write_bytes(data[:200])
    assert processor.soft_tokens(header) == processor.soft_tokens(data) == 266
    with pytest.raises(EgemmaError, match=r"header\.png: the image cannot be decoded"):
        processor(header)


# --- the checkpoint's settings ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = write_checkpoint(tmp_path_factory.mktemp("image") / "tiny", "tiny")
    yield folder, Config.from_file(folder / "config.json").vision


def test_from_folder(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    _, config = checkpoint
    default = ImageProcessor(config.patch_size, config.pooling_kernel_size, 280)
    assert ImageProcessor.from_folder(tmp_path, config) == default  # no file at all
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({"image_processor": {"max_soft_tokens": 560, "patch_size": config.patch_size}}))
    assert ImageProcessor.from_folder(tmp_path, config) == replace(default, budget=560)
    assert ImageProcessor.from_folder(tmp_path, config, 70) == replace(default, budget=70)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_soft_tokens": 300}, r"max_soft_tokens of 70, 140, 280, 560 or 1120 but got 300"),
        ({"patch_size": 15}, "patch_size to be .* but got 15"),
        ({"do_normalize": True}, "do_normalize to be False but got True"),
        ({"resample": 2}, "resample to be 3 but got 2"),
        ([1], "to be an object but got"),
    ],
)
def test_settings_that_are_not_the_models(
    settings: Any, message: str, checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    with pytest.raises(EgemmaError, match=rf"processor_config\.json: .*{message}"):
        ImageProcessor.from_folder(tmp_path, checkpoint[1])


@pytest.mark.parametrize("budget", [0, 256, 280.0, "280", None])
def test_unknown_budget(budget: Any) -> None:
    with pytest.raises(EgemmaError, match=r"budget of 70, 140, 280, 560 or 1120 soft tokens but got"):
        ImageProcessor(budget=budget)


# --- bad input -------------------------------------------------------------------------------------------------------


def _both(source: Any, message: str) -> None:
    """A call and `soft_tokens` refuse `source` alike."""
    for use in (processor, processor.soft_tokens):
        with pytest.raises(EgemmaError, match=message):
            use(source)


def test_truncated_files(tmp_path: Path) -> None:
    for kind in ("jpeg", "png", "webp", "gif"):
        data = saved(Image.fromarray(picture(200, 120)), kind)
        path = tmp_path / f"cut.{kind}"
        path.write_bytes(data[: len(data) * 2 // 3])
        with pytest.raises(EgemmaError, match=rf"cut\.{kind}: the image cannot be decoded \(.+\)"):
            processor(path)


def test_files_that_are_no_images(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").touch()
    _both(tmp_path / "text.png", r"text\.png: expected an image but its bytes are of no format that Pillow reads")
    _both(tmp_path / "empty.png", r"empty\.png: expected an image but it is empty")
    _both(tmp_path / "absent.png", r"absent\.png: no such file")
    _both(str(tmp_path), "expected an image file but it is a folder")
    _both("null\0.png", "cannot be read")
    _both(b"", "image: expected an image but it is empty")
    _both(b"no image", "image: expected an image but its bytes")


def test_decompression_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(saved(Image.new("1", (300, 200)), "png"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)  # Pillow warns
    with pytest.warns(Image.DecompressionBombWarning):
        _both(path, r"bomb\.png: not decoded, its 300×200 = 60000 pixels are more than .* = 50000")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _both(path, r"bomb\.png: not decoded .*60000 pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow raises
    _both(path, r"bomb\.png: not decoded .*60000 pixels")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert processor.soft_tokens(path) == len(processor(path).pixels) // 9
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50_000)
    assert len(processor(np.zeros((200, 300), np.uint8)).pixels)  # already in memory


@pytest.mark.parametrize("kind", ["gif", "png", "webp"])
def test_animations_give_their_first_frame(kind: str, tmp_path: Path, reference: Reference) -> None:
    frames = [Image.fromarray(picture(width, 120)).resize((200, 120)) for width in (200, 60, 20)]
    path = tmp_path / f"moving.{kind}"
    path.write_bytes(saved(frames[0], kind, save_all=True, append_images=frames[1:]))
    with pytest.warns(UserWarning, match=rf"moving\.{kind}: has several frames") as caught:
        ours = processor(path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    reference.check(ours, opened_as_reference(path.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor.soft_tokens(path)
        processor(saved(frames[0], kind))


def test_pictures_behind_a_phones_are_no_frames() -> None:
    images = [Image.fromarray(picture(64, 48)), Image.fromarray(picture(32, 24))]
    data = saved(images[0], "mpo", save_all=True, append_images=images[1:])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor(data)


def test_data_uris() -> None:
    _both(
        "data:text/plain;base64,aGk=", "data:text/plain;base64,aGk=: expected a data URI that begins with data:image/"
    )
    _both("data:image/png,raw", "expected a data URI that begins with")
    _both("data:image/png;base64,a%3D", r"expected base64 \(")
    _both("data:image/png;base64,", "expected an image but it is empty")
    _both("data:image/png;base64," + "AAAA" * 1000, r"^data:image/png;base64,A{18}…: expected an image but its bytes")


@pytest.mark.parametrize(
    ("array", "came"),
    [
        (np.zeros((4, 4, 3), np.float32), r"float32 of shape \[4, 4, 3\]"),
        (np.zeros((4, 4), np.uint16), r"uint16 of shape \[4, 4\]"),
        (np.zeros((4, 4), bool), r"bool of shape \[4, 4\]"),
        (np.zeros((3, 4, 5), np.uint8), r"uint8 of shape \[3, 4, 5\]"),
        (np.zeros((4, 4, 2), np.uint8), r"uint8 of shape \[4, 4, 2\]"),
        (np.zeros(4, np.uint8), r"uint8 of shape \[4\]"),
        (np.zeros((1, 4, 4, 3), np.uint8), r"uint8 of shape \[1, 4, 4, 3\]"),
    ],
)
def test_arrays_that_are_no_images(array: Any, came: str) -> None:
    _both(array, rf"image: expected a uint8 array .* but got {came}")


def test_images_without_a_pixel() -> None:
    _both(Image.new("RGB", (0, 5)), "image: expected at least 1×1 pixels but got 0×5")
    _both(np.zeros((0, 5, 3), np.uint8), "image: expected at least 1×1 pixels but got 5×0")
    with pytest.raises(EgemmaError, match="got 3×0"):
        processor.size(3, 0)


def test_other_types() -> None:
    _both([1, 2], "image: expected a path, a data URI, bytes, a PIL image or a uint8 array but got list")


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    message = r"^images need Pillow: pip install 'egemma-mlx\[image\]'$"
    _both("photo.png", message)
    with pytest.raises(EgemmaError, match=message):
        processor(np.zeros((4, 4), np.uint8))


def test_threads_share_a_processor() -> None:
    data = [saved(Image.fromarray(picture(width, 90)), "jpeg") for width in range(50, 90)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(processor, data))
    for ours, alone in zip(together, map(processor, data), strict=True):
        assert np.array_equal(ours.pixels, alone.pixels)
