// out[l] = (the two elements that lane l holds of the matrix m[r][c] = 8r + c, the two that fragment.h says it holds)
//
//   → out [32, 4] float32
//
// One simdgroup.
const uint lane = thread_index_in_simdgroup;

threadgroup float m[64];
m[lane] = float(lane);
m[lane + 32] = float(lane + 32);
threadgroup_barrier(mem_flags::mem_threadgroup);

simdgroup_float8x8 fragment;
simdgroup_load(fragment, m, 8);
const uint first = 8 * fragment_row(lane) + fragment_column(lane);
out[4 * lane] = fragment.thread_elements()[0];
out[4 * lane + 1] = fragment.thread_elements()[1];
out[4 * lane + 2] = float(first);
out[4 * lane + 3] = float(first + 1);
