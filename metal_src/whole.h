// x·wᵀ in whole rows, so that a row norm can follow: 32 rows × M columns, M ≤ 512, a threadgroup.
//
// Each simdgroup holds 32 × 64 (shared.h); a sum over a row is one over the four lanes that share it in a fragment, then
// over the simdgroups through threadgroup memory.
enum : int { whole_rows = 32, most_groups = 8 };

// 1/rms of the four rows of which this lane holds pairs: (Σ y² / width + eps)^−½. `sums` is [8, 32], written here alone.
METAL_FUNC float4 whole_inverse_rms(
    thread Tile<4, 8>& tile, threadgroup float* sums, float width, float eps, uint group, uint groups, uint lane) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    float square = 0.0f;
    UNROLLED for (int n = 0; n < 8; ++n) {
      const float2 pair = pair_of(tile.sum[i][n]);
      square += pair[0] * pair[0] + pair[1] * pair[1];
    }
    square = row_sum(square);
    if (fragment_column(lane) == 0) {
      sums[whole_rows * group + 8 * i + fragment_row(lane)] = square;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float4 inverse;
  UNROLLED for (int i = 0; i < 4; ++i) {
    float total = 0.0f;
    for (uint g = 0; g < groups; ++g) {
      total += sums[whole_rows * g + 8 * i + fragment_row(lane)];
    }
    inverse[i] = precise::rsqrt(total / width + eps);
  }
  return inverse;
}

// Two neighbours of a weight; the arrays of norms have no bands.
template <typename W>
METAL_FUNC float2 weight_pair(W w, int column) {
  return float2(float(w[column]), float(w[column + 1]));
}

// The tile becomes h' = (h + rms(tile)·w)·post; columns outside stay 0.
template <typename H, typename W>
METAL_FUNC void whole_residual(
    thread Tile<4, 8>& tile, H h, W w, float post, float4 inverse, int row, int column, int rows, int columns,
    uint lane) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    const int r = row + 8 * i + int(fragment_row(lane));
    UNROLLED for (int n = 0; n < 8; ++n) {
      const int c = column + 8 * n + int(fragment_column(lane));
      float2 pair = pair_of(tile.sum[i][n]) * inverse[i];
      if (r < rows && c < columns) {
        const ulong at = ulong(r) * columns + c;
        pair = (float2(h[at], h[at + 1]) + pair * weight_pair(w, c)) * post;
      }
      tile.sum[i][n].thread_elements()[0] = pair[0];
      tile.sum[i][n].thread_elements()[1] = pair[1];
    }
  }
}

METAL_FUNC void whole_store(
    thread Tile<4, 8>& tile, device float* y, int row, int column, int rows, int columns, uint lane) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    const int r = row + 8 * i + int(fragment_row(lane));
    UNROLLED for (int n = 0; n < 8; ++n) {
      const int c = column + 8 * n + int(fragment_column(lane));
      const float2 pair = pair_of(tile.sum[i][n]);
      if (r < rows && c < columns) {
        store_pair(y + ulong(r) * columns + c, pair);
      }
    }
  }
}

// y = rms(tile)·w
template <typename W>
METAL_FUNC void whole_store_normed(
    thread Tile<4, 8>& tile, device float* y, W w, float4 inverse, int row, int column, int rows, int columns,
    uint lane) {
  UNROLLED for (int i = 0; i < 4; ++i) {
    const int r = row + 8 * i + int(fragment_row(lane));
    UNROLLED for (int n = 0; n < 8; ++n) {
      const int c = column + 8 * n + int(fragment_column(lane));
      const float2 pair = pair_of(tile.sum[i][n]) * inverse[i];
      if (r < rows && c < columns) {
        store_pair(y + ulong(r) * columns + c, pair * weight_pair(w, c));
      }
    }
  }
}
