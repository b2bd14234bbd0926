// q' = rope(rms(q)·q_w),  k' = rope(rms(k)·k_w),  v' = rms(v),  each head on its own
//
//   q [T, heads·D], k, v [T, kv_heads·D] float32, q_w, k_w [D] float32 or bfloat16,
//   cos, sin [P, SECTION/2] float32 by position, positions [T, D/SECTION] int32, eps → q_out, k_out, v_out of the shapes
//   of q, k, v
//
// One simdgroup a head of a row: grid (32, heads + 2·kv_heads, T). A head stays in registers between norm and rotation
// (rope.h).
// Rounding: float32 throughout.
const uint lane = thread_index_in_simdgroup;
const uint row = thread_position_in_grid.z;
const uint heads = q_shape[1] / D, kv_heads = k_shape[1] / D;
const uint head = thread_position_in_grid.y;
const ulong place = ulong(row) * (D / SECTION);

if (head < heads) {
  const ulong at = (ulong(row) * heads + head) * D;
  const Pairs<D> x = load_head<D, SECTION>(q + at, eps, lane);
  store_rotated<D, SECTION>(x, q_w, cos, sin, cos_shape[0], positions + place, q_out + at, lane);
} else if (head < heads + kv_heads) {
  const ulong at = (ulong(row) * kv_heads + head - heads) * D;
  const Pairs<D> x = load_head<D, SECTION>(k + at, eps, lane);
  store_rotated<D, SECTION>(x, k_w, cos, sin, cos_shape[0], positions + place, k_out + at, lane);
} else {
  const ulong at = (ulong(row) * kv_heads + head - heads - kv_heads) * D;
  store_normed<D, SECTION>(load_head<D, SECTION>(v + at, eps, lane), v_out + at, lane);
}
