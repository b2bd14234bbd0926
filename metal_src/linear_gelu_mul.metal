// y = gelu_tanh(x·wᵀ)·p
//
//   x [T, K], p [T, M] float32, w [M, K] float32 or bfloat16 → y [T, M] float32, K and M multiples of 4
//
// As linear.metal: threadgroup (i, j) of eight simdgroups computes 64 rows × 256 columns.
// Rounding: float32 throughout.
threadgroup float slices[2 * 64 * slice_stride];

const uint lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup, first_row = 64 * int(threadgroup_position_in_grid.y);
const int row = first_row + 32 * (group / 4), rows = x_shape[0], columns = w_shape[0];
const int column = 256 * int(threadgroup_position_in_grid.x) + 64 * (group % 4);
const Band<decltype(w)> low = {w, columns, column}, high = {w, columns, column + 32};
const SharedThread self = {int(thread_index_in_threadgroup), 256, lane, first_row, row};
Tile<4, 8> tile;
shared_product<64>(tile, Inputs<decltype(x)>{x, rows, x_shape[1]}, low, high, self, slices);

UNROLLED for (int i = 0; i < 4; ++i) {
  const int r = row + 8 * i + int(fragment_row(lane));
  UNROLLED for (int n = 0; n < 8; ++n) {
    const int c = pair_column(low, high, n, lane);
    const float2 pair = pair_of(tile.sum[i][n]);
    if (r < rows && c < columns) {
      const ulong at = ulong(r) * columns + c;
      store_pair(y + at, gelu_tanh(pair) * float2(p[at], p[at + 1]));
    }
  }
}
