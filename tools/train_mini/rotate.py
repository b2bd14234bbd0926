"""Turn the output of an exported model so that its first 64 dimensions rank best.

    python rotate.py MODEL BUNDLE [--pairs 20000] [--steps 400]

An orthogonal matrix on the first 128 dimensions changes no cosine at 128 or 256; it only decides what the first 64
hold. Training ties those to the teacher's principal axes, which keep the most energy but not the best ranking. Here
queries and documents of training pairs learn to rank each other at 64 dimensions as they do at 256, right partner
first. MODEL's projection is multiplied by the result, in place. Runs on a CPU; embedding the pairs takes the time.
"""

from __future__ import annotations

import argparse
import lzma
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from label import add_everyday
from prepare import KINDS
from safetensors.torch import load_file, save_file
from tokenizer import PROMPTS
from torch import Tensor
from train import PAIR_WEIGHT

from egemma_mlx import Encoder

PROJECTION = "language_model.embedding_projection.weight"
TURNED, CUT = 128, 64
BATCH, RATE, TEMPERATURE = 1024, 2e-3, 0.05
# More than half are headings and their passages, which lose the most at 64 dimensions.
SHARE = {kind: weight / 2 for kind, weight in PAIR_WEIGHT.items()}
SHARE["title"] += 0.5


def draw(bundle: Path, count: int) -> tuple[list[str], list[str]]:
    """Queries and their documents: training pairs, everyday ones among them."""
    texts = lzma.decompress((bundle / "texts.txt.xz").read_bytes()).decode("utf8").split("\n")[:-1]
    pairs = add_everyday(map, bundle / "words.json", 0.03, texts, np.load(bundle / "pairs.npz")["pairs"])
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.permutation(pairs[pairs[:, 2] == i])[: round(count * SHARE[kind])]
                           for i, kind in enumerate(KINDS)])  # fmt: skip
    return [texts[i] for i in rows[:, 0]], [texts[i] for i in rows[:, 1]]


def learn(queries: Tensor, documents: Tensor, steps: int) -> Tensor:
    """[256, 256], orthogonal, the identity but for [128, 128]: columns are the new axes.

    From the vectors of pairs, each [pairs, 256] of length 1. Minimises, over batches and both ways, the cross-entropy
    of the softmax at 64 dimensions with the one at 256 (ranking) and with the right partner (contrast).
    """
    width = queries.shape[1]
    free = torch.zeros(TURNED, TURNED, requires_grad=True)
    optimizer = torch.optim.Adam([free], betas=(0.9, 0.98))
    rng = np.random.default_rng(0)
    identity = torch.eye(TURNED)

    def axes() -> Tensor:
        skew = (free - free.T) / 2
        return torch.linalg.solve(identity + skew, identity - skew)  # Cayley: orthogonal

    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        chosen = torch.from_numpy(rng.choice(len(queries), min(BATCH, len(queries)), replace=False))
        a, b = queries[chosen], documents[chosen]
        leading = axes()[:, :CUT]
        wanted = a @ b.T
        found = F.normalize(a[:, :TURNED] @ leading, dim=-1) @ F.normalize(b[:, :TURNED] @ leading, dim=-1).T
        loss = torch.zeros(())
        for whole, part in ((wanted, found), (wanted.T, found.T)):
            logs = (part / TEMPERATURE).log_softmax(1)
            ranking = ((whole / TEMPERATURE).softmax(1) * logs).sum(1).mean()
            loss = loss - (ranking + logs.diagonal().mean()) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    return torch.block_diag(axes().detach(), torch.eye(width - TURNED))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    encoder = Encoder(str(options.model))
    sides = zip(("query", "document"), draw(options.bundle, options.pairs), strict=True)
    queries, documents = (torch.from_numpy(np.array(encoder.encode(texts, prompt=PROMPTS[p]))) for p, texts in sides)
    print(f"{len(queries)} pairs embedded", flush=True)
    axes = learn(queries, documents, options.steps)

    weights = options.model / "model.safetensors"
    tensors = load_file(weights)
    tensors[PROJECTION] = (axes.T @ tensors[PROJECTION].float()).bfloat16()
    save_file(tensors, weights, {"format": "pt"})
    weights.chmod(0o644)


if __name__ == "__main__":
    main()
