// Attention of 8·R query rows in eight simdgroups, each with D/8 columns of every head, keys in blocks of 64/R.
//
//   s_j = Σ_g q[g]·k_j[g] over the eight parts g of a head,  out[g] = Σ_j exp(s_j − m)·v_j[g] / Σ_j exp(s_j − m)
//
// A head too wide for a simdgroup is split by columns: a part of q, k, v and out stays with each of eight.
// What meets in threadgroup memory are parts of scores, and weights. Those of a block are always eight fragments
// (fragment.h), which lie there one after another, lane by lane (`split_place`): 256 bytes in a row for a simdgroup.
//
// A product does not mind in which order it goes through the columns of q and k, if that is one order, nor does out in
// which order it gets those of v. So lanes read 16 bytes at a time: of k, 32 columns for four fragments (column 4·c + n
// is column c of fragment n), and of v, 16 for two.
// Live fragments a lane: R·(2·D/64·2 + 2) + 4 floats, at most 76 where R·D ≤ 1024.
enum : int {
  split_simdgroups = 8,
  split_scores = 8 * 64,
};

template <int D, int R>
struct FlashSplit {
  simdgroup_float8x8 q[R][D / 64];
  simdgroup_float8x8 out[R][D / 64];
};

// The row of the block that a lane weighs, with 32/R lanes a row and two keys a lane.
struct SplitRow {
  FlashRow self;
  float top;  // finite, so that a row that meets no key makes no ∞ − ∞
  float sum;  // of this lane's weights alone
};

// Where a block keeps the score or weight of (row, key), and beside it that of (row, key + 1); key is even.
template <int R>
METAL_FUNC int split_place(int row, int key) {
  const int lane = (row & 4) << 2 | (key & 4) << 1 | (row & 3) << 1 | (key & 2) >> 1;
  return 64 * (row / 8 * (8 / R) + key / 8) + 2 * lane;
}

// Queries of rows 8·r + …, whose first columns of this simdgroup lie at `q + at[r]`.
template <int D, int R, typename Q>
METAL_FUNC FlashSplit<D, R> split_begin(Q q, thread const ulong* at, uint lane) {
  FlashSplit<D, R> state;
  UNROLLED for (int r = 0; r < R; ++r) {
    UNROLLED for (int i = 0; i < D / 256; ++i) {
      const ulong column = at[r] + 32 * i + 4 * fragment_column(lane);
      const float4 even = load4(q + column), odd = load4(q + column + 4);
      UNROLLED for (int n = 0; n < 4; ++n) {
        state.q[r][4 * i + n].thread_elements()[0] = even[n];
        state.q[r][4 * i + n].thread_elements()[1] = odd[n];
        state.out[r][4 * i + n] = zero_fragment();
      }
    }
  }
  return state;
}

// This simdgroup's part of the scores of keys first … first + 7; keys past the end of the buffer repeat the last.
template <int D, int R, typename K>
METAL_FUNC void split_multiply(
    thread FlashSplit<D, R>& state,
    thread simdgroup_float8x8* s,
    K k,
    int first,
    int rows,
    int stride,
    uint lane) {
  const int key = first + int(fragment_column(lane));
  const ulong even = ulong(min(key, rows - 1)) * stride + 4 * fragment_row(lane);
  const ulong odd = ulong(min(key + 1, rows - 1)) * stride + 4 * fragment_row(lane);
  UNROLLED for (int i = 0; i < D / 256; ++i) {
    const float4 k_even = load4(k + even + 32 * i), k_odd = load4(k + odd + 32 * i);
    UNROLLED for (int n = 0; n < 4; ++n) {
      simdgroup_float8x8 b;
      b.thread_elements()[0] = k_even[n];
      b.thread_elements()[1] = k_odd[n];
      UNROLLED for (int r = 0; r < R; ++r) {
        simdgroup_multiply_accumulate(s[r], state.q[r][4 * i + n], b, s[r]);
      }
    }
  }
}

// out += p·v over keys first … first + 7, p their weights in the block at `weights`.
template <int D, int R, typename V>
METAL_FUNC void split_add(
    thread FlashSplit<D, R>& state,
    threadgroup const float* weights,
    V v,
    int first,
    int rows,
    int stride,
    uint lane) {
  simdgroup_float8x8 p[R], b[2];
  UNROLLED for (int r = 0; r < R; ++r) {
    const float2 pair = *(threadgroup const float2*)(weights + 64 * r * (8 / R) + 2 * lane);
    p[r].thread_elements()[0] = pair[0];
    p[r].thread_elements()[1] = pair[1];
  }
  const ulong at = ulong(min(first + int(fragment_row(lane)), rows - 1)) * stride + 2 * fragment_column(lane);
  UNROLLED for (int i = 0; i < D / 128; ++i) {
    const float4 values = load4(v + at + 16 * i);
    UNROLLED for (int n = 0; n < 2; ++n) {
      b[n].thread_elements()[0] = values[2 * n];
      b[n].thread_elements()[1] = values[2 * n + 1];
      UNROLLED for (int r = 0; r < R; ++r) {
        simdgroup_multiply_accumulate(state.out[r][2 * i + n], p[r], b[n], state.out[r][2 * i + n]);
      }
    }
  }
}

template <int D, int R>
METAL_FUNC void split_scale(thread FlashSplit<D, R>& state, int r, float scale) {
  UNROLLED for (int i = 0; i < D / 64; ++i) {
    state.out[r][i].thread_elements()[0] *= scale;
    state.out[r][i].thread_elements()[1] *= scale;
  }
}

// Two scores of a row → exp(s − m) at the keys met, 0 elsewhere; returns exp(m_before − m), by which what is summed so
// far shrinks. The 32/R lanes of a row call this together.
template <int R>
METAL_FUNC float split_weigh(thread SplitRow& row, thread float2& s, bool first_met, bool second_met) {
  float top = max(first_met ? s[0] : row.top, second_met ? s[1] : row.top);
  for (int lanes = 1; lanes < 32 / R; lanes *= 2) {
    top = max(top, simd_shuffle_xor(top, lanes));
  }
  top = max(top, row.top);
  s[0] = first_met ? precise::exp(s[0] - top) : 0.0f;
  s[1] = second_met ? precise::exp(s[1] - top) : 0.0f;
  const float shrink = precise::exp(row.top - top);
  row.top = top;
  row.sum = row.sum * shrink + s[0] + s[1];
  return shrink;
}
