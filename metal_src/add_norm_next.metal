// h' = (h + rms(y)·w)·post and a = rms(h')·next_w: the end of a residual block and the pre-norm of the next
//
//   h, y [T, D] float32, w, next_w [D] and post [1] float32 or bfloat16, eps → h_out, a [T, D] float32
//
// One simdgroup a row, four rows a threadgroup; h' goes from registers into its norm. D is a multiple of 4.
// Rounding: float32 throughout, as rms_norm.metal.
const uint lane = thread_index_in_simdgroup;
const ulong at = ulong(thread_position_in_grid.y) * D;

const Row<D> row = residual_row<D>(h + at, y + at, w, float(post[0]), eps, lane);
store_row<D>(h_out + at, row, lane);
store_row<D>(a + at, weighted<D>(row, inverse_rms<D>(row, eps), next_w, lane), lane);
