// Four neighbours at once, widened to float32 (bfloat16 → float32 is exact).
//
// MLX binds an array of fewer than eight elements in the `constant` address space, hence two of each.
#include <metal_stdlib>
using namespace metal;

// For loops over what a lane holds in registers, which an index that is not constant would send to memory.
#define UNROLLED _Pragma("clang loop unroll(full)")

METAL_FUNC float4 widened(float4 v) {
  return v;
}

METAL_FUNC float4 widened(vec<bfloat16_t, 4> v) {
  return float4(float(v[0]), float(v[1]), float(v[2]), float(v[3]));
}

template <typename T>
METAL_FUNC float4 load4(const device T* p) {
  return widened(*(const device vec<T, 4>*)p);
}

template <typename T>
METAL_FUNC float4 load4(const constant T* p) {
  return widened(*(const constant vec<T, 4>*)p);
}

METAL_FUNC void store4(device float* p, float4 v) {
  *(device float4*)p = v;
}

// Four elements of `table[row][column…]`, zeros outside rows × columns.
template <typename P>
METAL_FUNC float4 load4_within(P table, int row, int column, int rows, int columns, int stride) {
  return row < rows && column < columns ? load4(table + ulong(row) * stride + column) : float4(0.0f);
}
