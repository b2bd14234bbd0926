// Tiles of x·wᵀ whose weights go from memory straight into fragments.
//
//   sum[r][n] += Σ_k x[r][k]·w[n][k], a simdgroup's 8·R rows × 8·N columns, the depth in slices of 32
//
// A lane reads four neighbours of depth at once. Element j of them takes part in product j of the slice, which so covers
// k = j, 4 + j, 8 + j, … 28 + j: any order within a sum will do, if x has the same. Within a simdgroup each weight is read
// by one lane, eight lanes to a run of 32. A tile's columns are two bands, of one weight or of two.
// Depth is a multiple of 4; rows, columns and depth past the end are zeros that nothing reads from memory.
// Rounding: bfloat16 weights are widened exactly; products add up in the matrix unit's float32.
enum : int { slice_depth = 32, slice_stride = slice_depth + 4 };

template <int R, int N>
struct Tile {
  simdgroup_float8x8 sum[R][N];
};

template <int R, int N>
METAL_FUNC void clear_tile(thread Tile<R, N>& tile) {
  UNROLLED for (int i = 0; i < R; ++i) {
    UNROLLED for (int n = 0; n < N; ++n) {
      tile.sum[i][n] = zero_fragment();
    }
  }
}

// x [rows, depth].
template <typename X>
struct Inputs {
  X x;
  int rows;
  int depth;
};

// The rows of a weight [columns, depth] from `column` on, which are columns of x·wᵀ.
template <typename W>
struct Band {
  W w;
  int columns;
  int column;
};

// Two lots of four neighbours of depth: a fragment's first and second element in each of a slice's four products.
struct Fours {
  float4 first;
  float4 second;
};

METAL_FUNC simdgroup_float8x8 product_fragment(Fours fours, int j) {
  simdgroup_float8x8 fragment;
  fragment.thread_elements()[0] = fours.first[j];
  fragment.thread_elements()[1] = fours.second[j];
  return fragment;
}

// A lane's weights in a slice at depth k: eight columns, the first of them `n` after the band's.
template <typename W>
METAL_FUNC Fours weight_fours(Band<W> band, int n, int k, int depth, uint lane) {
  const int column = band.column + n + int(fragment_column(lane)), at = k + 4 * int(fragment_row(lane));
  return {
      load4_within(band.w, column, at, band.columns, depth, depth),
      load4_within(band.w, column + 1, at, band.columns, depth, depth)};
}

// A lane's inputs in a slice at depth k, for eight rows from `row` on.
template <typename X>
METAL_FUNC Fours input_fours(Inputs<X> in, int row, int k, uint lane) {
  const int r = row + int(fragment_row(lane)), at = k + 4 * int(fragment_column(lane));
  return {
      load4_within(in.x, r, at, in.rows, in.depth, in.depth),
      load4_within(in.x, r, at + 4, in.rows, in.depth, in.depth)};
}

// Fills `slice` with `count` rows of x at depth k, in the order of the products: [row][j][k/4].
template <typename X>
METAL_FUNC void share_slice(
    Inputs<X> in, threadgroup float* slice, int row, int count, int k, int thread_index, int threads) {
  for (int i = thread_index; i < count * (slice_depth / 4); i += threads) {
    const int r = i / (slice_depth / 4), quarter = i % (slice_depth / 4);
    const float4 four = load4_within(in.x, row + r, k + 4 * quarter, in.rows, in.depth, in.depth);
    UNROLLED for (int j = 0; j < 4; ++j) {
      slice[r * slice_stride + 8 * j + quarter] = four[j];
    }
  }
}

// Adds one band's part of a slice whose inputs lie in threadgroup memory, the tile's first row at `slice`.
template <int R, int N, typename W>
METAL_FUNC void multiply_shared(
    thread Tile<R, N>& tile, int first, const threadgroup float* slice, Band<W> band, int k, int depth, uint lane) {
  Fours weights[N / 2];
  UNROLLED for (int n = 0; n < N / 2; ++n) {
    weights[n] = weight_fours(band, 8 * n, k, depth, lane);
  }
  UNROLLED for (int j = 0; j < 4; ++j) {
    simdgroup_float8x8 a[R];
    UNROLLED for (int i = 0; i < R; ++i) {
      simdgroup_load(a[i], slice + 8 * i * slice_stride + 8 * j, slice_stride);
    }
    UNROLLED for (int n = 0; n < N / 2; ++n) {
      const simdgroup_float8x8 b = product_fragment(weights[n], j);
      UNROLLED for (int i = 0; i < R; ++i) {
        simdgroup_multiply_accumulate(tile.sum[i][first + n], a[i], b, tile.sum[i][first + n]);
      }
    }
  }
}

// The same with inputs of its own.
template <int R, int N, typename W>
METAL_FUNC void multiply_own(
    thread Tile<R, N>& tile, int first, thread const Fours* inputs, Band<W> band, int k, int depth, uint lane) {
  UNROLLED for (int n = 0; n < N / 2; ++n) {
    const Fours weights = weight_fours(band, 8 * n, k, depth, lane);
    UNROLLED for (int j = 0; j < 4; ++j) {
      const simdgroup_float8x8 b = product_fragment(weights, j);
      UNROLLED for (int i = 0; i < R; ++i) {
        const simdgroup_float8x8 a = product_fragment(inputs[i], j);
        simdgroup_multiply_accumulate(tile.sum[i][first + n], a, b, tile.sum[i][first + n]);
      }
    }
  }
}

METAL_FUNC float2 pair_of(simdgroup_float8x8 fragment) {
  return float2(fragment.thread_elements()[0], fragment.thread_elements()[1]);
}

METAL_FUNC void store_pair(device float* y, float2 pair) {
  *(device float2*)y = pair;
}
