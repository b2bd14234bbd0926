// y = x·wᵀ
//
//   x [T, K] float32, w [M, K] float32 or bfloat16 → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) computes the 64 × 64 tile at row 64·j, column 64·i (gemm.h has the mapping and the rounding).
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    gemm_tile * int(threadgroup_position_in_grid.y),
    gemm_tile * int(threadgroup_position_in_grid.x)};
const GemmShape shape = {x_shape[0], w_shape[0], x_shape[1], x_shape[1], x_shape[1], w_shape[0]};
gemm<false>(x, w, y, shape, self, x_tile, w_tile);
