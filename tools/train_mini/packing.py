"""Batches of texts as rows of one fixed length (model.Packed)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tokenizer as mini_tokenizer
import torch
from model import Packed
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

PROMPT_NAMES = tuple(mini_tokenizer.PROMPTS)
Ints = NDArray[np.int64]


def place(lengths: Ints, row: int) -> tuple[Ints, Ints, int]:
    """Row and column for each text, and the number of rows: best fit, longest first."""
    order = np.argsort(-lengths, kind="stable")
    rows, columns = [], []
    by_room: list[list[int]] = [[] for _ in range(row + 1)]
    rooms, count = 0, 0  # bit r of `rooms`: some row has r places left
    for size in lengths[order].tolist():
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            number, room, count = count, row, count + 1
        rows.append(number)
        columns.append(row - room)
        by_room[room - size].append(number)
        rooms |= 1 << (room - size)
    at_row, at_column = np.empty_like(lengths), np.empty_like(lengths)
    at_row[order], at_column[order] = rows, columns
    return at_row, at_column, count


@dataclass(frozen=True)
class Plan:
    """Where each text of a batch lies; all [texts]. `start` is of its body in the flat array, the rest in tokens."""

    prompt: Ints
    start: Ints
    before: Ints
    """BOS and prompt"""
    total: Ints
    slot: Ints
    """row · row length + column"""
    rows: int


class Planner:
    """The host's part: bodies by their starts and lengths in one flat array of ids, without BOS, EOS and prompt."""

    def __init__(self, starts: Ints, lengths: Ints, prompts: list[list[int]], row: int) -> None:
        self.starts, self.lengths, self.row = starts, lengths, row
        self.prompt_lengths = np.array([len(ids) for ids in prompts])

    def plan(self, texts: Ints, prompts: Ints, rows: int | None = None) -> Plan:
        """The texts behind their prompts. With `rows`, exactly that many: the longest are cut until all fit."""
        before = self.prompt_lengths[prompts] + 1
        limit = self.row - 1 - before
        while True:
            body = np.minimum(self.lengths[texts], limit)
            total = before + body + 1
            at_row, at_column, needed = place(total, self.row)
            if rows is None or needed <= rows:
                return Plan(prompts, self.starts[texts], before, total, at_row * self.row + at_column, rows or needed)
            limit = np.minimum(limit, body.max() - 8)


class Packer:
    """The device's part: token ids into rows, as planned."""

    def __init__(self, flat: Tensor, prompts: list[list[int]], row: int) -> None:
        self.flat, self.row = flat, row
        table = torch.zeros(len(prompts), max(1, *map(len, prompts), 1), dtype=torch.int64)
        for i, ids in enumerate(prompts):
            table[i, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self.prompts = table.to(flat.device)

    def pack(self, plan: Plan) -> Packed:
        device, row, texts = self.flat.device, self.row, len(plan.total)
        prompt, start, before, total, slot = send(
            np.stack((plan.prompt, plan.start, plan.before, plan.total, plan.slot)), device
        )
        text = torch.repeat_interleave(torch.arange(texts, device=device), total, output_size=int(plan.total.sum()))
        position = torch.arange(len(text), device=device) - (total.cumsum(0) - total)[text]
        behind = position - before[text]
        body = self.flat[(start[text] + behind).clamp(0, len(self.flat) - 1)].long()
        lead = self.prompts[prompt[text], (position - 1).clamp(0, self.prompts.shape[1] - 1)]
        ids = torch.where(behind < 0, lead, body)
        ids = torch.where(position == 0, mini_tokenizer.BOS, ids)
        ids = torch.where(position == total[text] - 1, mini_tokenizer.EOS, ids)
        where = slot[text] + position

        def spread(values: Tensor, padding: int) -> Tensor:
            grid = torch.full((plan.rows * row,), padding, dtype=torch.int64, device=device)
            grid[where] = values
            return grid.view(plan.rows, row)

        return Packed(spread(ids, mini_tokenizer.PAD), spread(text, texts), spread(position, 0), total.float())


def send(values: Ints, device: torch.device) -> Tensor:
    """To the device, without waiting for what it is doing: only pinned memory is copied asynchronously."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each prompt up to its last space, which belongs to the first word of the body."""
    return [tokenizer.encode(p.rstrip(" "), add_special_tokens=False).ids if p else []
            for p in mini_tokenizer.PROMPTS.values()]  # fmt: skip


def flatten(ids: list[list[int]]) -> tuple[Ints, Ints, Ints]:
    """(flat, starts, lengths)"""
    lengths = np.array([len(i) for i in ids], np.int64)
    return np.array([token for i in ids for token in i], np.int64), np.cumsum(lengths) - lengths, lengths
