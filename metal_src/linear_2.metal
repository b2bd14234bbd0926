// y0 = x·w0ᵀ, y1 = x·w1ᵀ in one launch (gate and up)
//
//   x [T, K] float32, w_i [M_i, K] float32 or bfloat16, both alike → y_i [T, M_i] float32, K and M_i multiples of 4
//
// As linear.metal, with a row of threadgroups counting through the tiles of y0, then of y1.
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const int tile = threadgroup_position_in_grid.x, second = gemm_tiles(w0_shape[0]);
const auto w = tile < second ? w0 : w1;
device float* y = tile < second ? y0 : y1;
const int columns = tile < second ? w0_shape[0] : w1_shape[0];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    gemm_tile * int(threadgroup_position_in_grid.y),
    gemm_tile * (tile < second ? tile : tile - second)};
const GemmShape shape = {x_shape[0], columns, x_shape[1], x_shape[1], x_shape[1], columns};
gemm<false>(x, w, y, shape, self, x_tile, w_tile);
