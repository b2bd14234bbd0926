"""Labels for training, on the machine that trains: more texts, token ids, the teacher's vectors, clusters.

    python label.py BUNDLE CACHE [--limit TEXTS] [--workers 14]

Writes CACHE/tokens.npz, labels.pt, evaluation.json and teacher.npz (what evaluate.py compares with), then CACHE/done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from evaluate import load_evaluation, teacher_reference
from everyday import Everyday, Pair
from numpy.typing import NDArray
from prepare import KINDS
from teacher import Teacher
from tokenizers import Tokenizer

MAX_BODY = 240
CHUNK = 20_000
EVERYDAY_PAIRS, ANY_WORDS = 1_200_000, 500_000
_tokenizers: dict[str, Tokenizer] = {}


def more_texts(texts: Sequence[str], pairs: NDArray[np.int32], rng: random.Random) -> list[str]:
    """Spans of 1 to 14 words (a quarter as many as there are texts), a question before its answer, and passages that
    follow each other as longer ones."""
    found = []
    for _ in range(len(texts) // 4):
        words = texts[rng.randrange(len(texts))].split(" ")
        size = rng.randint(1, 14)
        if len(words) > size:
            start = rng.randrange(len(words) - size + 1)
            found.append(" ".join(words[start : start + size]).strip(" ,;:.()"))
    follows = {int(a): int(b) for a, b, kind in pairs if KINDS[kind] == "next"}
    for number in follows:
        joined, last, wanted = texts[number], number, rng.choice((2, 2, 3, 4, 6))
        while wanted > 1 and last in follows and joined.count(" ") < 140:
            last, wanted = follows[last], wanted - 1
            joined += " " + texts[last]
        found.append(joined)
    other = pairs[np.isin(pairs[:, 2], [KINDS.index(k) for k in ("title", "qa", "answer")])]
    for a, b, _ in other[rng.sample(range(len(other)), len(other) // 10)]:
        found.append(f"{texts[a]} {texts[b]}")
    return [text for text in found if text]


def _everyday(task: tuple[Path, int, int, int]) -> tuple[list[Pair], list[str]]:
    words, seed, pairs, sentences = task
    everyday = Everyday(json.loads(words.read_text()), seed)
    return list(itertools.islice(everyday.pairs(), pairs)), [everyday.any_words() for _ in range(sentences)]


def add_everyday(
    map_: Callable, words: Path, share: float, texts: list[str], pairs: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Extend `texts` by everyday language, made by 64 generators of their own seeds; the pairs with its pairs."""
    parts = 64
    count, sentences = int(EVERYDAY_PAIRS * share) // parts, int(ANY_WORDS * share) // parts
    index = {text: number for number, text in enumerate(texts)}
    rows = []
    for found, others in map_(_everyday, [(words, seed, count, sentences) for seed in range(parts)]):
        for a, b, kind in found:
            rows.append((index.setdefault(a, len(index)), index.setdefault(b, len(index)), KINDS.index(kind)))
        for text in others:
            index.setdefault(text, len(index))
    texts += list(index)[len(texts) :]
    return np.concatenate([pairs, np.unique(np.array(rows, np.int32), axis=0)])


def _ids(task: tuple[str, bool, list[str]]) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    name, special, texts = task
    encoded = [e.ids for e in _tokenizers[name].encode_batch_fast(texts, add_special_tokens=special)]
    lengths = np.array([len(ids) for ids in encoded], np.int16)
    return np.array([i for ids in encoded for i in ids], np.int16), lengths


