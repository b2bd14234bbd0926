// out[t, h] = softmax(q[t, h]·k[·, h / group]ᵀ)·v[·, h / group] over the keys that row t meets, direct form
//
//   q [T, heads·D], k, v [T, kv_heads·D] float32, bounds [T, 2], positions [T] int32, window, heads, kv_heads
//   → out [T, heads·D] float32;  D a multiple of 8, at most 128
//
// One simdgroup for eight rows of a head, on its own: keys and values come from device memory as fragments, 32 keys at
// a time (flash.h has the softmax and the rounding). Best where rows meet few keys; flash_staged.metal shares them.
constexpr int block = 32;
const uint lane = thread_index_in_simdgroup;
const int rows = q_shape[0], q_stride = q_shape[1], stride = k_shape[1];
const int row = 8 * int(thread_position_in_grid.y), head = thread_position_in_grid.z;
const int last = min(row + 8, rows) - 1;
const int first_key = bounds[2 * row], stop_key = bounds[2 * last + 1];
const auto keys = k + head / (heads / kv_heads) * D;
const auto values = v + head / (heads / kv_heads) * D;

const ulong at = ulong(row) * q_stride + head * D;
Flash<D, 1> state = flash_begin<D, 1>(q + at, rows - row, q_stride, lane);
const FlashRow self = flash_row(row + int(fragment_row(lane)), rows, bounds, positions);

for (int key = first_key; key < stop_key; key += block) {
  simdgroup_float8x8 s[block / 8];
  uint met = 0;
  UNROLLED for (int j = 0; j < block / 8; ++j) {
    s[j] = zero_fragment();
    const int first = key + 8 * j;
    if (first < stop_key) {
      UNROLLED for (int i = 0; i < D / 8; ++i) {
        const simdgroup_float8x8 b = keys_fragment(keys + 8 * i, first, rows, stride, lane);
        simdgroup_multiply_accumulate(s[j], state.q[0][i], b, s[j]);
      }
    }
    UNROLLED for (int c = 0; c < 2; ++c) {
      const int column = first + int(fragment_column(lane)) + c;
      met |= uint(meets(column, self.position, self.lo, self.hi, window, positions)) << (2 * j + c);
    }
  }
  flash_weigh<D, 1, block / 8>(state, s, 0, met);
  UNROLLED for (int j = 0; j < block / 8; ++j) {
    const int first = key + 8 * j;
    if (first < stop_key) {
      UNROLLED for (int i = 0; i < D / 8; ++i) {
        const simdgroup_float8x8 b = values_fragment(values + 8 * i, first, rows, stride, lane);
        simdgroup_multiply_accumulate(state.out[0][i], s[j], b, state.out[0][i]);
      }
    }
  }
}
flash_end<D, 1>(state, out + at, rows - row, q_stride, lane);
