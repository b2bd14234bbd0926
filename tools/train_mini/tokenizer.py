"""The mini model's tokenizer: BPE with byte fallback in the layout of EmbeddingGemma 2's tokenizer.json.

Special tokens, post-processor and decoder are the official ones. The normalizer lowercases before it replaces spaces:
the teacher is uncased, and no token is spent on a second spelling of a word. The merges are trained on words, so that
none crosses a space although the official layout has no real pre-tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "[multimodal]",
    "<|tool>",
    "<tool|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
    "<|think|>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<|audio>",
    "<|image|>",
    "<|audio|>",
    "<image|>",
    "<audio|>",
    "<|video|>",
]
PAD, EOS, BOS = 0, 1, 2
_SPACE = "▁"
_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [{"type": "Lowercase"}, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
}

PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "none": "",
    "question": "task: question answering | query: ",
    "similarity": "task: sentence similarity | query: ",
    "fact": "task: fact checking | query: ",
    "classification": "task: classification | query: ",
    "clustering": "task: clustering | query: ",
    "code": "task: code retrieval | query: ",
}
"""Prompts of config_sentence_transformers.json by a short name."""


def train(texts: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """tokenizer.json, as a dict, with `vocab_size` tokens learnt from `texts`."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex(rf"{_SPACE}?\p{{L}}+|{_SPACE}?\p{{N}}|{_SPACE}?[^\p{{L}}\p{{N}}{_SPACE}]+|{_SPACE}+"), "isolated"
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[*(chr(c) for c in range(33, 127) if not chr(c).isupper()), "\n", "\t", _SPACE],
        limit_alphabet=120,
        max_token_length=18,
        show_progress=False,
    )
    # A body follows "query: " or "text: ", so most words begin with a space.
    tokenizer.train_from_iterator((" " + text for text in texts), trainer)
    return _official(tokenizer.get_vocab(), json.loads(tokenizer.to_str())["model"]["merges"])


def _official(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    def special(token: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def sequence(name: str, kind: int) -> list[dict[str, Any]]:
        return [special("<bos>", kind), {"Sequence": {"id": name, "type_id": kind}}, special("<eos>", kind)]

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[t], "content": t, **flags} for t in SPECIAL if t != "[multimodal]"],
        "normalizer": _NORMALIZER,
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": sequence("A", 0) + sequence("B", 1),
            "special_tokens": {t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in ("<bos>", "<eos>")},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": merges,
        },
    }  # fmt: skip
