"""`register`: this package's model where another package looks for EmbeddingGemma 2.

mlx-embeddings and mlx-vlm import `{package}.models.{model_type}` for the `model_type` of a config.json and take the
classes in it. Their interface is met here; they are not needed for anything else.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.util import find_spec

from egemma_mlx.config import MODEL_TYPE
from egemma_mlx.errors import EgemmaError

_DISTRIBUTIONS = {"mlx_embeddings": "mlx-embeddings", "mlx_vlm": "mlx-vlm"}


def register(package: str = "mlx_embeddings", *, override: bool = False) -> None:
    """Make `package` load EmbeddingGemma 2 as this package's model, in this process, from now on.

        egemma_mlx.register()
        model, tokenizer = mlx_embeddings.load("google/embeddinggemma-2")

    Imports `package`; whether it was imported before makes no difference. Models that it has loaded stay what they
    are. A second call changes nothing.

    Args:
        package: "mlx_embeddings" or "mlx_vlm".
        override: replace the module for this model that `package` itself has (mlx-vlm 0.7.10 has one).

    Raises:
        EgemmaError: another package; one that is not installed; one that has this model, without `override`.
    """
    if package not in _DISTRIBUTIONS:
        raise EgemmaError(f"[register] expected {' or '.join(map(repr, _DISTRIBUTIONS))} but got {package!r}")
    distribution = _DISTRIBUTIONS[package]
    if find_spec(package) is None:
        raise EgemmaError(f"[register] {package} is not installed: pip install {distribution}")
    models, name = import_module(f"{package}.models"), f"{package}.models.{MODEL_TYPE}"
    ours = import_module(f"{__name__}.{package}")
    if sys.modules.get(name) is ours:
        return
    if find_spec(name) is not None:
        if not override:
            version = metadata.version(distribution)
            raise EgemmaError(
                f"[register] {distribution} {version} has its own {MODEL_TYPE}: override=True puts this package's in "
                "its place"
            )
        # The rest of its folder (mlx-vlm's processor, which registers itself when imported) stays in use.
        ours.__path__ = getattr(import_module(name), "__path__", [])
    sys.modules[name] = ours
    setattr(models, MODEL_TYPE, ours)
