// y = gelu_tanh(x·gateᵀ)·(x·upᵀ), a gated linear unit
//
//   x [T, K] float32, gate, up [M, K] float32 or bfloat16, both alike → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) of eight simdgroups computes 64 rows × 128 columns; a simdgroup's tile has 32 columns of x·gateᵀ in
// its low band and the same of x·upᵀ in its high one, so that neither is ever stored. Rounding: float32 throughout.
threadgroup float slices[2 * 64 * slice_stride];

const uint lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup, first_row = 64 * int(threadgroup_position_in_grid.y);
const int row = first_row + 32 * (group / 4), rows = x_shape[0], columns = gate_shape[0];
const int column = 128 * int(threadgroup_position_in_grid.x) + 32 * (group % 4);
const SharedThread self = {int(thread_index_in_threadgroup), 256, lane, first_row, row};
Tile<4, 8> tile;
shared_product<64>(
    tile, Inputs<decltype(x)>{x, rows, x_shape[1]}, Band<decltype(gate)>{gate, columns, column},
    Band<decltype(gate)>{up, columns, column}, self, slices);

UNROLLED for (int i = 0; i < 4; ++i) {
  const int r = row + 8 * i + int(fragment_row(lane));
  UNROLLED for (int n = 0; n < 4; ++n) {
    const int c = column + 8 * n + int(fragment_column(lane));
    const float2 g = pair_of(tile.sum[i][n]), u = pair_of(tile.sum[i][n + 4]);
    if (r < rows && c < columns) {
      store_pair(y + ulong(r) * columns + c, gelu_tanh(g) * u);
    }
  }
}
