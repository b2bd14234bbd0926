"""What commands share: the lines on stderr, the encoder from arguments."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from egemma_mlx.errors import EgemmaError

if TYPE_CHECKING:
    from egemma_mlx.encoder import Encoder

PROGRAM = "egemma-mlx"


def say(message: str) -> None:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)


def encoder(arguments: argparse.Namespace, images: bool = False) -> Encoder:
    from egemma_mlx.encoder import Encoder

    if images and (lack := no_images(arguments)):
        raise EgemmaError(lack)
    return Encoder(
        arguments.model,
        revision=arguments.revision,
        modalities=("text", "image") if images else ("text",),
        backend=arguments.backend,
        precision=arguments.compute_precision,
    )


def soft_tokens(encoder: Encoder, arguments: argparse.Namespace) -> int | None:
    return None if encoder.image_processor is None else arguments.max_soft_tokens


def no_images(arguments: argparse.Namespace) -> str | None:
    """What keeps images from being embedded, if anything."""
    from egemma_mlx import checkpoint
    from egemma_mlx.config import Config

    if lack := no_pillow():
        return lack
    folder = checkpoint.resolve(arguments.model, arguments.revision)
    if Config.from_file(folder / "config.json").vision:
        return None
    return f"{folder} has no image tower; {checkpoint.DEFAULT_MODEL} has (`{checkpoint.GET_REAL}`)"


def no_pillow() -> str | None:
    return None if find_spec("PIL") else "images need Pillow: pip install 'egemma-mlx[image]'"