def tokenize(map_: Callable, name: str, special: bool, texts: list[str]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(flat ids, lengths), in the order of the texts."""
    tasks = ((name, special, texts[i : i + CHUNK]) for i in range(0, len(texts), CHUNK))
    flat, lengths = zip(*map_(_ids, tasks), strict=True)
    return np.concatenate(flat), np.concatenate(lengths).astype(np.int64)


def rotation(vectors: torch.Tensor) -> torch.Tensor:
    """[384, 256]: uncentred principal axes of a sample, so that leading dimensions order the Matryoshka cuts."""
    sample = vectors[torch.randperm(len(vectors), device=vectors.device)[:400_000]].float()
    values, axes = torch.linalg.eigh((sample.T @ sample).double())
    energy = values.flip(0).cumsum(0) / values.sum()
    print("energy in 64, 128, 256 dimensions:", [round(float(energy[d - 1]), 3) for d in (64, 128, 256)])
    return axes.flip(1)[:, :256].float()


def by_cluster(vectors: torch.Tensor) -> torch.Tensor:
    """Text numbers so ordered that texts of one k-means cluster (about 800 texts) are neighbours."""
    count = max(2, min(4096, len(vectors) // 800))
    pick = torch.randperm(len(vectors), device=vectors.device)
    sample, centres = vectors[pick[: 100 * count]], vectors[pick[:count]].float()
    for _ in range(6):
        nearest = torch.cat([(part @ centres.to(part.dtype).T).argmax(1) for part in sample.split(65536)])
        sums = torch.zeros_like(centres).index_add(0, nearest, sample.float())
        centres = torch.nn.functional.normalize(torch.where(sums.any(1, keepdim=True), sums, centres), dim=-1)
    nearest = torch.cat([(part @ centres.to(part.dtype).T).argmax(1) for part in vectors.split(65536)])
    shuffled = torch.randperm(len(vectors), device=vectors.device)
    return shuffled[nearest[shuffled].argsort(stable=True)]


def main() -> None:  # noqa: PLR0915
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--limit", type=int, help="only so many texts, and little to evaluate on (for a trial)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options = parser.parse_args()
    bundle, cache = options.bundle, options.cache
    cache.mkdir(parents=True, exist_ok=True)
    start = time.time()

    def done(what: str) -> None:
        print(f"{time.time() - start:6.1f} s  {what}", flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    texts = lzma.decompress((bundle / "texts.txt.xz").read_bytes()).decode("utf8").split("\n")[:-1]
    pairs = np.load(bundle / "pairs.npz")["pairs"]
    if options.limit:
        texts = texts[: options.limit]
        pairs = pairs[(pairs[:, :2] < len(texts)).all(1)]
    share = options.limit / 2_000_000 if options.limit else 1.0
    written = len(texts)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        pairs = add_everyday(pool.imap, bundle / "words.json", share, texts, pairs)
    base = len(texts)
    texts += more_texts(texts, pairs, random.Random(3))
    done(f"{written} texts, {base} with everyday language, {len(texts)} with parts and joins")

    teacher = Teacher(bundle, device)
    mini = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    mini.enable_truncation(MAX_BODY)
    _tokenizers.update(teacher=teacher.tokenizer(), mini=mini)
    with multiprocessing.get_context("fork").Pool(options.workers) as pool:
        flat, lengths = tokenize(pool.imap, "teacher", True, texts)
        done(f"teacher's tokens, {lengths.mean():.1f} a text")
        # A body follows a prompt and so begins with a space, or stands alone.
        after, after_lengths = tokenize(pool.imap, "mini", False, [" " + text for text in texts])
        alone, alone_lengths = tokenize(pool.imap, "mini", False, texts)
    np.savez(cache / "tokens.npz", flat=np.concatenate([after, alone]),
             lengths=np.concatenate([after_lengths, alone_lengths]), pairs=pairs)  # fmt: skip
    done(f"tokens, {after_lengths.mean():.1f} a text")

    vectors = teacher.embed_ids(flat, lengths)
    done("teacher's vectors")
    names = sorted(mini.get_vocab(), key=mini.get_vocab().get)  # type: ignore[arg-type]
    axes = rotation(vectors)
    labels = {
        "vectors": vectors.cpu(),
        "axes": axes.cpu(),
        "order": by_cluster(vectors).cpu(),
        "words": teacher.embed([name.replace("▁", "") or " " for name in names]).cpu(),
    }
    done("axes, clusters")
    torch.save(labels, cache / "labels.pt")
    evaluation = load_evaluation(bundle)
    if options.limit:
        evaluation |= {name: evaluation[name][:200] for name in ("title", "term", "related", "random")}
    (cache / "evaluation.json").write_text(json.dumps(evaluation))
    reference = teacher_reference(teacher.embed, evaluation)
    np.savez(cache / "teacher.npz", **reference)
    print(json.dumps({k: v.tolist() for k, v in reference.items() if v.ndim == 0}))
    (cache / "done").touch()
    done("labels written")


if __name__ == "__main__":
    main()
