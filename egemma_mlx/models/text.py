"""The text model: 24 layers of attention, gated MLP and per-layer embedding over a packed batch.

Read from the bottom: `TextModel.__call__` is the forward. Parameters have the checkpoint's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

from egemma_mlx.config import LayerConfig, TextConfig
from egemma_mlx.kernels import Kernels
from egemma_mlx.kernels.linear import is_short
from egemma_mlx.kernels.norm import normalize
from egemma_mlx.kernels.qkv import Rope, rope_table
from egemma_mlx.packing import Packed
from egemma_mlx.quantized import PARTS, Scheme, dequantize


def project(kernels: Kernels, x: mx.array, *layers: nn.Module) -> tuple[mx.array, ...]:
    """x through each linear layer: plain weights in one kernel, layers that an adapter or quantiser put in by their
    own forward."""
    if all(type(layer) is nn.Linear for layer in layers):
        return kernels.linear(x, *(layer.weight for layer in layers))
    return tuple(kernels.linear(x, layer.weight)[0] if type(layer) is nn.Linear else layer(x) for layer in layers)


def project_add_norm(
    kernels: Kernels,
    x: mx.array,
    layer: nn.Module,
    h: mx.array,
    norm: nn.RMSNorm,
    eps: float,
    **ending: mx.array | None,
) -> tuple[mx.array, Any]:
    """A residual block's last product and its end, `kernels.add_norm` of h and layer(x)."""
    if type(layer) is nn.Linear:
        return kernels.linear_add_norm(x, layer.weight, h, norm.weight, eps=eps, **ending)
    return kernels.add_norm(h, layer(x), norm.weight, eps=eps, **ending)


def project_unit(kernels: Kernels, x: mx.array, layer: nn.Module) -> tuple[mx.array, mx.array]:
    """x through a linear layer, and the unit vectors of that."""
    if type(layer) is nn.Linear:
        y, unit = kernels.linear_unit(x, layer.weight)
        return y, unit
    y = layer(x)
    return y, normalize(y)


def look_up(table: nn.Module, tokens: mx.array) -> mx.array:
    """Rows of an embedding table, float32; only those are widened, or unpacked."""
    if type(table) is nn.QuantizedEmbedding:
        return dequantize(_packed_rows(table, tokens), Scheme(table.group_size, table.bits, table.mode))
    return table(tokens).astype(mx.float32)


def project_rows(x: mx.array, layer: nn.QuantizedLinear, rows: slice) -> mx.array:
    """x through these rows of a packed weight."""
    parts, options = _packed_rows(layer, rows), {"group_size": layer.group_size, "bits": layer.bits}
    return mx.quantized_matmul(x, parts["weight"], parts["scales"], parts.get("biases"), mode=layer.mode, **options)


def _packed_rows(layer: nn.Module, rows: mx.array | slice) -> dict[str, mx.array]:
    return {part: layer[part][rows] for part in PARTS if part in layer}


