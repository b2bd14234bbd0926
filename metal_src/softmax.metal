// weights[b, h, r] = softmax over the keys that row 64·b + r meets of scores[b, h, r], zeros at the others
//
//   scores [blocks, heads, 64, span] float32 (from attention_scores.metal), bounds [T, 2], positions [T] int32,
//   first, window → weights, as scores; of the columns past the block's last key, up to a multiple of 4 are zeros and
//   the rest stay unwritten. A row that meets no key gets zeros.
//
// One simdgroup a row, four rows a threadgroup, lanes stride over the keys: once for the greatest score and the sum
// under it, once to write. Rounding: float32 throughout; a lane's sum is rescaled when its greatest score grows.
const uint lane = thread_index_in_simdgroup;
const int rows = positions_shape[0], span = scores_shape[3];
const int block = gemm_tile * (first + int(thread_position_in_grid.z));
const int row = block + int(thread_position_in_grid.y) % gemm_tile;
const int last = min(rows, block + gemm_tile) - 1;

if (row <= last) {
  const ulong at = (ulong(thread_position_in_grid.z) * threads_per_grid.y + thread_position_in_grid.y) * span;
  const int first_key = bounds[2 * block], stop_key = bounds[2 * last + 1];
  const int lo = bounds[2 * row], hi = bounds[2 * row + 1], position = positions[row];

  float greatest = -1e30f, sum = 0.0f;
  for (int key = lo + int(lane); key < hi; key += 32) {
    if (meets(key, position, lo, hi, window, positions)) {
      const float score = scores[at + key - first_key];
      const float above = max(greatest, score);
      sum = sum * precise::exp(greatest - above) + precise::exp(score - above);
      greatest = above;
    }
  }
  const float top = simd_max(greatest);
  sum = simd_sum(sum * precise::exp(greatest - top));
  const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;

  const int columns = (stop_key - first_key + 3) / 4 * 4;
  for (int column = lane; column < columns; column += 32) {
    const int key = first_key + column;
    const bool met = meets(key, position, lo, hi, window, positions);
    weights[at + column] = met ? precise::exp(scores[at + column] - top) * scale : 0.0f;
  }
}
