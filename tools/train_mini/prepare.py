"""From records to what training reads: a held-out set, the tokenizer and one compressed bundle.

    python prepare.py WORK [--vocab 11776]

Reads WORK/x and WORK/corpus.jsonl.gz. Writes WORK/bundle: texts.txt.xz (one training text a line), pairs.npz (rows of
query, document, kind), words.json (for everyday.py, which label.py runs: its texts need not travel), evaluation.json.xz
(held out) and tokenizer.json.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import itertools
import json
import lzma
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizer as mini_tokenizer
from everyday import Everyday
from words import common_words

KINDS = ("title", "term", "qa", "answer", "next", "example", "synonym", "kind", "same")
TECHNICAL = {
    *("foldoc", "jargon", "vera", "python", "perl", "postgresql", "rust", "django", "sqlite", "nodejs", "apache"),
    *("libreoffice", "gnome", "handbook", "homeassistant"),
}


class Texts:
    """Unique texts with their sources, and pairs of them."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.sources: list[str] = []
        self.pairs: list[tuple[int, int, str]] = []

    def add(self, text: str, source: str) -> int:
        number = self.index.setdefault(text, len(self.index))
        if number == len(self.sources):
            self.sources.append(source)
        return number

    def pair(self, query: str, document: str, kind: str, source: str) -> None:
        self.pairs.append((self.add(query, source), self.add(document, source), kind))


def read_corpus(path: Path) -> Texts:
    texts = Texts()
    with gzip.open(path, "rt", encoding="utf8") as lines:
        for line in lines:
            record = json.loads(line)
            if "t" in record:
                texts.add(record["t"], record["s"])
            else:
                texts.pair(record["q"], record["d"], record["k"], record["s"])
    return texts


def _bare(text: str) -> str:
    return re.sub(r"[.\s]+$", "", text.lower())


def hold_out(texts: Texts, rng: random.Random) -> tuple[set[int], dict[str, list[list[str]]]]:
    """Numbers of the held texts, and the evaluation: title and term pairs, and pairs to rank by similarity.

    Held are the documents, every text that equals one but for case and full stop, and WordNet's sentences built around
    a held gloss. A one-word query may stay: what must be unseen is the document.
    """
    strings = list(texts.index)
    size = [s.count(" ") + 1 for s in strings]
    by_kind: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for q, d, kind in texts.pairs:
        by_kind[kind].append((q, d))

    def draw(kind: str, count: int, fits: Callable[[int, int], bool] = lambda q, d: True) -> list[tuple[int, int]]:
        rng.shuffle(by_kind[kind])
        chosen: list[tuple[int, int]] = []
        seen: set[int] = set()
        for q, d in by_kind[kind]:
            if len(chosen) < count and not seen & {q, d} and fits(q, d):
                seen |= {q, d}
                chosen.append((q, d))
        return chosen

    title = draw("title", 5000, lambda q, d: size[q] >= 2 and size[d] >= 8)
    term = draw("term", 5000, lambda q, d: size[d] >= 5 and texts.sources[d] == "wordnet")
    other = draw("next", 4000) + draw("qa", 4000) + draw("example", 1000)
    held = {number for pair in title + other for number in pair} | {d for _, d in term}
    glosses = {_bare(strings[d]) for d in held}
    glosses |= {_bare(re.split(r": | is to | means ", strings[d], maxsplit=1)[-1]) for d in held
                if texts.sources[d] == "wordnet" and size[d] > 4}  # fmt: skip
    for number, text in enumerate(strings):
        bare = _bare(text)
        parts = [bare]
        if texts.sources[number] == "wordnet":
            parts += re.split(r": | is to | means |^how (?:do i|to|can you) |^ways to |^tips to |^can i |^i want to ",
                              bare.rstrip("?"))[1:]  # fmt: skip
        if any(part in glosses for part in parts):
            held.add(number)

    related = title[:3000] + term[:2000] + other
    rng.shuffle(related)
    pool = [number for pair in related for number in pair]
    random_pairs = [(rng.choice(pool), rng.choice(pool)) for _ in range(10000)]
    named = {"title": title, "term": term, "related": related[:10000], "random": random_pairs}
    return held, {name: [[strings[q], strings[d]] for q, d in pairs] for name, pairs in named.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--vocab", type=int, default=11776)
    options = parser.parse_args()
    bundle = options.work / "bundle"
    bundle.mkdir(exist_ok=True)
    rng = random.Random(7)

    texts = read_corpus(options.work / "corpus.jsonl.gz")
    held, evaluation = hold_out(texts, rng)
    print(len(texts.index), "texts,", len(texts.pairs), "pairs,", len(held), "held out", flush=True)

    new: dict[int, int] = {}
    kept = []
    for number, text in enumerate(texts.index):
        if number not in held:
            new[number] = len(kept)
            kept.append(text)
    rows = sorted({(new[q], new[d], KINDS.index(k)) for q, d, k in texts.pairs if q in new and d in new})
    counts = collections.Counter(texts.sources[number] for number in new)
    print(len(kept), "texts to train on,", len(rows), "pairs", dict(counts.most_common()), flush=True)

    common = common_words(options.work / "x")
    everyday = Everyday(common, seed=1000)
    sample = [
        t for t, n in zip(kept, new, strict=True) if rng.random() < (0.08 if texts.sources[n] in TECHNICAL else 0.35)
    ]
    sample += {text for pair in itertools.islice(everyday.pairs(), 250_000) for text in pair[:2]}
    sample += (everyday.any_words() for _ in range(60_000))
    vocabulary = mini_tokenizer.train(sample, options.vocab)
    print(len(sample), "texts for the tokenizer, last merges", vocabulary["model"]["merges"][-8:], flush=True)

    (bundle / "words.json").write_text(json.dumps(common))
    (bundle / "tokenizer.json").write_text(
        json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":")), encoding="utf8")  # fmt: skip
    np.savez_compressed(bundle / "pairs.npz", pairs=np.array(rows, np.int32))
    with lzma.open(bundle / "evaluation.json.xz", "wt", encoding="utf8") as out:
        json.dump(evaluation, out, ensure_ascii=False)
    with lzma.open(bundle / "texts.txt.xz", "wt", encoding="utf8", preset=4) as out:
        out.writelines(text + "\n" for text in kept)
    for file in sorted(bundle.iterdir()):
        print(f"{file.stat().st_size / 1e6:8.2f} MB {file.name}")


if __name__ == "__main__":
    main()
