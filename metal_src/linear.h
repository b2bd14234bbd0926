// A simdgroup's 32 rows × 64 columns of y = x·wᵀ, from `column` on (shared.h has the loop).
template <typename X, typename W>
METAL_FUNC void linear_tile(
    X x, int rows, int depth, W w, device float* y, int columns, int column, SharedThread self,
    threadgroup float* slices) {
  const Band<W> low = {w, columns, column}, high = {w, columns, column + 32};
  Tile<4, 8> tile;
  shared_product<64>(tile, Inputs<X>{x, rows, depth}, low, high, self, slices);
  UNROLLED for (int i = 0; i < 4; ++i) {
    const int row = self.row + 8 * i + int(fragment_row(self.lane));
    UNROLLED for (int n = 0; n < 8; ++n) {
      const int c = pair_column(low, high, n, self.lane);
      const float2 pair = pair_of(tile.sum[i][n]);
      if (row < rows && c < columns) {
        store_pair(y + ulong(row) * columns + c, pair);
      }
    }
  }
}
