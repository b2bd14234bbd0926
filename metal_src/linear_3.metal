// y0 = x·w0ᵀ, y1 = x·w1ᵀ, y2 = x·w2ᵀ in one launch (q, k and v)
//
//   x [T, K] float32, w_i [M_i, K] float32 or bfloat16, all alike → y_i [T, M_i] float32, K and M_i multiples of 4
//
// As linear.metal, with a row of threadgroups counting through the tiles of y0, then of y1, then of y2.
threadgroup float slices[2 * 64 * slice_stride];

const int tile = threadgroup_position_in_grid.x;
const int second = (w0_shape[0] + 255) / 256, third = second + (w1_shape[0] + 255) / 256;
const auto w = tile < second ? w0 : tile < third ? w1 : w2;
device float* y = tile < second ? y0 : tile < third ? y1 : y2;
const int columns = tile < second ? w0_shape[0] : tile < third ? w1_shape[0] : w2_shape[0];
const int column = 256 * (tile < second ? tile : tile < third ? tile - second : tile - third);
const int group = simdgroup_index_in_threadgroup;
const SharedThread self = {
    int(thread_index_in_threadgroup),
    256,
    thread_index_in_simdgroup,
    64 * int(threadgroup_position_in_grid.y),
    64 * int(threadgroup_position_in_grid.y) + 32 * (group / 4)};
linear_tile(x, x_shape[0], x_shape[1], w, y, columns, column + 64 * (group % 4), self, slices);
