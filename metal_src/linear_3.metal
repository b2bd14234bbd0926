// y0 = x·w0ᵀ, y1 = x·w1ᵀ, y2 = x·w2ᵀ in one launch (q, k and v)
//
//   x [T, K] float32, w_i [M_i, K] float32 or bfloat16, all alike → y_i [T, M_i] float32, K and M_i multiples of 4
//
// As linear.metal, with a row of threadgroups counting through the tiles of y0, then of y1, then of y2.
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const int tile = threadgroup_position_in_grid.x;
const int second = gemm_tiles(w0_shape[0]), third = second + gemm_tiles(w1_shape[0]);
const auto w = tile < second ? w0 : tile < third ? w1 : w2;
device float* y = tile < second ? y0 : tile < third ? y1 : y2;
const int columns = tile < second ? w0_shape[0] : tile < third ? w1_shape[0] : w2_shape[0];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    gemm_tile * int(threadgroup_position_in_grid.y),
    gemm_tile * (tile < second ? tile : tile < third ? tile - second : tile - third)};
const GemmShape shape = {x_shape[0], columns, x_shape[1], x_shape[1], x_shape[1], columns};
gemm<false>(x, w, y, shape, self, x_tile, w_tile);
