// out[t, h] = softmax(q[t, h]·k[·, h / group]ᵀ)·v[·, h / group] over the keys that row t meets, staged form
//
//   q [T, heads·D], k, v [T, kv_heads·D] float32, bounds [T, 2], positions [T] int32, window, heads, kv_heads
//   → out [T, heads·D] float32;  D a multiple of 8, at most 128
//
// One threadgroup for 64 rows of a head: 64 / (8·R) simdgroups of 8·R rows share BLOCK keys and values at a time in
// threadgroup memory (flash.h has the softmax and the rounding). A simdgroup none of whose rows meet a block waits.
// Rows of threadgroup memory are 4 floats longer than D, which spreads a column of keys over the banks.
constexpr int wide = D + 4, threads = 64 / (8 * R) * 32;
threadgroup float k_tile[BLOCK * wide], v_tile[BLOCK * wide];
threadgroup int positions_tile[BLOCK];

const uint lane = thread_index_in_simdgroup;
const int rows = q_shape[0], q_stride = q_shape[1], stride = k_shape[1];
const int group_row = 64 * int(threadgroup_position_in_grid.y), head = threadgroup_position_in_grid.z;
const int group_last = min(group_row + 64, rows) - 1;
const int first_key = bounds[2 * group_row], stop_key = bounds[2 * group_last + 1];
const int channel = head / (heads / kv_heads) * D;

// Simdgroups past the last row keep the others company at the barriers, on a copy of the last row.
const int row = group_row + 8 * R * int(simdgroup_index_in_threadgroup);
const int from = min(row, rows - 1), last = min(row + 8 * R, rows) - 1;
const int own_first = row < rows ? bounds[2 * row] : 0, own_stop = row < rows ? bounds[2 * last + 1] : 0;
const ulong at = ulong(from) * q_stride + head * D;
Flash<D, R> state = flash_begin<D, R>(q + at, rows - from, q_stride, lane);
FlashRow self[R];
UNROLLED for (int r = 0; r < R; ++r) {
  self[r] = flash_row(row + 8 * r + int(fragment_row(lane)), rows, bounds, positions);
}

for (int key = first_key; key < stop_key; key += BLOCK) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index_in_threadgroup; i < BLOCK * D / 4; i += threads) {
    const int j = i / (D / 4), c = 4 * (i % (D / 4));
    const bool inside = key + j < stop_key;
    const ulong source = ulong(key + j) * stride + channel + c;
    *(threadgroup float4*)(k_tile + j * wide + c) = inside ? load4(k + source) : float4(0.0f);
    *(threadgroup float4*)(v_tile + j * wide + c) = inside ? load4(v + source) : float4(0.0f);
  }
  for (int j = thread_index_in_threadgroup; j < BLOCK; j += threads) {
    positions_tile[j] = key + j < stop_key ? positions[key + j] : -1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (key < own_stop && key + BLOCK > own_first) {
    simdgroup_float8x8 s[R][BLOCK / 8], b;
    UNROLLED for (int j = 0; j < BLOCK / 8; ++j) {
      UNROLLED for (int r = 0; r < R; ++r) {
        s[r][j] = zero_fragment();
      }
      UNROLLED for (int i = 0; i < D / 8; ++i) {
        simdgroup_load(b, k_tile + 8 * j * wide + 8 * i, wide, ulong2(0, 0), true);
        UNROLLED for (int r = 0; r < R; ++r) {
          simdgroup_multiply_accumulate(s[r][j], state.q[r][i], b, s[r][j]);
        }
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      uint met = 0;
      UNROLLED for (int c = 0; c < BLOCK / 4; ++c) {
        const int column = 8 * (c / 2) + int(fragment_column(lane)) + c % 2;
        const bool meets_key =
            meets(column, self[r].position, self[r].lo - key, self[r].hi - key, window, positions_tile);
        met |= uint(meets_key) << c;
      }
      flash_weigh<D, R, BLOCK / 8>(state, s[r], r, met);
    }
    UNROLLED for (int j = 0; j < BLOCK / 8; ++j) {
      UNROLLED for (int i = 0; i < D / 8; ++i) {
        simdgroup_load(b, v_tile + 8 * j * wide + 8 * i, wide);
        UNROLLED for (int r = 0; r < R; ++r) {
          simdgroup_multiply_accumulate(state.out[r][i], s[r][j], b, state.out[r][i]);
        }
      }
    }
  }
}
if (row < rows) {
  flash_end<D, R>(state, out + at, rows - row, q_stride, lane);
}
