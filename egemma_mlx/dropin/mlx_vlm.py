"""`mlx_vlm.models.embedding_gemma2`, as `register("mlx_vlm")` provides it.

mlx-vlm takes its processors from transformers' `AutoProcessor`, so there is none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from egemma_mlx.config import Config
from egemma_mlx.dropin import model

__all__ = ["Model", "ModelConfig"]


class ModelConfig(SimpleNamespace):
    """`args`, the checkpoint's configuration, in an object that mlx-vlm sets generation defaults on."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        return cls(args=Config.from_dict(raw))


class Model(model.Model):
    __doc__ = model.Model.__doc__

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.args)
