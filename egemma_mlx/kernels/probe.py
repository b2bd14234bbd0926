"""How the 32 lanes of a simdgroup hold an 8×8 matrix fragment, asked of the GPU before a kernel relies on it."""

from __future__ import annotations

import mlx.core as mx

from egemma_mlx.kernels.library import Library, Source, launch

_FRAGMENT_PROBE = Source("fragment_probe", (), ("out",), ("fragment",))


def fragment_probe() -> mx.array:
    """[32, 4] float32: the two elements of the matrix 8·row + column that each lane holds, twice.

    Lane bits l₄l₃l₂l₁l₀ hold row l₄l₂l₁, columns l₃l₀0 and l₃l₀1 (MLX's steel kernels, BaseMMAFrag).
    """
    lane = mx.arange(32)
    row = (lane >> 4) * 4 + ((lane >> 1) & 3)
    column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2
    first = 8 * row + column
    return mx.stack([first, first + 1, first, first + 1], axis=1).astype(mx.float32)


def metal_fragment_probe(library: Library) -> mx.array:
    """The same, columns 0 and 1 as the GPU has them and 2 and 3 as `fragment.h` computes them."""
    kernel = library(_FRAGMENT_PROBE)
    return launch(kernel, grid=(32, 1, 1), threadgroup=(32, 1, 1), outputs=[(32, 4)])[0]
