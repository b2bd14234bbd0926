// y[t] = rms(x[t])·w,  rms(x) = x·(mean(x²) + eps)^−½
//
//   x [T, D] float32, w [D] float32 or bfloat16 (read if WEIGHTED), eps, groups → y [T, D] float32
//
// One simdgroup a row, four rows a threadgroup; the row is read once and stays in registers. D is a multiple of 4.
// Row t goes to row (t mod groups)·T/groups + t/groups: what lay side by side in `groups` groups then lies group by group.
// Rounding: float32 throughout; squares are summed within a lane, then across lanes.
const uint lane = thread_index_in_simdgroup;
const uint t = thread_position_in_grid.y, rows = threads_per_grid.y;
const uint place = t % groups * (rows / groups) + t / groups;

Row<D> row = load_row<D>(x + ulong(t) * D, lane);
const float scale = inverse_rms<D>(row, eps);
if (WEIGHTED) {
  row = weighted<D>(row, scale, w, lane);
} else {
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    row.slot[i] *= scale;
  }
}
store_row<D>(y + ulong(place) * D, row, lane);