class Attention(nn.Module):
    """Attention up to its output projection, which ends the residual block."""

    def __init__(self, config: TextConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.layer = layer
        self.eps = config.rms_norm_eps
        q_width, kv_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(layer.head_dim)
        self.k_norm = nn.RMSNorm(layer.head_dim)

    def __call__(self, x: mx.array, kernels: Kernels, angles: Any, plan: Any) -> mx.array:
        layer = self.layer
        q, k, v = project(kernels, x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = kernels.qkv_prep(
            q, k, v, self.q_norm.weight, self.k_norm.weight, angles, head_dim=layer.head_dim, eps=self.eps
        )
        return kernels.attention(q, k, v, plan)


class MLP(nn.Module):
    """gelu(gate(x))·up(x), which the down projection of the residual block's end takes."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array, kernels: Kernels) -> mx.array:
        if type(self.gate_proj) is type(self.up_proj) is nn.Linear:
            return kernels.gated(x, self.gate_proj.weight, self.up_proj.weight)
        return kernels.gelu_mul(*project(kernels, x, self.gate_proj, self.up_proj))


class PLEBlock(nn.Module):
    """gelu(gate(x))·p, p this layer's per-layer embedding, which the projection of the residual block's end takes."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.per_layer_input_gate = nn.Linear(config.hidden_size, config.hidden_size_per_layer_input, bias=False)
        self.per_layer_projection = nn.Linear(config.hidden_size_per_layer_input, config.hidden_size, bias=False)
        self.post_per_layer_input_norm = nn.RMSNorm(config.hidden_size)

    def __call__(self, x: mx.array, p: mx.array, kernels: Kernels) -> mx.array:
        if type(self.per_layer_input_gate) is nn.Linear:
            return kernels.linear_gelu_mul(x, self.per_layer_input_gate.weight, p)
        return kernels.gelu_mul(self.per_layer_input_gate(x), p)


class PLE(nn.Module):
    """Per-layer embeddings, a projection of the input embeddings x₀: p_l = rms(W_l·x₀·hidden^−½)·w.

    One layer's rows of W at a time for many tokens, of which all 24 would be [T, 24·512]; all at once for few, where
    launches count for more than memory.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.width = config.hidden_size_per_layer_input
        self.scale = config.hidden_size**-0.5
        self.eps = config.rms_norm_eps
        self.per_layer_model_projection = nn.Linear(
            config.hidden_size, config.num_hidden_layers * self.width, bias=False
        )
        self.per_layer_projection_norm = nn.RMSNorm(self.width)

    def __call__(self, x0: mx.array, kernels: Kernels) -> Callable[[int], mx.array]:
        """Input embeddings [T, hidden] → p_l [T, width] by layer."""
        projection = self.per_layer_model_projection
        ending: dict[str, Any] = {"eps": self.eps, "pre": self.scale}
        norm_w = self.per_layer_projection_norm.weight
        if type(projection) is nn.QuantizedLinear and not is_short(x0):
            return lambda layer: kernels.rms_norm(project_rows(x0, projection, self._rows(layer)), norm_w, **ending)
        if type(projection) is not nn.Linear:
            p = projection(x0)
            return lambda layer: kernels.rms_norm(p[:, self._rows(layer)], norm_w, **ending)
        w = projection.weight
        if is_short(x0):
            layers = w.shape[0] // self.width
            return kernels.linear_rms_norm(x0, w, norm_w, groups=layers, **ending).__getitem__
        return lambda layer: kernels.linear_rms_norm(x0, w[self._rows(layer)], norm_w, **ending)

    def _rows(self, layer: int) -> slice:
        return slice(layer * self.width, (layer + 1) * self.width)


class Layer(nn.Module):
    def __init__(self, config: TextConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.ple_block = PLEBlock(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size)
        self.pre_feedforward_layernorm = nn.RMSNorm(config.hidden_size)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size)
        self.layer_scalar = mx.ones((1,))

    def __call__(
        self,
        h: mx.array,
        x: mx.array,
        p: mx.array,
        next_w: mx.array | None,
        kernels: Kernels,
        angles: Any,
        plan: Any,
    ) -> tuple[mx.array, mx.array | None]:
        """The residual stream h and its norm x → the same after this layer, x normed by `next_w`."""
        attention, mlp, ple = self.self_attn, self.mlp, self.ple_block
        attended = attention(x, kernels, angles, plan)
        next_norm = self.pre_feedforward_layernorm.weight
        h, x = project_add_norm(
            kernels, attended, attention.o_proj, h, self.post_attention_layernorm, self.eps, next_w=next_norm
        )
        h, _ = project_add_norm(kernels, mlp(x, kernels), mlp.down_proj, h, self.post_feedforward_layernorm, self.eps)
        return project_add_norm(
            kernels,
            ple(h, p, kernels),
            ple.per_layer_projection,
            h,
            ple.post_per_layer_input_norm,
            self.eps,
            post=self.layer_scalar,
            next_w=next_w,
        )


def rope_kinds(config: TextConfig) -> list[tuple[int, float]]:
    """The (head_dim, θ) pairs of the layers, in the order of `RopeTables`."""
    return sorted({(layer.head_dim, layer.rope_theta) for layer in config.layers})


class RopeTables:
    """RoPE's cos and sin by position, one table for each of `rope_kinds`, grown when a longer input comes."""

    def __init__(self, config: TextConfig) -> None:
        self.kinds = rope_kinds(config)
        self.length = 0
        self.tables: list[Rope] = []

    def __call__(self, length: int) -> list[Rope]:
        """Tables for positions below `length` or more. They grow eightfold, because a new size is a new trace."""
        if length > self.length:
            size = max(self.length, 1024)
            while size < length:
                size *= 8
            self.tables, self.length = [rope_table(size, *kind) for kind in self.kinds], size
        return self.tables


class TextModel(nn.Module):
    """Token ids → the residual stream before the final norm, and the projection after it."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.ple = PLE(config)
        self.layers = [Layer(config, layer) for layer in config.layers]
        self.norm = nn.RMSNorm(config.hidden_size)
        self.embedding_projection = nn.Linear(config.hidden_size, config.embedding_dim, bias=False)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [T] → input embeddings [T, hidden] float32; only the gathered rows of the table are widened."""
        return look_up(self.embed_tokens, tokens) * math.sqrt(self.config.hidden_size)

    def __call__(self, x0: mx.array, packed: Packed, tables: list[Rope], kernels: Kernels) -> mx.array:
        """Input embeddings [T, hidden] → the residual stream [T, hidden] after the last layer.

        Args:
            tables: from `RopeTables`.
        """
        kinds = rope_kinds(self.config)
        angles = {kind: kernels.rope(table, packed.positions) for kind, table in zip(kinds, tables, strict=True)}
        plans = {window: kernels.plan(packed, window) for window in {layer.window for layer in self.config.layers}}
        norms = [layer.input_layernorm.weight for layer in self.layers]
        ple = self.ple(x0, kernels)
        h, x = x0, kernels.rms_norm(x0, norms[0], eps=self.config.rms_norm_eps)
        for index, (layer, spec) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            next_w = norms[index + 1] if index + 1 < len(norms) else None
            h, x = layer(h, x, ple(index), next_w, kernels, angles[spec.head_dim, spec.rope_theta], plans[spec.window])
        return h
