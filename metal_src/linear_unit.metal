// y = x·wᵀ and unit = y/max(‖y‖, 10⁻¹²), both 0 where x is 0 (a segment without a token)
//
//   x [S, K] float32, w [M, K] float32 or bfloat16 → y, unit [S, M] float32, K and M multiples of 4
//
// One threadgroup of eight simdgroups for every four rows: each simdgroup holds all four in registers, and simdgroup g
// takes columns g, g + 8, …, so that a weight is read once for the four, and not at all where they are 0. The products
// meet in threadgroup memory, 16 bytes a column.
// Rounding: float32; a column is 32 sums of every 32nd four of the depth, ‖y‖² eight sums added in order.
constexpr uint groups = 8, height = 4;
threadgroup float products[height * M];
threadgroup float squares[groups * height];

const uint lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
const int rows = x_shape[0], first = int(height * threadgroup_position_in_grid.y);

Row<K> inputs[height];
float size = 0.0f;
UNROLLED for (uint r = 0; r < height; ++r) {
  UNROLLED for (uint i = 0; i < (K + 127) / 128; ++i) {
    inputs[r].slot[i] = load4_within(x, first + int(r), int(row_column<K>(lane, i)), rows, K, K);
    size += dot(abs(inputs[r].slot[i]), float4(1.0f));
  }
}
const bool filled = simd_any(size != 0.0f);

float square = 0.0f;  // of row `lane`, over this simdgroup's columns
for (uint column = group; filled && column < M; column += groups) {
  const Row<K> weights = load_row<K>(w + ulong(column) * K, lane);
  float own = 0.0f;
  UNROLLED for (uint r = 0; r < height; ++r) {
    float sum = 0.0f;
    UNROLLED for (uint i = 0; i < (K + 127) / 128; ++i) {
      sum += dot(inputs[r].slot[i], weights.slot[i]);
    }
    sum = simd_sum(sum);
    own = lane == r ? sum : own;
  }
  if (lane < height) {
    products[M * lane + column] = own;
    square += own * own;
  }
}
if (lane < height) {
  squares[height * group + lane] = square;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint i = 4 * thread_index_in_threadgroup; i < height * M; i += 4 * 32 * groups) {
  const uint r = i / M, c = i % M;
  if (first + int(r) < rows) {
    float total = 0.0f;
    for (uint g = 0; g < groups; ++g) {
      total += squares[height * g + r];
    }
    const float4 row = filled ? *(threadgroup float4*)(products + i) : float4(0.0f);
    const ulong at = ulong(first + int(r)) * M + c;
    store4(y + at, row);
    store4(unit + at, row * min(precise::rsqrt(total), 1e12f));
  }
}
