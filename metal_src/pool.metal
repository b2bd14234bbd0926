// out[s] = (1/n_s) Σ_t rms(h[t])·w,  t over the n_s rows of segment s that hold a token (position ≥ 0); 0 for n_s = 0
//
//   h [T, D] float32, w [D] float32 or bfloat16, positions [T], segments [S, 2] (start, length) int32, eps
//   → out [S, D] float32
//
// One threadgroup of eight simdgroups a segment: simdgroup g takes rows g, g + 8, … and adds in registers; the eight
// sums meet in threadgroup memory, 128 columns at a time. D is a multiple of 4.
// Rounding: float32; 1/8 of a segment's rows are added in order, then the eight sums.
constexpr uint groups = 8;
threadgroup float sums[groups * 128];
threadgroup uint counts[groups];

const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const uint segment = threadgroup_position_in_grid.z;
const int rows = positions_shape[0];
const int start = clamp(segments[2 * segment], 0, rows);
const int stop = min(start + max(segments[2 * segment + 1], 0), rows);

Row<D> sum;
UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
  sum.slot[i] = float4(0.0f);
}
uint count = 0;
for (int t = start + int(group); t < stop; t += groups) {
  if (positions[t] >= 0) {
    const Row<D> row = load_row<D>(h + ulong(t) * D, lane);
    const float scale = inverse_rms<D>(row, eps);
    UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
      sum.slot[i] += row.slot[i] * scale;
    }
    ++count;
  }
}

if (lane == 0) {
  counts[group] = count;
}
UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  *(threadgroup float4*)(sums + 128 * group + 4 * lane) = sum.slot[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint column = row_column<D>(lane, i);
  if (group == 0 && column < D) {
    float4 total = float4(0.0f);
    uint tokens = 0;
    for (uint g = 0; g < groups; ++g) {
      total += *(threadgroup float4*)(sums + 128 * g + 4 * lane);
      tokens += counts[g];
    }
    store4(out + ulong(segment) * D + column, total * load4(w + column) / float(max(tokens, 1u)));
  }
}
