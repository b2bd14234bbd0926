"""EmbeddingGemma 2's text encoder in plain PyTorch, over packed rows, for training.

Parameters have the names of transformers' EmbeddingGemma2TextModel, so that a state dict loads there unchanged
(export.py proves it). Texts lie end to end in rows of a fixed length: every step has one shape, which torch.compile
needs, and hardly any padding. A text attends to itself only; the sliding window (128) is wider than nearly every text
and the mask takes it into account.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    vocab: int = 11776
    hidden: int = 256
    intermediate: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    full_kv_heads: int = 1
    full_head_dim: int = 128
    per_layer: int = 32
    dimensions: int = 256
    window: int = 128

    def is_full(self, layer: int) -> bool:
        return layer % 6 == 5


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class Norm(nn.Module):
    def __init__(self, width: int, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-6).to(x.dtype)


# Branches start small beside the residual stream: the token embeddings carry the meaning at first.
_BRANCH = 0.2


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, s: Sizes, full: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = s.heads, s.full_kv_heads if full else s.kv_heads
        self.head_dim = s.full_head_dim if full else s.head_dim
        self.q_proj = _linear(s.hidden, self.heads * self.head_dim)
        self.k_proj = _linear(s.hidden, self.kv_heads * self.head_dim)
        self.v_proj = _linear(s.hidden, self.kv_heads * self.head_dim)
        self.o_proj = _linear(self.heads * self.head_dim, s.hidden)
        # Scores have no 1/√head_dim: with these norms they start at about one standard deviation.
        self.q_norm = Norm(self.head_dim, self.head_dim**-0.25)
        self.k_norm = Norm(self.head_dim, self.head_dim**-0.25)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape

        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(rows, length, heads, self.head_dim).transpose(1, 2)

        q = _rotate(self.q_norm(split(self.q_proj(x), self.heads)), cos, sin)
        k = _rotate(self.k_norm(split(self.k_proj(x), self.kv_heads)), cos, sin)
        v = split(self.v_proj(x), self.kv_heads)
        v = F.rms_norm(v.float(), v.shape[-1:], None, 1e-6).to(v.dtype)
        groups = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(groups, 1).to(q.dtype) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), scale=1.0)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate_proj = _linear(s.hidden, s.intermediate)
        self.up_proj = _linear(s.hidden, s.intermediate)
        self.down_proj = _linear(s.intermediate, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class PerLayerBlock(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.per_layer_input_gate = _linear(s.hidden, s.per_layer)
        self.per_layer_projection = _linear(s.per_layer, s.hidden)
        self.post_per_layer_input_norm = Norm(s.hidden, _BRANCH)

    def forward(self, x: Tensor, p: Tensor) -> Tensor:
        gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * p
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class Layer(nn.Module):
    layer_scalar: Tensor

    def __init__(self, s: Sizes, full: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.ple_block = Attention(s, full), FeedForward(s), PerLayerBlock(s)
        self.input_layernorm, self.post_attention_layernorm = Norm(s.hidden), Norm(s.hidden, _BRANCH)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(s.hidden), Norm(s.hidden, _BRANCH)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, p: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), mask, cos, sin))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return (x + self.ple_block(x, p)) * self.layer_scalar.to(x.dtype)


class PerLayerInputs(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.layers, self.width, self.scale = s.layers, s.per_layer, s.hidden**-0.5
        self.per_layer_model_projection = _linear(s.hidden, s.layers * s.per_layer)
        self.per_layer_projection_norm = Norm(s.per_layer)

    def forward(self, x: Tensor) -> Tensor:
        p = self.per_layer_model_projection(x) * self.scale
        return self.per_layer_projection_norm(p.reshape(*x.shape[:-1], self.layers, self.width))


class Encoder(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=s.hidden**-0.5)
        self.layers = nn.ModuleList(Layer(s, s.is_full(i)) for i in range(s.layers))
        self.norm, self.ple = Norm(s.hidden), PerLayerInputs(s)
        self.embedding_projection = _linear(s.hidden, s.dimensions)
        nn.init.eye_(self.embedding_projection.weight)

    def forward(self, batch: Packed) -> Tensor:
        """Vectors of the batch's texts, not normalised: [texts, dimensions], float32."""
        s = self.sizes
        x = F.embedding(batch.ids, self.embed_tokens.weight) * s.hidden**0.5
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        p = self.ple(x)
        own = batch.text[:, None, :, None] == batch.text[:, None, None, :]
        far = (batch.position[:, None, :, None] - batch.position[:, None, None, :]).abs() > s.window
        full = torch.zeros(own.shape, dtype=x.dtype, device=x.device).masked_fill_(~own, -1e4)
        sliding = full.masked_fill(far, -1e4)
        angles = [
            _angles(batch.position, d, theta, x.dtype) for d, theta in ((s.head_dim, 1e4), (s.full_head_dim, 1e6))
        ]
        for i, layer in enumerate(self.layers):
            kind = s.is_full(i)
            x = layer(x, p[:, :, i], full if kind else sliding, *angles[kind])
        # Mean over each text's tokens, then the projection: the two commute.
        x = self.norm(x).float().flatten(0, 1)
        sums = torch.zeros(batch.texts + 1, s.hidden, device=x.device).index_add(0, batch.text.flatten(), x)[:-1]
        mean = sums / batch.lengths[:, None]
        with torch.autocast(x.device.type, enabled=False):
            return self.embedding_projection(mean)


def _angles(position: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=position.device).float() / head_dim)
    angles = (position.float()[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@dataclass(frozen=True)
class Packed:
    """Texts end to end in rows. Padding belongs to the text number `texts`, which is thrown away."""

    ids: Tensor
    """[rows, length] int64"""
    text: Tensor
    """[rows, length]: the number of the text that a token belongs to"""
    position: Tensor
    """[rows, length]: of a token in its text"""
    lengths: Tensor
    """[texts]: tokens of each text"""

    @property
    def texts(self) -> int:
        return len(self.lengths)
