// h' = (h + rms(y)·w)·post
//
//   h, y [T, D] float32, w [D] and post [1] float32 or bfloat16, eps → h_out [T, D] float32
//
// One simdgroup a row, four rows a threadgroup; both rows are read once. D is a multiple of 4.
// Rounding: float32 throughout, as rms_norm.metal.
const uint lane = thread_index_in_simdgroup;
const ulong at = ulong(thread_position_in_grid.y) * D;

store_row<D>(h_out + at, residual_row<D>(h + at, y + at, w, float(post[0]), eps, lane), lane);
