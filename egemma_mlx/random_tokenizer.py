"""The tokenizer of a random checkpoint: the official pipeline over a small vocabulary of English pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from egemma_mlx.errors import EgemmaError

Json = dict[str, Any]

_NAMED_TOKENS = {
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "boi_token": "<|image>",
    "eoa_token": "<audio|>",
    "eoc_token": "<channel|>",
    "eoi_token": "<image|>",
    "eot_token": "<turn|>",
    "escape_token": '<|"|>',
    "etc_token": "<tool_call|>",
    "etd_token": "<tool|>",
    "etr_token": "<tool_response|>",
    "image_token": "<|image|>",
    "soc_token": "<|channel>",
    "sot_token": "<|turn>",
    "stc_token": "<|tool_call>",
    "std_token": "<|tool>",
    "str_token": "<|tool_response>",
    "think_token": "<|think|>",
    "video_token": "<|video|>",
}

TOKENIZER_CONFIG: Json = {
    **_NAMED_TOKENS,
    "backend": "tokenizers",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "extra_special_tokens": ["<|video|>"],
    "mask_token": "<mask>",
    "model_max_length": int(1e30),
    "model_specific_special_tokens": _NAMED_TOKENS,
    "pad_token": "<pad>",
    "padding_side": "right",
    "processor_class": "EmbeddingGemma2Processor",
    "tokenizer_class": "GemmaTokenizer",
    "unk_token": "<unk>",
}

_OFFICIAL_IDS = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<mask>": 4,
    "<|tool>": 46,
    "<tool|>": 47,
    "<|tool_call>": 48,
    "<tool_call|>": 49,
    "<|tool_response>": 50,
    "<tool_response|>": 51,
    '<|"|>': 52,
    "<|think|>": 98,
    "<|channel>": 100,
    "<channel|>": 101,
    "<|turn>": 105,
    "<turn|>": 106,
    "<|image>": 255_999,
    "<|audio>": 256_000,
    "<|image|>": 258_880,
    "<|audio|>": 258_881,
    "<image|>": 258_882,
    "<audio|>": 258_883,
    "<|video|>": 258_884,
}
_OFFICIAL_FIRST_BYTE = 238

# Whole words after a space, the most useful first: a small vocab_size keeps the beginning of the list.
_WORDS = """
the of and to in a is that for it with as was on are be this by at from or have an they which you one had were there
all we can her has their more not but been if will would who about when what so some time no out up into them then its
only other new may these two any my now such like our over me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state good very make
world still own see men work long get here between both life being under never day same another know while last might
us great old year off come since against go came right used take three
search result query task title none text document code retrieval classification clustering question answering fact
checking sentence similarity model language vector image sound music video water light house city country school
river mountain history science number system computer program network memory theory energy animal plant food health
money market government company student teacher doctor family child woman mother father friend book story paper letter
word name place part hand head eye body heart mind night morning summer winter north south east west red green blue
black white small large high low open close begin end first second find give think look want need call ask
"""
_PIECES = (
    "the ing ion tion er ed es ly ent ment al ic ous able ity ness ist est or ar en an on in at it re is st ou ea ch sh"
)


def special_ids(size: str) -> dict[str, int]:
    """Control tokens: the official ids, or the same tokens in a row, past the unused id 5, for a small vocabulary."""
    if size == "full":
        return _OFFICIAL_IDS
    return {token: rank if rank < 5 else rank + 1 for rank, token in enumerate(_OFFICIAL_IDS)}


def tokenizer(specials: Mapping[str, int], vocab_size: int) -> Json:
    """The official tokenizer's pipeline over a small vocabulary: byte tokens, Latin characters, English pieces."""
    first_byte = min(_OFFICIAL_FIRST_BYTE, 1 + max(specials.values()))
    characters = ["▁", *map(chr, [*range(0x21, 0x7F), 0x0A, 0x09]), *"äöüßàâçéèêëíïñóôúøåæ–—’“”…€°"]
    merges = _merges()
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + characters + ["".join(pair) for pair in merges]
    tokens = tokens[: vocab_size - first_byte]
    if len(tokens) < 256 + len(characters) or max(specials.values()) >= vocab_size:
        raise EgemmaError(f"vocab_size: expected room for special, byte and character tokens but got {vocab_size}")
    vocab = {**specials, **{token: id_ for id_, token in enumerate(tokens, first_byte)}}
    bos, eos = ({"SpecialToken": {"id": token, "type_id": 0}} for token in ("<bos>", "<eos>"))
    bos_b, eos_b = ({"SpecialToken": {"id": token, "type_id": 1}} for token in ("<bos>", "<eos>"))
    single = [bos, {"Sequence": {"id": "A", "type_id": 0}}, eos]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id_,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, id_ in specials.items()
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, bos_b, {"Sequence": {"id": "B", "type_id": 1}}, eos_b],
            "special_tokens": {
                token: {"id": token, "ids": [specials[token]], "tokens": [token]} for token in ("<bos>", "<eos>")
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
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
            "vocab": vocab,
            "merges": [pair for pair in merges if "".join(pair) in vocab],
        },
    }


def _merges() -> list[tuple[str, str]]:
    """Each word and piece grown by one character at a time.

    Words start with the space mark and rank before the pieces, so no piece ever breaks a word up.
    """
    pairs: dict[str, tuple[str, str]] = {}
    for word in [*(f"▁{word}" for word in _WORDS.split()), *_PIECES.split()]:
        for end in range(2, len(word) + 1):
            pairs.setdefault(word[:end], (word[: end - 1], word[end - 1]))
    return list(pairs.values())
