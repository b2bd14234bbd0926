// x·wᵀ over the whole depth, for simdgroups that share the rows of x: ROWS of them in slices, two buffers in turn.
//
// While the simdgroups multiply one slice, they fill the other buffer with the next: one barrier a slice. A tile is 32
// rows × 64 columns: two bands of 32, from `row` and the bands' columns on; one that lies outside multiplies nothing.
// Where a simdgroup works: thread `index` of `threads`, on rows `first_row` … of which its own begin at `row`.
struct SharedThread {
  int index;
  int threads;
  uint lane;
  int first_row;
  int row;
};

template <int ROWS, typename X, typename W>
METAL_FUNC void shared_product(
    thread Tile<4, 8>& tile,
    Inputs<X> in,
    Band<W> low,
    Band<W> high,
    SharedThread self,
    threadgroup float* slices) {
  const bool busy = self.row < in.rows;
  clear_tile(tile);
  share_slice(in, slices, self.first_row, ROWS, 0, self.index, self.threads);
  for (int k = 0; k < in.depth; k += slice_depth) {
    threadgroup float* here = slices + k / slice_depth % 2 * ROWS * slice_stride;
    threadgroup float* next = slices + (k / slice_depth + 1) % 2 * ROWS * slice_stride;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k + slice_depth < in.depth) {
      share_slice(in, next, self.first_row, ROWS, k + slice_depth, self.index, self.threads);
    }
    const threadgroup float* own = here + (self.row - self.first_row) * slice_stride;
    if (busy && low.column < low.columns) {
      multiply_shared(tile, 0, own, low, k, in.depth, self.lane);
    }
    if (busy && high.column < high.columns) {
      multiply_shared(tile, 4, own, high, k, in.depth, self.lane);
    }
  }
}

// The column of x·wᵀ that the lane's pair in column fragment n of a tile begins with.
template <typename W>
METAL_FUNC int pair_column(Band<W> low, Band<W> high, int n, uint lane) {
  return (n < 4 ? low.column + 8 * n : high.column + 8 * (n - 4)) + int(fragment_column(lane));
}
