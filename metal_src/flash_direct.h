// Fragments of keys and values from device memory; rows past the end repeat the last (their weight is 0).
METAL_FUNC simdgroup_float8x8 keys_fragment(const device float* k, int key, int rows, int stride, uint lane) {
  simdgroup_float8x8 fragment;
  if (key + 8 <= rows) {
    simdgroup_load(fragment, k + ulong(key) * stride, stride, ulong2(0, 0), true);
  } else {
    const uint channel = fragment_row(lane);
    const int column = key + int(fragment_column(lane));
    fragment.thread_elements()[0] = k[ulong(min(column, rows - 1)) * stride + channel];
    fragment.thread_elements()[1] = k[ulong(min(column + 1, rows - 1)) * stride + channel];
  }
  return fragment;
}

METAL_FUNC simdgroup_float8x8 values_fragment(const device float* v, int key, int rows, int stride, uint lane) {
  simdgroup_float8x8 fragment;
  if (key + 8 <= rows) {
    simdgroup_load(fragment, v + ulong(key) * stride, stride);
  } else {
    const ulong at = ulong(min(key + int(fragment_row(lane)), rows - 1)) * stride + fragment_column(lane);
    fragment.thread_elements()[0] = v[at];
    fragment.thread_elements()[1] = v[at + 1];
  }
  return fragment;
}
