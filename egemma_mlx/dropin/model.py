"""What the modules for mlx-embeddings and mlx-vlm share: the model as those packages build and fill it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from egemma_mlx import blas, checkpoint, layouts, loading
from egemma_mlx.config import Config
from egemma_mlx.heap import keep_pages
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.backend import select
from egemma_mlx.models.encoder import EmbeddingGemma2


class Model(EmbeddingGemma2):
    """`EmbeddingGemma2` made from its configuration alone, with the backend that `egemma_mlx.load` would pick and the
    vision tower where the checkpoint has one. Weights come through `sanitize` and `load_weights`.

    A call takes and returns what `EmbeddingGemma2`'s does.
    """

    def __init__(self, config: Config) -> None:
        loading.exact_products()
        if on_cpu():
            blas.warn_if_slow()
            keep_pages()
        kernels = select("auto", config.text, config.vision)
        super().__init__(config, kernels, modalities=_towers(config) - {"audio"})
        self.model_type = config.model_type

    @property
    def layers(self) -> Any:
        """The text model's layers."""
        return self.language_model.layers

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's tensors by any of the names and axis orders of `layouts` → this model's parameters.

        Those of the audio tower, which this version does not run, are left out. Dtypes become what the kernels read:
        all is float32 for plain operations, and for the others what was float16, as `mlx_embeddings.convert` writes it.

        Raises:
            EgemmaError: a tensor of no tower.
        """
        towers = _towers(self.config)
        expected = checkpoint.tensor_shapes(self.config, towers - {"audio"})
        found = layouts.official(weights, expected, checkpoint.tensor_shapes(self.config, towers))
        dtype = mx.float32 if self.kernels.name == "ops" else None
        return {name: loading.resident(name, array, dtype) for name, array in found.items()}


def _towers(config: Config) -> set[str]:
    """The modalities that a checkpoint has."""
    towers = {"text": config.text, "image": config.vision, "audio": config.audio}
    return {modality for modality, tower in towers.items() if tower is not None}
