// h' = (h + rms(x·wᵀ)·norm_w)·post: the last product of a residual block and its end
//
//   x [T, K], h [T, M] float32, w [M, K], norm_w [M], post [1] float32 or bfloat16, eps → h_out [T, M] float32;
//   K and M multiples of 4, M ≤ 512
//
// Threadgroup j computes rows 32·j … 32·j + 31 whole, a simdgroup for every 64 columns (whole.h); products as in
// columns.h.
// Rounding: float32 throughout.
threadgroup float slices[2 * whole_rows * slice_stride], sums[most_groups * whole_rows];

const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const uint groups = threads_per_threadgroup.x / 32;
const int row = whole_rows * int(threadgroup_position_in_grid.y), column = 64 * int(group);
const int rows = x_shape[0], columns = w_shape[0];
const SharedThread self = {int(thread_index_in_threadgroup), int(32 * groups), lane, row, row};
Tile<4, 8> tile;
shared_product<whole_rows>(
    tile, Inputs<decltype(x)>{x, rows, x_shape[1]}, Band<decltype(w)>{w, columns, column},
    Band<decltype(w)>{w, columns, column + 32}, self, slices);
const float4 inverse = whole_inverse_rms(tile, sums, float(columns), eps, group, groups, lane);
whole_residual(tile, h, norm_w, float(post[0]), inverse, row, column, rows, columns, lane);
whole_store(tile, h_out, row, column, rows, columns, lane);
