// Matrix fragments: how the 32 lanes of a simdgroup hold an 8×8 matrix.
//
//   Lane l holds two neighbours of one row, (r, c) and (r, c + 1), where in the bits l₄l₃l₂l₁l₀ of l
//   r = l₄l₂l₁ and c = l₃l₀0. Lanes that differ in l₀ and l₃ alone share a row.
//
// Known from MLX's steel kernels (BaseMMAFrag); fragment_probe.metal compares it with the GPU at hand.
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

METAL_FUNC uint fragment_row(uint lane) {
  return ((lane >> 2) & 4) | ((lane >> 1) & 3);
}

METAL_FUNC uint fragment_column(uint lane) {
  return ((lane >> 1) & 4) | ((lane & 1) << 1);
}

METAL_FUNC simdgroup_float8x8 zero_fragment() {
  return make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

// The greatest and the sum of one value a lane over the four lanes that share a row.
METAL_FUNC float row_max(float value) {
  value = max(value, simd_shuffle_xor(value, 1));
  return max(value, simd_shuffle_xor(value, 8));
}

METAL_FUNC float row_sum(float value) {
  value += simd_shuffle_xor(value, 1);
  return value + simd_shuffle_xor(value, 8);
}
