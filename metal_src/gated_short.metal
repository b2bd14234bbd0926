// y = gelu_tanh(x·gateᵀ)·(x·upᵀ), for few rows
//
//   x [T, K] float32, gate, up [M, K] float32 or bfloat16, both alike → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) of eight simdgroups computes 8·R rows × 16 columns from row 8·R·j, column 16·i on (short.h).
// The low band has x·gateᵀ, the high one x·upᵀ.
// Rounding: float32 throughout.
threadgroup float sums[short_groups * 8 * R * 2 * short_columns];

const int rows = x_shape[0], row = 8 * R * int(threadgroup_position_in_grid.y);
const int columns = gate_shape[0], column = short_columns * int(threadgroup_position_in_grid.x);
short_product<R, 4>(
    Inputs<decltype(x)>{x, rows, x_shape[1]}, Band<decltype(gate)>{gate, columns, column},
    Band<decltype(gate)>{up, columns, column}, row, sums, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

for (int i = thread_index_in_threadgroup; i < 8 * R * short_columns; i += 256) {
  const int r = i / short_columns, c = i % short_columns;
  if (row + r < rows && column + c < columns) {
    const float g = short_sum<R, 4>(sums, r, c), u = short_sum<R, 4>(sums, r, short_columns + c);
    y[ulong(row + r) * columns + column + c] = gelu_tanh(g) * u;
  }
}
