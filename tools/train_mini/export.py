"""A trained state dict as a model folder in the official layout, bfloat16.

    python export.py OUT BUNDLE OFFICIAL FOLDER     OUT: of train.py; OFFICIAL: the published files

Writes config.json, model.safetensors, tokenizer, prompts, pooling. Needs transformers ≥ 5.24: its own model takes the
weights strictly and writes them, so that names and shapes are right by construction.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from model import Sizes
from safetensors.torch import load_file
from transformers.models.embedding_gemma2 import EmbeddingGemma2Config, EmbeddingGemma2TextConfig
from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2Model

MAX_LENGTH = 2048
LIMIT = 12_000_000
"""Bytes of the whole folder."""


def config(sizes: Sizes, vocab: dict[str, int]) -> EmbeddingGemma2Config:
    full = [i for i in range(sizes.layers) if sizes.is_full(i)]
    text = EmbeddingGemma2TextConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        sliding_window=sizes.window,
        hidden_size_per_layer_input=sizes.per_layer,
        embedding_dim=sizes.dimensions,
        max_position_embeddings=MAX_LENGTH,
        per_layer_config={
            i: {"head_dim": sizes.full_head_dim, "num_key_value_heads": sizes.full_kv_heads} for i in full
        },
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    )
    return EmbeddingGemma2Config(
        text_config=text,
        vision_config=None,
        audio_config=None,
        boi_token_id=vocab["<|image>"],
        eoi_token_id=vocab["<image|>"],
        image_token_id=vocab["<|image|>"],
        video_token_id=vocab["<|video|>"],
        boa_token_id=vocab["<|audio>"],
        eoa_token_index=vocab["<audio|>"],
        audio_token_id=vocab["<|audio|>"],
    )


def edit(path: Path, change: Any) -> None:
    data = json.loads(path.read_text(encoding="utf8"))
    change(data)
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def main() -> None:
    out, bundle, official, folder = map(Path, sys.argv[1:5])
    sizes = Sizes(**json.loads((out / "sizes.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(bundle / "tokenizer.json", folder)
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf8"))["model"]["vocab"]

    model = EmbeddingGemma2Model(config(sizes, vocab))
    model.language_model.load_state_dict(
        {k: v.float() for k, v in load_file(out / "mini.safetensors").items()}, strict=True
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    edit(folder / "config.json", lambda c: c.update(
        vision_config=None, audio_config=None, dtype="bfloat16", architectures=["EmbeddingGemma2Model"]))  # fmt: skip

    copied = ("tokenizer_config.json", "modules.json", "config_sentence_transformers.json", "1_Pooling/config.json",
              "2_Normalize/config.json")  # fmt: skip
    for name in copied:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(official / name, folder / name)
    edit(folder / "1_Pooling/config.json", lambda c: c.update(embedding_dimension=sizes.dimensions))

    def prompts(c: dict[str, Any]) -> None:
        reason = "modules.json names modules of sentence-transformers 6; 6.2.0 was tried."
        c["requirements"] = {"sentence-transformers": {"reason": reason, "specifier": ">=6.1.0"}}
        del c["__version__"]

    edit(folder / "config_sentence_transformers.json", prompts)

    def tokenizer(c: dict[str, Any]) -> None:
        # GemmaTokenizer would rebuild the normalizer without its lowercasing; this class takes tokenizer.json as it is.
        # As the processor too: the model type's own wants torchvision, Pillow and settings for images and sound.
        c.update(tokenizer_class="TokenizersBackend", processor_class="TokenizersBackend", model_max_length=MAX_LENGTH,
                 padding_side="right")  # fmt: skip
        for name in ("is_local", "local_files_only"):
            c.pop(name, None)
        for names in (c, c["model_specific_special_tokens"]):
            for name in [
                n for n, token in names.items() if isinstance(token, str) and token[:1] == "<" and token not in vocab
            ]:
                del names[name]

    edit(folder / "tokenizer_config.json", tokenizer)
    (folder / "sentence_bert_config.json").write_text(json.dumps({
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
    }, indent=2) + "\n")  # fmt: skip

    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:.2f} MB, {sum(p.numel() for p in model.parameters()):,} parameters")
    if size > LIMIT:
        raise SystemExit(f"{folder}: {size} bytes, more than {LIMIT}")


if __name__ == "__main__":
    main()
