// y = gelu_tanh(x·wᵀ)·p, for few rows
//
//   x [T, K], p [T, M] float32, w [M, K] float32 or bfloat16 → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) of eight simdgroups computes 8·R rows × 16 columns from row 8·R·j, column 16·i on (short.h).
// Rounding: float32 throughout.
threadgroup float sums[short_groups * 8 * R * short_columns];

const int rows = x_shape[0], row = 8 * R * int(threadgroup_position_in_grid.y);
const int columns = w_shape[0], column = short_columns * int(threadgroup_position_in_grid.x);
short_product<R, 2>(
    Inputs<decltype(x)>{x, rows, x_shape[1]}, Band<decltype(w)>{w, columns, column},
    Band<decltype(w)>{w, columns, column + 8}, row, sums, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

for (int i = thread_index_in_threadgroup; i < 8 * R * short_columns; i += 256) {
  const int r = i / short_columns, c = i % short_columns;
  if (row + r < rows && column + c < columns) {
    const ulong at = ulong(row + r) * columns + column + c;
    y[at] = gelu_tanh(short_sum<R, 2>(sums, r, c)) * p[at];
  }
}
