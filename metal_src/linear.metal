// y = x·wᵀ
//
//   x [T, K] float32, w [M, K] float32 or bfloat16 → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) of eight simdgroups computes 64 rows × 256 columns from row 64·j, column 256·i on, each simdgroup
// 32 × 64 of them (columns.h has the products, linear.h the tile).
threadgroup float slices[2 * 64 * slice_stride];

const int group = simdgroup_index_in_threadgroup;
const SharedThread self = {
    int(thread_index_in_threadgroup),
    256,
    thread_index_in_simdgroup,
    64 * int(threadgroup_position_in_grid.y),
    64 * int(threadgroup_position_in_grid.y) + 32 * (group / 4)};
const int column = 256 * int(threadgroup_position_in_grid.x) + 64 * (group % 4);
linear_tile(x, x_shape[0], x_shape[1], w, y, w_shape[0], column, self, slices);
