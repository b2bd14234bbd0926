// y = p·v
//
//   p [T, K], v [K, M] float32 → y [T, M] float32, K and M multiples of 4
//
// Threadgroup (i, j) computes the 64 × 64 tile at row 64·j, column 64·i (gemm.h has the mapping and the rounding).
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    gemm_tile * int(threadgroup_position_in_grid.y),
    gemm_tile * int(threadgroup_position_in_grid.x)};
const GemmShape shape = {p_shape[0], v_shape[1], p_shape[1], p_shape[1], v_shape[1], v_shape[1]};
gemm<true>(p, v, y, shape, self, x_tile, w_tile);
