"""Held-out measures of a mini model beside the teacher's.

    python evaluate.py MODEL BUNDLE TEACHER.npz [--backend egemma_mlx|sentence_transformers]

title, term: recall at 10 and at 1 of a heading's first passage and of a word's WordNet gloss, 2,000 queries over 5,000
documents that training never saw. spearman: rank correlation of cosines with the teacher's, over related pairs, random
pairs and both. development: this folder's own everyday questions (dev_questions.json), right passage at rank 1 and
within 3; they may steer training, and are therefore no result to quote.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CUTS = (256, 128, 64)
QUERIES = 2000
Encode = Callable[[list[str], str], Tensor]
"""(texts, prompt name of tokenizer.PROMPTS) → [texts, dimensions]"""


def load_evaluation(bundle: Path) -> dict[str, Any]:
    evaluation = json.loads(lzma.decompress((bundle / "evaluation.json.xz").read_bytes()))
    evaluation["development"] = json.loads(Path(__file__).with_name("dev_questions.json").read_text(encoding="utf8"))
    return evaluation


def _ranks(queries: Tensor, documents: Tensor, right: Tensor) -> Tensor:
    """How many documents come before the right one, for each query."""
    scores = F.normalize(queries.float(), dim=-1) @ F.normalize(documents.float(), dim=-1).T
    return (scores > scores.gather(1, right[:, None])).sum(1)


def _retrieval(encode: Encode, evaluation: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Query vectors, document vectors and right answers, by task."""
    tasks = {}
    for name in ("title", "term"):
        queries, documents = zip(*evaluation[name], strict=True)
        vectors = encode(list(queries[:QUERIES]), "query")
        tasks[name] = (vectors, encode(list(documents), "document"), torch.arange(len(vectors), device=vectors.device))
    development = evaluation["development"]
    vectors = encode([q["question"] for q in development["questions"]], "query")
    right = torch.tensor([q["passage"] for q in development["questions"]], device=vectors.device)
    tasks["development"] = (vectors, encode(development["passages"], "document"), right)
    return tasks


def _recalls(tasks: dict[str, tuple[Tensor, Tensor, Tensor]], cut: int | None) -> dict[str, float]:
    found = {}
    for name, (queries, documents, right) in tasks.items():
        ranks = _ranks(queries[:, :cut], documents[:, :cut], right)
        for k in (1, 3) if name == "development" else (1, 10):
            found[f"{name}@{k}"] = float((ranks < k).float().mean())
    return found


def _pair_cosines(encode: Encode, evaluation: dict[str, Any], cuts: Sequence[int | None]) -> list[Tensor]:
    pairs = evaluation["related"] + evaluation["random"]
    a, b = (encode([pair[side] for pair in pairs], "similarity") for side in (0, 1))
    return [F.cosine_similarity(a[:, :cut].float(), b[:, :cut].float()) for cut in cuts]


def _spearman(a: Tensor, b: Tensor) -> float:
    a, b = (x.double().argsort().argsort().double() for x in (a, b))
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def teacher_reference(embed: Callable[[list[str]], Tensor], evaluation: dict[str, Any]) -> dict[str, np.ndarray]:
    """The teacher's own recalls, and its cosines of the related and random pairs."""

    def encode(texts: list[str], prompt: str) -> Tensor:
        return embed(texts)

    reference = {name: np.array(v) for name, v in _recalls(_retrieval(encode, evaluation), None).items()}
    reference["cosines"] = _pair_cosines(encode, evaluation, [None])[0].cpu().numpy()
    return reference


def measures(
    encode: Encode, evaluation: dict[str, Any], reference: dict[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """By Matryoshka cut, and under "teacher" the teacher's."""
    result = {"teacher": {name: float(v) for name, v in reference.items() if v.ndim == 0}}
    tasks = _retrieval(encode, evaluation)
    teacher = torch.from_numpy(reference["cosines"])
    related = len(evaluation["related"])
    for cut, on_device in zip(CUTS, _pair_cosines(encode, evaluation, CUTS), strict=True):
        cosines = on_device.cpu()
        result[str(cut)] = _recalls(tasks, cut) | {
            "spearman": _spearman(cosines, teacher),
            "spearman related": _spearman(cosines[:related], teacher[:related]),
            "spearman random": _spearman(cosines[related:], teacher[related:]),
        }
    return result


def table(result: dict[str, dict[str, float]]) -> str:
    columns = [*map(str, CUTS), "teacher"]
    lines = [f"{'':18}" + "".join(f"{c:>10}" for c in columns)]
    for name in result[columns[0]]:
        cells = (result[c].get(name) for c in columns)
        lines.append(f"{name:18}" + "".join(f"{'' if v is None else format(v, '.3f'):>10}" for v in cells))
    return "\n".join(lines)


def _package(folder: str) -> Encode:
    from tokenizer import PROMPTS

    from egemma_mlx import Encoder

    encoder = Encoder(folder)
    return lambda texts, prompt: torch.from_numpy(np.array(encoder.encode(texts, prompt=PROMPTS[prompt])))


def _sentence_transformers(folder: str) -> Encode:
    from sentence_transformers import SentenceTransformer
    from tokenizer import PROMPTS

    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": torch.float32})
    return lambda texts, prompt: torch.from_numpy(model.encode(texts, prompt=PROMPTS[prompt]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--backend", choices=("egemma_mlx", "sentence_transformers"), default="egemma_mlx")
    options = parser.parse_args()
    encode = (_package if options.backend == "egemma_mlx" else _sentence_transformers)(options.model)
    result = measures(encode, load_evaluation(options.bundle), dict(np.load(options.teacher)))
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
