"""What one launch of each kernel does, in closed form: one function a file of `metal_src/`.

They count as the simulator does (`egemma_mlx.simulator.Counters`): bytes as the lanes ask for them, `constant` memory
left out, 8×8×8 multiply-accumulates once a simdgroup, barriers once a threadgroup. Tests hold every formula to the
counters. Sizes are those of the kernel's header comment; `item` is the bytes of a weight's element, 2 or 4.
"""

from __future__ import annotations

from collections.abc import Callable

from egemma_mlx.cost.attention import (
    attention_bounds,
    attention_scores,
    attention_values,
    flash,
    flash_split,
    flash_staged,
    softmax,
)
from egemma_mlx.cost.products import (
    gated,
    gated_short,
    linear,
    linear_add_norm,
    linear_gelu_mul,
    linear_gelu_mul_short,
    linear_rms_norm,
    linear_short,
    linear_unit,
    matmul,
)
from egemma_mlx.cost.rows import add_norm, gelu_mul, pool, qkv_prep, rms_norm
from egemma_mlx.cost.work import FRAGMENT, Work


def fragment_probe() -> Work:
    """fragment_probe.metal: one simdgroup, run when a model is loaded and in no forward."""
    return Work(
        kernel="fragment_probe",
        threadgroups=1,
        threads=32,
        store_bytes=512,
        narrow_bytes=512,
        shared_load_bytes=FRAGMENT,
        shared_store_bytes=FRAGMENT,
        barriers=1,
        threadgroup_memory=FRAGMENT,
        written=128,
    )


FORMULAS: dict[str, Callable[..., Work]] = {
    "add_norm": add_norm,
    "add_norm_next": add_norm,
    "attention_bounds": attention_bounds,
    "attention_scores": attention_scores,
    "attention_values": attention_values,
    "flash": flash,
    "flash_split": flash_split,
    "flash_staged": flash_staged,
    "fragment_probe": fragment_probe,
    "gated": gated,
    "gated_short": gated_short,
    "gelu_mul": gelu_mul,
    "linear": linear,
    "linear_3": linear,
    "linear_add_norm": linear_add_norm,
    "linear_add_norm_next": linear_add_norm,
    "linear_gelu_mul": linear_gelu_mul,
    "linear_gelu_mul_short": linear_gelu_mul_short,
    "linear_rms_norm": linear_rms_norm,
    "linear_short": linear_short,
    "linear_short_3": linear_short,
    "linear_unit": linear_unit,
    "matmul": matmul,
    "pool": pool,
    "qkv_prep": qkv_prep,
    "rms_norm": rms_norm,
    "softmax": softmax,
}
"""The formula of every kernel in `metal_src/`."""
