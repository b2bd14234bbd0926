// out[64·b + r, h] = Σ_c weights[b, h, r, c]·v[lo + c, h / group],  lo the first key of block b
//
//   weights [blocks, heads, 64, span] float32 (from softmax.metal), v [T, kv_heads·D] float32, bounds [T, 2] int32,
//   first (of these blocks), kv_heads → out [rows of these blocks, heads·D] float32
//
// Threadgroup (i, h, b) computes 64 channels of a block of 64 queries (gemm.h has the mapping and the rounding).
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const int rows = v_shape[0], heads = weights_shape[1], span = weights_shape[3];
const int columns = v_shape[1] / kv_heads, head = threadgroup_position_in_grid.y;
const int block = gemm_tile * int(threadgroup_position_in_grid.z), row = gemm_tile * first + block;
const int count = min(rows - row, int(gemm_tile));
const int lo = bounds[2 * row], hi = bounds[2 * (row + count) - 1];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    0,
    gemm_tile * int(threadgroup_position_in_grid.x)};
const GemmShape shape = {count, columns, hi - lo, span, v_shape[1], heads * columns};
gemm<true>(
    weights + (ulong(threadgroup_position_in_grid.z) * heads + head) * gemm_tile * span,
    v + ulong(lo) * v_shape[1] + head / (heads / kv_heads) * columns,
    out + ulong(block) * heads * columns + head * columns, shape, self, x_tile, w_tile);
