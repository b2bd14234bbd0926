"""EmbeddingGemma 2 for MLX: exact float32 vectors from packed batches.

    model, tokenizer = egemma_mlx.load("google/embeddinggemma-2")     # model(tokens), as an mlx.nn.Module
    vectors = egemma_mlx.Encoder().encode_query("a red bicycle")      # texts to numpy
    encoder = egemma_mlx.Encoder(modalities=("text", "image"))        # and images: encoder.encode(Path("photo.jpg"))
    egemma_mlx.register()                                             # mlx_embeddings.load gives this package's model

Names are resolved at first use, so that importing this package imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from egemma_mlx.dropin import register
    from egemma_mlx.encoder import Encoder
    from egemma_mlx.errors import EgemmaError
    from egemma_mlx.loading import generate, load

__version__ = "0.1.0.dev0"
__all__ = ["EgemmaError", "Encoder", "__version__", "generate", "load", "register"]

_HOMES = {
    "Encoder": "encoder",
    "EgemmaError": "errors",
    "generate": "loading",
    "load": "loading",
    "register": "dropin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
