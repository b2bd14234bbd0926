"""Distil the teacher into the mini model.

    python train.py BUNDLE CACHE OUT --deadline EPOCH_SECONDS [--seconds S] [--steps N] [--batch 4096] [--device cuda]

Waits for label.py's CACHE/done while it compiles. Stops at the deadline, or after S seconds of training in all (the
default: what is left until the deadline), which is also what the learning rate follows. Every minute it writes
OUT/mini.safetensors (averaged weights, bfloat16) and CACHE/state.pt, from which the next start resumes; OUT/log.jsonl
has a line every 100 steps, OUT/measures.json the held-out measures at the end.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from evaluate import CUTS, measures, table
from model import Encoder, Packed, Sizes
from packing import PROMPT_NAMES, Ints, Packer, Plan, Planner, flatten, prompt_ids, send
from prepare import KINDS
from safetensors.torch import save_file
from tokenizer import PROMPTS
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ROW = 256
MEAN_TOKENS = 24
"""Room for a text with prompt, BOS and EOS, on average (22.5 measured); the longest of a fuller batch are cut."""
WARM_UP, DECAY = 300, 0.998
REGRESSION, COSINES, RANKING, CONTRAST, TEMPERATURE = 1.0, 10.0, 0.5, 0.1, 0.05

PAIR_WEIGHT = {"title": 0.16, "term": 0.22, "qa": 0.14, "answer": 0.22, "next": 0.10, "example": 0.05,
               "synonym": 0.03, "kind": 0.04, "same": 0.04}  # fmt: skip
# How often a query, a document or any other text gets a prompt.
PROMPT_WEIGHT = {
    "query":    {"query": 0.70, "question": 0.11, "none": 0.11, "similarity": 0.03, "fact": 0.02, "code": 0.01,
                 "classification": 0.01, "clustering": 0.01},
    "document": {"document": 0.88, "none": 0.12},
    "other":    {"query": 0.26, "document": 0.44, "none": 0.14, "similarity": 0.08, "question": 0.04, "fact": 0.01,
                 "code": 0.01, "classification": 0.01, "clustering": 0.01},
}  # fmt: skip


class Batches(IterableDataset[tuple[Ints, Plan]]):
    """Endless batches, drawn and laid out by the data loader's processes.

    A batch is a quarter queries, a quarter their documents, a quarter texts of a few clusters, which are hard to tell
    apart, and a quarter any texts.
    """

    def __init__(self, planner: Planner, pairs: Ints, order: Ints, batch: int, seed: int) -> None:
        self.planner, self.order, self.batch, self.seed = planner, order, batch, seed
        by_kind = {kind: pairs[pairs[:, 2] == i, :2].astype(np.int64) for i, kind in enumerate(KINDS)}
        self.pairs = {kind: rows for kind, rows in by_kind.items() if len(rows)}
        weights = np.array([PAIR_WEIGHT[kind] for kind in self.pairs])
        self.weights = weights / weights.sum()
        self.prompts = [
            np.array([PROMPT_WEIGHT[role].get(name, 0.0) for name in PROMPT_NAMES]) for role in PROMPT_WEIGHT
        ]

    def __iter__(self) -> Iterator[tuple[Ints, Plan]]:
        worker = get_worker_info()
        rng = np.random.default_rng((self.seed, worker.id if worker else 0))
        quarter, texts = self.batch // 4, len(self.order)
        block = min(64, quarter)
        while True:
            counts = rng.multinomial(quarter, self.weights)
            pairs = np.concatenate([rows[rng.integers(0, len(rows), n)]
                                    for rows, n in zip(self.pairs.values(), counts, strict=True)])  # fmt: skip
            starts = rng.integers(0, texts - block, quarter // block)
            close = self.order[(starts[:, None] + np.arange(block)).ravel()]
            rest = self.batch - 2 * quarter
            chosen = np.concatenate([pairs.T.ravel(), close, rng.integers(0, texts, rest - len(close))])
            roles = zip((quarter, quarter, rest), self.prompts, strict=True)
            prompts = np.concatenate([rng.choice(len(PROMPT_NAMES), n, p=p) for n, p in roles])
            # Without a prompt a text begins without a space: those ids follow all others in the flat array.
            alone = (prompts == PROMPT_NAMES.index("none")) * texts
            yield chosen, self.planner.plan(chosen + alone, prompts, rows_for(self.batch))


@dataclasses.dataclass(frozen=True)
class Labels:
    """What label.py made, on the device but for what `batches` needs on the host."""

    packer: Packer
    planner: Planner
    pairs: Ints
    order: Ints
    vectors: Tensor
    axes: Tensor
    words: Tensor

    @classmethod
    def load(cls, cache: Path, prompts: list[list[int]], device: str) -> Labels:
        tokens, labels = np.load(cache / "tokens.npz"), torch.load(cache / "labels.pt")
        lengths = tokens["lengths"]
        return cls(
            Packer(torch.from_numpy(tokens["flat"]).to(device), prompts, ROW),
            Planner(np.cumsum(lengths) - lengths, lengths, prompts, ROW),
            tokens["pairs"],
            labels["order"].numpy(),
            *(labels[name].to(device) for name in ("vectors", "axes", "words")),
        )

    def batches(self, batch: int, seed: int, workers: int) -> Iterator[tuple[Ints, Plan]]:
        batches = Batches(self.planner, self.pairs, self.order, batch, seed)
        return iter(DataLoader(batches, batch_size=None, collate_fn=_as_is, num_workers=workers, prefetch_factor=8))


def _as_is(drawn: tuple[Ints, Plan]) -> tuple[Ints, Plan]:
    return drawn


def rows_for(batch: int) -> int:
    return -(-batch * MEAN_TOKENS // ROW)


def losses(student: Tensor, teacher: Tensor, axes: Tensor, pairs: int) -> Tensor:
    """[regression, cosines, ranking, contrast], each a mean over the Matryoshka cuts.

    regression: 1 − cosine to the teacher's rotated vector. cosines: squared difference of the cosine matrices. ranking:
    KL of each row's softmax over the batch. contrast: InfoNCE over the first `pairs` queries and their documents.
    """
    itself = torch.eye(len(student), dtype=torch.bool, device=student.device)
    wanted = teacher @ teacher.T
    target = (wanted / TEMPERATURE).masked_fill(itself, -1e4).log_softmax(1)
    rotated = teacher @ axes
    same = torch.arange(pairs, device=student.device)
    total = torch.zeros(4, device=student.device)
    for cut in CUTS:
        x = F.normalize(student[:, :cut], dim=-1)
        cosines = x @ x.T
        found = (cosines / TEMPERATURE).masked_fill(itself, -1e4).log_softmax(1)
        scores = cosines[:pairs, pairs : 2 * pairs] / TEMPERATURE
        total = total + torch.stack((
            1 - (x * F.normalize(rotated[:, :cut], dim=-1)).sum(1).mean(),
            (cosines - wanted).square().mean(),
            (target.exp() * (target - found)).sum(1).mean(),
            (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2,
        ))  # fmt: skip
    return total / len(CUTS)


def encode_with(model: Encoder, tokenizer: Tokenizer, device: str) -> Any:
    """evaluate.Encode on the model as it is, in float32."""

    @torch.inference_mode()
    def encode(texts: list[str], prompt: str) -> Tensor:
        prompted = [PROMPTS[prompt] + text for text in texts]
        flat, starts, lengths = flatten(
            [e.ids for e in tokenizer.encode_batch_fast(prompted, add_special_tokens=False)]
        )
        planner, packer = Planner(starts, lengths, [[]], ROW), Packer(torch.from_numpy(flat).to(device), [[]], ROW)
        parts = np.split(np.arange(len(texts)), range(2048, len(texts), 2048))
        return torch.cat([model(packer.pack(planner.plan(part, np.zeros_like(part)))) for part in parts])

    return encode


class Run:
    """The model, its running average and the optimizer, with how far they have come."""

    def __init__(self, sizes: Sizes, rate: float, device: str) -> None:
        self.device, self.rate = device, rate
        self.model = Encoder(sizes).to(device)
        self.average = copy.deepcopy(self.model)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")
        self.loss, self.half = losses, torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
        self.weights = torch.tensor([REGRESSION, COSINES, RANKING, CONTRAST], device=device)
        self.steps, self.spent = 0, 0.0

    def compile(self, batch: int) -> None:
        """Compile layers and loss on a batch of made-up texts, forward and backward."""
        torch._dynamo.config.recompile_limit = 64
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        self.loss = torch.compile(losses, dynamic=False)
        rows = rows_for(batch)
        column = torch.arange(ROW, device=self.device).expand(rows, ROW)
        text = torch.arange(rows * ROW, device=self.device).view(rows, ROW) // MEAN_TOKENS
        lengths = torch.full((batch,), float(MEAN_TOKENS), device=self.device)
        packed = Packed(torch.full_like(text, 300), text.clamp(max=batch), column % MEAN_TOKENS, lengths)
        teacher = F.normalize(torch.randn(batch, 384, device=self.device), dim=-1)
        self._losses(packed, teacher, torch.eye(384, 256, device=self.device)).sum().backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _losses(self, packed: Packed, teacher: Tensor, axes: Tensor) -> Tensor:
        with self.half:
            student = self.model(packed)
        return self.loss(student.float(), teacher, axes, packed.texts // 4)

    def start_from(self, labels: Labels) -> None:
        """Each token's embedding starts as the teacher's vector for its text, along the teacher's leading axes."""
        vectors = labels.words.float() @ labels.axes
        vectors = vectors / vectors.square().mean().sqrt() * self.model.sizes.hidden**-0.5
        for model in (self.model, self.average):
            model.embed_tokens.weight.data.copy_(vectors)

    def step(self, labels: Labels, texts: Ints, plan: Plan, progress: float) -> Tensor:
        """One step, with a rate that rises at first and then falls to zero as `progress` goes from 0 to 1."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.steps + 1) / WARM_UP) * max(0.0, 1 - progress)
        teacher = labels.vectors[send(texts, labels.vectors.device)].float()
        parts = self._losses(labels.packer.pack(plan), teacher, labels.axes)
        self.optimizer.zero_grad(set_to_none=True)
        (parts @ self.weights).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            towards = 1 - min(DECAY, self.steps / (self.steps + 9))
            torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), towards)
        self.steps += 1
        return parts.detach()

    def save(self, cache: Path, out: Path) -> None:
        weights = {name: w.bfloat16().contiguous().cpu() for name, w in self.average.state_dict().items()}
        save_file(weights, out / "mini.partial")
        (out / "mini.partial").rename(out / "mini.safetensors")
        (out / "sizes.json").write_text(json.dumps(dataclasses.asdict(self.model.sizes)))
        torch.save({name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer")}
                   | {"steps": self.steps, "spent": self.spent}, cache / "state.pt")  # fmt: skip

    def resume(self, cache: Path) -> None:
        state = torch.load(cache / "state.pt", map_location=self.device)
        for name in ("model", "average", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.steps, self.spent = state["steps"], state["spent"]
        print(f"resumed at step {self.steps}, {self.spent:.0f} s", flush=True)


class Log:
    """Mean losses of every 100 steps into a file, some of them printed."""

    def __init__(self, path: Path, device: str) -> None:
        self.file, self.total, self.count = path.open("a"), torch.zeros(4, device=device), 0

    def add(self, parts: Tensor, run: Run) -> None:
        self.total += parts
        self.count += 1
        if run.steps % 100 == 0:
            mean = [round(v / self.count, 5) for v in self.total.tolist()]
            named = dict(zip(("regression", "cosines", "ranking", "contrast"), mean, strict=True))
            line = json.dumps({"step": run.steps, "spent": round(run.spent, 1), **named})
            print(line, file=self.file, flush=True)
            if run.steps % 500 == 0 or run.steps == 100:
                print(line, flush=True)
            self.total.zero_()
            self.count = 0


def train(run: Run, labels: Labels, o: argparse.Namespace, seconds: float) -> None:
    batches = labels.batches(o.batch, run.steps, o.workers)  # a resumed run draws afresh
    log = Log(o.out / "log.jsonl", o.device)
    last = saved = time.time()
    while run.spent < seconds and run.steps < o.steps and last < o.deadline:
        texts, plan = next(batches)
        log.add(run.step(labels, texts, plan, max(run.spent / seconds, run.steps / o.steps)), run)
        if run.steps % 20 == 0 and o.device == "cuda":
            torch.cuda.synchronize()  # or the host runs ahead of the clock
        now = time.time()
        run.spent, last = run.spent + now - last, now
        if now - saved > 60:
            run.save(o.cache, o.out)
            saved = now


def report(run: Run, tokenizer: Tokenizer, cache: Path, out: Path) -> None:
    """Measure the averaged weights as saved, in bfloat16."""
    for parameter in run.average.parameters():
        parameter.data = parameter.data.bfloat16().float()
    evaluation, reference = json.loads((cache / "evaluation.json").read_text()), dict(np.load(cache / "teacher.npz"))
    result = measures(encode_with(run.average, tokenizer, run.device), evaluation, reference)
    numbers = {"steps": run.steps, "seconds": round(run.spent), **result}
    (out / "measures.json").write_text(json.dumps(numbers, indent=1) + "\n")
    (out / "teacher.npz").write_bytes((cache / "teacher.npz").read_bytes())
    print(f"{run.steps} steps, {run.spent:.0f} s, {1000 * run.spent / max(run.steps, 1):.1f} ms a step")
    print(table(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bundle", "cache", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=6, help="processes that draw batches")
    parser.add_argument("--no-compile", action="store_true")
    o = parser.parse_args()
    o.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    # Neither takes the attention's mask; what is left is the memory-efficient kernel.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)

    tokenizer = Tokenizer.from_file(str(o.bundle / "tokenizer.json"))
    run = Run(Sizes(vocab=tokenizer.get_vocab_size()), o.rate, o.device)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    if o.device == "cuda" and not o.no_compile:
        run.compile(o.batch)
        print(f"{time.time() - begin:.0f} s: compiled", flush=True)
    while not (o.cache / "done").exists():
        if time.time() > o.deadline:
            raise SystemExit(f"{o.cache}/done: label.py has not finished before the deadline")
        time.sleep(0.5)
    labels = Labels.load(o.cache, prompt_ids(tokenizer), o.device)
    if (o.cache / "state.pt").exists():
        run.resume(o.cache)
    else:
        run.start_from(labels)
    seconds = o.seconds or run.spent + o.deadline - time.time()
    print(f"{time.time() - begin:.0f} s: {len(labels.order)} texts, {seconds - run.spent:.0f} s to train", flush=True)
    train(run, labels, o, seconds)
    run.save(o.cache, o.out)
    report(run, tokenizer, o.cache, o.out)


if __name__ == "__main__":
    main()
