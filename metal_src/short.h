// x·wᵀ for few rows, where the time is that of reading the weights: 8·R rows × 4·N columns a band, eight simdgroups.
//
// The simdgroups of a threadgroup take the depth's slices in turn and add up in threadgroup memory; every weight is read
// once for 8·R rows, by one lane, and there are as many threadgroups as there are sixteens of columns (columns.h has the
// products). Rounding: float32; a column is eight sums of every eighth slice, added in order.
enum : int { short_groups = 8, short_columns = 16 };

// This simdgroup's part of a tile into `sums` [8, 8·R, 8·N], and those of the others beside it.
template <int R, int N, typename X, typename W>
METAL_FUNC void short_product(
    Inputs<X> in, Band<W> low, Band<W> high, int row, threadgroup float* sums, int group, uint lane) {
  Tile<R, N> tile;
  clear_tile(tile);
  for (int k = slice_depth * group; k < in.depth; k += slice_depth * short_groups) {
    Fours inputs[R];
    UNROLLED for (int i = 0; i < R; ++i) {
      inputs[i] = input_fours(in, row + 8 * i, k, lane);
    }
    multiply_own(tile, 0, inputs, low, k, in.depth, lane);
    multiply_own(tile, N / 2, inputs, high, k, in.depth, lane);
  }
  UNROLLED for (int i = 0; i < R; ++i) {
    UNROLLED for (int n = 0; n < N; ++n) {
      simdgroup_store(tile.sum[i][n], sums + 8 * N * (8 * R * group + 8 * i) + 8 * n, 8 * N);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// One element of the tile, added up over the simdgroups.
template <int R, int N>
METAL_FUNC float short_sum(const threadgroup float* sums, int row, int column) {
  float total = 0.0f;
  UNROLLED for (int g = 0; g < short_groups; ++g) {
    total += sums[8 * N * (8 * R * g + row) + column];
  }
  return total;
}
