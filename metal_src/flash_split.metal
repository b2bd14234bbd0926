// out[t, h] = softmax(q[t, h]·k[·, h / group]ᵀ)·v[·, h / group] over the keys that row t meets, for wide heads
//
//   q [T, heads·D], k, v [T, kv_heads·D] float32, bounds [T, 2], positions [T] int32, window, heads, kv_heads
//   → out [T, heads·D] float32;  D a multiple of 256, R·D at most 1024, group = heads / kv_heads at most 8·R
//
// One threadgroup of eight simdgroups for 8·R / group rows of the batch, with all heads of a group: its query row r is
// head r % group of row r / group. So each key and value is read once for 8·R query rows, by the simdgroup that owns
// its columns, from device memory into fragments (flash_split.h). Keys go by in blocks of 64/R, from the first that the
// first row meets to the last that the last row does; a window w costs 2·w + 8·R / group keys a row, in eights.
// In a block, every simdgroup
//   multiplies its columns of all query rows and keys → parts of the scores,      then a barrier,
//   adds up the parts of R query rows and weighs them → weights, shrinks,         then a barrier,
//   adds its columns of the weighted values to its outputs; no more barriers, for parts are read in the second step
//   alone, weights and shrinks in the third alone.
// Rounding: float32 throughout; a score is the sum of eight parts, keys are added in order, block by block.
constexpr int block = 64 / R, columns = D / split_simdgroups;
threadgroup float parts[split_simdgroups * split_scores], weights[split_scores];
threadgroup float shrinks[8 * R], scales[8 * R];

const uint lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup;
const int rows = q_shape[0], q_stride = q_shape[1], stride = k_shape[1];
const int group = heads / kv_heads, kv_head = threadgroup_position_in_grid.z, count = 8 * R / group;
const int first = count * int(threadgroup_position_in_grid.y), last = min(first + count, rows) - 1;
const int first_key = bounds[2 * first], stop_key = bounds[2 * last + 1];
const auto keys = k + kv_head * D + columns * part;
const auto values = v + kv_head * D + columns * part;

// To multiply, a simdgroup has all query rows, and a lane one of each fragment. Rows past the end, and those that a
// group which does not divide 8·R leaves over, repeat others.
ulong at[R];
UNROLLED for (int r = 0; r < R; ++r) {
  const int own = 8 * r + int(fragment_row(lane));
  at[r] = ulong(min(first + own / group, rows - 1)) * q_stride + (kv_head * group + own % group) * D +
      columns * part;
}
FlashSplit<D, R> state = split_begin<D, R>(q, at, lane);

// To weigh, a simdgroup has R query rows, and a lane two keys of one.
const int weighed = R * int(part) + int(lane) / (32 / R), key_offset = 2 * (int(lane) % (32 / R));
const int place = split_place<R>(weighed, key_offset);
const int query = weighed / group < count ? first + weighed / group : rows;
SplitRow row = {flash_row(query, rows, bounds, positions), -1e30f, 0.0f};

for (int key = first_key; key < stop_key; key += block) {
  UNROLLED for (int j = 0; j < block / 8; ++j) {
    simdgroup_float8x8 s[R];
    UNROLLED for (int r = 0; r < R; ++r) {
      s[r] = zero_fragment();
    }
    if (key + 8 * j < stop_key) {
      split_multiply<D, R>(state, s, keys, key + 8 * j, rows, stride, lane);
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      const float2 pair = float2(s[r].thread_elements()[0], s[r].thread_elements()[1]);
      *(threadgroup float2*)(parts + split_scores * part + 64 * (r * (block / 8) + j) + 2 * lane) = pair;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float2 pair = float2(0.0f);
  UNROLLED for (int i = 0; i < split_simdgroups; ++i) {
    pair += *(threadgroup float2*)(parts + split_scores * i + place);
  }
  const int own_key = key + key_offset;
  const bool met = meets(own_key, row.self.position, row.self.lo, row.self.hi, window, positions);
  const bool next_met = meets(own_key + 1, row.self.position, row.self.lo, row.self.hi, window, positions);
  const float shrink = split_weigh<R>(row, pair, met, next_met);
  *(threadgroup float2*)(weights + place) = pair;
  if (key_offset == 0) {
    shrinks[weighed] = shrink;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  UNROLLED for (int r = 0; r < R; ++r) {
    const float factor = shrinks[8 * r + int(fragment_row(lane))];
    if (simd_any(factor != 1.0f)) {
      split_scale(state, r, factor);
    }
  }
  UNROLLED for (int j = 0; j < block / 8; ++j) {
    if (key + 8 * j < stop_key) {
      split_add<D, R>(state, weights + 64 * j, values, key + 8 * j, rows, stride, lane);
    }
  }
}

// out / sum; a row that met no key is 0.
float sum = row.sum;
for (int lanes = 1; lanes < 32 / R; lanes *= 2) {
  sum += simd_shuffle_xor(sum, lanes);
}
if (key_offset == 0) {
  scales[weighed] = sum > 0.0f ? 1.0f / sum : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLLED for (int r = 0; r < R; ++r) {
  const int own = 8 * r + int(fragment_row(lane));
  split_scale(state, r, scales[own]);
  UNROLLED for (int i = 0; i < D / 128; ++i) {
    float4 quad;
    UNROLLED for (int n = 0; n < 2; ++n) {
      quad[2 * n] = state.out[r][2 * i + n].thread_elements()[0];
      quad[2 * n + 1] = state.out[r][2 * i + n].thread_elements()[1];
    }
    if (own / group < count && first + own / group < rows) {
      store4(out + at[r] + 16 * i + 2 * fragment_column(lane), quad);
    }
  }
}
