// scores[b, h, r, c] = q[64·b + r, h]·k[lo + c, h / group],  lo the first key of block b
//
//   q [T, heads·D], k [T, kv_heads·D] float32, bounds [T, 2] int32, first (of these blocks), heads, kv_heads, span
//   → scores [blocks, heads, 64, span] float32, of which columns past the block's last key stay unwritten
//
// Threadgroup (i, h, b) computes 64 keys of a block of 64 queries (gemm.h has the mapping and the rounding).
threadgroup float x_tile[gemm_memory], w_tile[gemm_memory];

const int rows = q_shape[0], head = threadgroup_position_in_grid.y;
const int depth = q_shape[1] / heads;
const int row = gemm_tile * (first + int(threadgroup_position_in_grid.z));
const int count = min(rows - row, int(gemm_tile));
const int lo = bounds[2 * row], hi = bounds[2 * (row + count) - 1];

const GemmThread self = {
    thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup,
    0,
    gemm_tile * int(threadgroup_position_in_grid.x)};
if (self.column < hi - lo) {
  const GemmShape shape = {count, hi - lo, depth, q_shape[1], k_shape[1], span};
  const ulong at = (ulong(threadgroup_position_in_grid.z) * heads + head) * gemm_tile * span;
  gemm<false>(
      q + ulong(row) * q_shape[1] + head * depth,
      k + ulong(lo) * k_shape[1] + head / (heads / kv_heads) * depth,
      scores + at, shape, self, x_tile, w_tile);
}
