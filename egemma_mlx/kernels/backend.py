"""Which implementation of the kernel functions runs."""

from __future__ import annotations

from typing import Literal, get_args

import mlx.core as mx

from egemma_mlx.config import TextConfig, VisionConfig
from egemma_mlx.errors import EgemmaError
from egemma_mlx.kernels import OPS, Kernels, metal_kernels
from egemma_mlx.kernels.approx import on_cpu
from egemma_mlx.kernels.library import Library
from egemma_mlx.kernels.selfcheck import Widths, verified

Backend = Literal["auto", "metal", "ops", "simulator"]


def select(backend: Backend, config: TextConfig, vision: VisionConfig | None = None) -> Kernels:
    """The kernel functions of a backend, for a text model of these widths, and a vision tower if it is to run.

    Args:
        backend: "metal": the kernels of `metal_src/`, each checked against float64 first; "ops": plain MLX operations,
            on any device; "simulator": the Metal kernels on the CPU, with every check, a thousand times slower;
            "auto": metal where the default device is a Metal GPU, else ops.

    Raises:
        EgemmaError: an unknown backend, or one that does not run here.
    """
    chosen = picked(backend)
    if chosen == "ops":
        return OPS
    if chosen == "simulator":
        return metal_kernels(simulator_library(), chosen)
    library = Library(mx.fast.metal_kernel)
    return verified(metal_kernels(library, chosen), library, Widths.of(config, vision))


def picked(backend: Backend) -> Literal["metal", "ops", "simulator"]:
    """What `backend` stands for here, found without running a kernel.

    Raises:
        EgemmaError: an unknown backend, or Metal where it is not.
    """
    if backend not in get_args(Backend):
        raise EgemmaError(f"expected backend {', '.join(map(repr, get_args(Backend)))} but got {backend!r}")
    has_metal = mx.metal.is_available() and not on_cpu()
    if backend == "auto":
        return "metal" if has_metal else "ops"
    if backend == "metal" and not has_metal:
        raise EgemmaError(f"expected a Metal GPU for backend 'metal' but MLX runs on {mx.default_device()}")
    return backend


def simulator_library() -> Library:
    """The Metal kernels as the simulator runs them."""
    from egemma_mlx import simulator  # looks for a compiler and pyelftools, which only this backend needs

    return Library(simulator.metal_kernel)
