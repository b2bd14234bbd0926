// Attention of 8·R query rows in one simdgroup, keys in blocks of B, no score in memory.
//
//   out = Σ_j exp(s_j − m)·v_j / Σ_j exp(s_j − m),  s_j = q·k_j over the keys that a row meets,  m the greatest s_j
//
// Queries, scores and outputs are fragments (fragment.h): a lane holds two neighbours of one row, four lanes share a
// row. When a block raises m, what is summed so far shrinks by exp(m_before − m) ("online softmax", FlashAttention).
// Live fragments a lane: R·(2·D/8·2 + B/8·2) + 2 floats, 82 at D = 64, R = 2, B = 32.
// Rounding: float32 throughout; keys are added in order, block by block.
template <int D, int R>
struct Flash {
  simdgroup_float8x8 q[R][D / 8];
  simdgroup_float8x8 out[R][D / 8];
  float top[R];  // finite, so that a row that meets no key makes no ∞ − ∞
  float sum[R];
};

// One row of queries, as its lane sees it.
struct FlashRow {
  int position;
  int lo;
  int hi;
};

template <typename B, typename P>
METAL_FUNC FlashRow flash_row(int row, int rows, B bounds, P positions) {
  if (row >= rows) {
    return {0, 0, 0};
  }
  return {positions[row], bounds[2 * row], bounds[2 * row + 1]};
}

// Queries from `q`, at this simdgroup's first row; rows past the end repeat the last.
template <int D, int R, typename Q>
METAL_FUNC Flash<D, R> flash_begin(Q q, int rows, int stride, uint lane) {
  Flash<D, R> state;
  UNROLLED for (int r = 0; r < R; ++r) {
    const ulong at = ulong(min(8 * r + int(fragment_row(lane)), rows - 1)) * stride + fragment_column(lane);
    UNROLLED for (int i = 0; i < D / 8; ++i) {
      state.q[r][i].thread_elements()[0] = q[at + 8 * i];
      state.q[r][i].thread_elements()[1] = q[at + 8 * i + 1];
      state.out[r][i] = zero_fragment();
    }
    state.top[r] = -1e30f;
    state.sum[r] = 0.0f;
  }
  return state;
}

// Scores s → exp(s − m) at the keys met, 0 elsewhere; `met` has a bit for each of the lane's 2·N columns.
template <int D, int R, int N>
METAL_FUNC void flash_weigh(thread Flash<D, R>& state, thread simdgroup_float8x8* s, int r, uint met) {
  float top = state.top[r];
  UNROLLED for (int i = 0; i < N; ++i) {
    UNROLLED for (int c = 0; c < 2; ++c) {
      const float score = s[i].thread_elements()[c];
      top = (met >> (2 * i + c)) & 1 ? max(top, score) : top;
    }
  }
  top = row_max(top);
  float sum = 0.0f;
  UNROLLED for (int i = 0; i < N; ++i) {
    UNROLLED for (int c = 0; c < 2; ++c) {
      const float score = s[i].thread_elements()[c];
      const float weight = (met >> (2 * i + c)) & 1 ? precise::exp(score - top) : 0.0f;
      s[i].thread_elements()[c] = weight;
      sum += weight;
    }
  }
  const float shrink = precise::exp(state.top[r] - top);
  state.top[r] = top;
  state.sum[r] = state.sum[r] * shrink + row_sum(sum);
  if (simd_any(shrink != 1.0f)) {
    UNROLLED for (int i = 0; i < D / 8; ++i) {
      state.out[r][i].thread_elements()[0] *= shrink;
      state.out[r][i].thread_elements()[1] *= shrink;
    }
  }
}

// Store out / sum at this simdgroup's rows; a row that met no key is 0.
template <int D, int R>
METAL_FUNC void flash_end(thread Flash<D, R>& state, device float* out, int rows, int stride, uint lane) {
  UNROLLED for (int r = 0; r < R; ++r) {
    const int row = 8 * r + int(fragment_row(lane));
    const float scale = state.sum[r] > 0.0f ? 1.0f / state.sum[r] : 0.0f;
    UNROLLED for (int i = 0; i < D / 8; ++i) {
      const float2 pair = float2(state.out[r][i].thread_elements()[0], state.out[r][i].thread_elements()[1]);
      if (row < rows) {
        *(device float2*)(out + ulong(row) * stride + 8 * i + fragment_column(lane)) = pair * scale;
      }
    }
  }
}
