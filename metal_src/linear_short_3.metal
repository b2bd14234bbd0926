// y0 = x·w0ᵀ, y1 = x·w1ᵀ, y2 = x·w2ᵀ in one launch (q, k and v), for few rows
//
//   x [T, K] float32, w_i [M_i, K] float32 or bfloat16, all alike → y_i [T, M_i] float32, K and M_i multiples of 4
//
// Threadgroup (i, j) of eight simdgroups computes 8·R rows × 16 columns from row 8·R·j, column 16·i on (short.h).
// A row of threadgroups counts through the sixteens of y0, then of y1, then of y2.
// Rounding: float32 throughout.
threadgroup float sums[short_groups * 8 * R * short_columns];

const int rows = x_shape[0], row = 8 * R * int(threadgroup_position_in_grid.y);
const int tile = threadgroup_position_in_grid.x;
const int second = (w0_shape[0] + 15) / 16, third = second + (w1_shape[0] + 15) / 16;
const auto w = tile < second ? w0 : tile < third ? w1 : w2;
device float* y = tile < second ? y0 : tile < third ? y1 : y2;
const int columns = tile < second ? w0_shape[0] : tile < third ? w1_shape[0] : w2_shape[0];
const int column = short_columns * (tile < second ? tile : tile < third ? tile - second : tile - third);
short_product<R, 2>(
    Inputs<decltype(x)>{x, rows, x_shape[1]}, Band<decltype(w)>{w, columns, column},
    Band<decltype(w)>{w, columns, column + 8}, row, sums, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

for (int i = thread_index_in_threadgroup; i < 8 * R * short_columns; i += 256) {
  const int r = i / short_columns, c = i % short_columns;
  if (row + r < rows && column + c < columns) {
    y[ulong(row + r) * columns + column + c] = short_sum<R, 2>(sums, r, c);
  }
}
