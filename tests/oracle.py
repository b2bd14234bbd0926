"""The reference implementations, as float32 on the CPU: transformers' model and sentence-transformers.

    import oracle                     # inside a test that needs it: skips that test where torch is absent

    oracle.text_vectors(folder, [[2, 17, 1]])              # [1, embedding_dim] float64 array of unit vectors
    oracle.transformers_model(folder)(input_ids=…, attention_mask=…).last_hidden_state
    oracle.sentence_transformer(folder).encode(["a text", image, {"array": samples, "sampling_rate": 16_000}])

sentence-transformers builds the multimodal processor whatever the checkpoint holds, so it needs Pillow and torchvision
(`pip install pillow torchvision==0.28.0 --no-deps`); `transformers_model` needs neither. With torchvision installed,
this module must be imported before any transformers model is.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for _package in ("torch", "transformers"):
    if importlib.util.find_spec(_package) is None:
        pytest.skip(f"the oracle needs {_package}", allow_module_level=True)

import torch  # noqa: E402

from egemma_mlx.bench.text import declare_torchvision_operators  # noqa: E402

if importlib.util.find_spec("torchvision") is not None:
    declare_torchvision_operators()


def transformers_model(folder: str | Path, dtype: str = "float32") -> Any:
    """`EmbeddingGemma2Model` in eval mode with sdpa attention; float64 works for text and images, not for audio."""
    from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2Model

    # sdpa is the default, and asking for it by name is an error: the audio tower has its own attention.
    model = EmbeddingGemma2Model.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    assert model.config.text_config._attn_implementation == "sdpa"
    return model


def text_vectors(model: Any, rows: Sequence[Sequence[int]], dtype: str = "float32") -> np.ndarray:
    """Unit vectors `[len(rows), embedding_dim]` of rows of token ids, each run alone, so without padding.

    `model` is a folder or what `transformers_model` returned; `dtype` is for a folder. Pooling and L2 are in float64.
    """
    if isinstance(model, (str, Path)):
        model = transformers_model(model, dtype)
    vectors = []
    for row in rows:
        ids = torch.tensor([list(row)])
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        pooled = hidden[0].double().mean(0)
        vectors.append((pooled / pooled.norm()).numpy())
    return np.stack(vectors)


def sentence_transformer(folder: str | Path) -> Any:
    """`SentenceTransformer` in float32 on the CPU; skips the test where Pillow or torchvision is missing."""
    for package in ("sentence_transformers", "PIL", "torchvision"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the sentence-transformers oracle needs {package}")
    from sentence_transformers import SentenceTransformer

    # Without the dtype it would compute in the stored one, bfloat16.
    arguments = {"device": "cpu", "model_kwargs": {"dtype": torch.float32}, "local_files_only": True}
    return SentenceTransformer(str(folder), **arguments)
