// h' = (h + rms(y)·w)·post, the end of a residual block, a row in one simdgroup.
template <int D, typename H, typename Y, typename W>
METAL_FUNC Row<D> residual_row(H h, Y y, W w, float post, float eps, uint lane) {
  Row<D> sum = load_row<D>(h, lane);
  Row<D> block = load_row<D>(y, lane);
  block = weighted<D>(block, inverse_rms<D>(block, eps), w, lane);
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    sum.slot[i] = (sum.slot[i] + block.slot[i]) * post;
  }
  return sum;
}
