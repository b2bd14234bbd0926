"""What the benchmarks of a device embed: batches of one length, and a corpus of mixed lengths, as generated ids."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from egemma_mlx.errors import EgemmaError

Ids = NDArray[np.int32]

STANDARD = ("1x16", "1x128", "32x128", "32x512", "1x8192", "mixed")
"""What every device should be measured on."""

SHORTEST, LONGEST, CORPUS = 3, 512, 1000
"""Lengths of the mixed corpus, in tokens, and its texts."""

_FIRST_ID = 10  # below are the tokenizer's special tokens
_SEED = 0


@dataclass(frozen=True)
class Workload:
    """Texts of these lengths, embedded in one call."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def is_mixed(self) -> bool:
        return len(set(self.lengths)) > 1

    def texts(self, vocab_size: int) -> list[Ids]:
        """Its texts as ids, the same at every call."""
        random = np.random.default_rng(_SEED)
        return [random.integers(_FIRST_ID, vocab_size, length).astype(np.int32) for length in self.lengths]


def workload(name: str) -> Workload:
    """`32x512`: 32 texts of 512 tokens each; `mixed`: the corpus of 1,000 texts; `mixed:40`: 40 texts like it.

    Raises:
        EgemmaError: another name.
    """
    if shape := re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)", name):
        texts, length = map(int, shape.groups())
        return Workload(f"{texts}×{length}", (length,) * texts)
    if corpus := re.fullmatch(r"mixed(?::([1-9]\d*))?", name):
        texts = int(corpus[1] or CORPUS)
        return Workload(f"mixed, {texts:,} texts", mixed_lengths(texts))
    raise EgemmaError(f"expected a workload like 32x512, mixed or mixed:40 but got {name!r}")


def mixed_lengths(texts: int) -> tuple[int, ...]:
    """Lengths from 3 to 512 in a geometric row, shuffled: short texts are many, and most tokens are in long ones."""
    lengths = np.geomspace(SHORTEST, LONGEST, texts).round().astype(int)
    return tuple(np.random.default_rng(_SEED).permutation(lengths).tolist())
