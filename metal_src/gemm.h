// y = x·W for one tile of 64 rows × 64 columns, in float32.
//
//   NT: W(k, o) = w[o][k], a weight matrix or attention's keys.   NN: W(k, o) = w[k][o], attention's values.
//
// 128 threads; simdgroups 2 × 2 of 32 × 32 outputs each (4×4 fragments, 32 accumulators a lane). The depth goes by in
// slices of 32: both operand tiles lie in threadgroup memory as dense 8×8 blocks, and the next slice is read into
// registers while this one multiplies. Depth, columns and strides are multiples of 4; what lies past the end of rows,
// columns or depth is 0 and never read from memory.
// Rounding: bfloat16 weights are widened exactly; products add up in the matrix unit's float32, k ascending.
enum : int {
  gemm_tile = 64,
  gemm_slice = 32,
  gemm_memory = gemm_tile * gemm_slice,
  gemm_loads = gemm_memory / (4 * 128),
};

struct GemmShape {
  int rows;
  int columns;
  int depth;
  int x_stride;
  int w_stride;
  int y_stride;
};

// Who a thread is, and where the tile of its threadgroup begins.
struct GemmThread {
  uint index;
  uint simdgroup;
  uint lane;
  int row;
  int column;
};

struct GemmSlice {
  float4 x[gemm_loads];
  float4 w[gemm_loads];
};

// Row and column of load number i of a thread in a tile of `width` columns: neighbours read neighbours.
METAL_FUNC int2 load_place(uint thread_index, int i, int width) {
  const int at = 4 * (int(thread_index) + 128 * i);
  return int2(at / width, at % width);
}

// Where element (row, column) of a tile lies that is stored as 8×8 blocks, `width` / 8 in a row of blocks.
METAL_FUNC int blocked(int row, int column, int width) {
  return 64 * (row / 8 * (width / 8) + column / 8) + 8 * (row % 8) + column % 8;
}

template <bool NN, typename X, typename W>
METAL_FUNC GemmSlice gemm_read(X x, W w, int k, GemmShape shape, GemmThread self) {
  GemmSlice slice;
  UNROLLED for (int i = 0; i < gemm_loads; ++i) {
    const int2 xp = load_place(self.index, i, gemm_slice);
    slice.x[i] = load4_within(x, self.row + xp[0], k + xp[1], shape.rows, shape.depth, shape.x_stride);
    const int2 wp = load_place(self.index, i, NN ? gemm_tile : gemm_slice);
    slice.w[i] = NN
        ? load4_within(w, k + wp[0], self.column + wp[1], shape.depth, shape.columns, shape.w_stride)
        : load4_within(w, self.column + wp[0], k + wp[1], shape.columns, shape.depth, shape.w_stride);
  }
  return slice;
}

template <bool NN>
METAL_FUNC void gemm_share(GemmSlice slice, GemmThread self, threadgroup float* x_tile, threadgroup float* w_tile) {
  UNROLLED for (int i = 0; i < gemm_loads; ++i) {
    const int2 xp = load_place(self.index, i, gemm_slice);
    *(threadgroup float4*)(x_tile + blocked(xp[0], xp[1], gemm_slice)) = slice.x[i];
    const int2 wp = load_place(self.index, i, NN ? gemm_tile : gemm_slice);
    *(threadgroup float4*)(w_tile + blocked(wp[0], wp[1], NN ? gemm_tile : gemm_slice)) = slice.w[i];
  }
}

template <bool NN, typename X, typename W>
METAL_FUNC void gemm(
    X x,
    W w,
    device float* y,
    GemmShape shape,
    GemmThread self,
    threadgroup float* x_tile,
    threadgroup float* w_tile) {
  const int rows = 32 * int(self.simdgroup / 2), columns = 32 * int(self.simdgroup % 2);
  // A simdgroup without outputs helps to load, and multiplies nothing.
  const bool busy = self.row + rows < shape.rows && self.column + columns < shape.columns;

  simdgroup_float8x8 sum[4][4];
  UNROLLED for (int i = 0; i < 4; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      sum[i][j] = zero_fragment();
    }
  }

  GemmSlice slice = gemm_read<NN>(x, w, 0, shape, self);
  for (int k = 0; k < shape.depth; k += gemm_slice) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    gemm_share<NN>(slice, self, x_tile, w_tile);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    slice = gemm_read<NN>(x, w, k + gemm_slice, shape, self);
    for (int block = 0; busy && block < gemm_slice; block += 8) {
      simdgroup_float8x8 a[4], b;
      UNROLLED for (int i = 0; i < 4; ++i) {
        simdgroup_load(a[i], x_tile + blocked(rows + 8 * i, block, gemm_slice), 8);
      }
      UNROLLED for (int j = 0; j < 4; ++j) {
        if (NN) {
          simdgroup_load(b, w_tile + blocked(block, columns + 8 * j, gemm_tile), 8);
        } else {
          simdgroup_load(b, w_tile + blocked(columns + 8 * j, block, gemm_slice), 8, ulong2(0, 0), true);
        }
        UNROLLED for (int i = 0; i < 4; ++i) {
          simdgroup_multiply_accumulate(sum[i][j], a[i], b, sum[i][j]);
        }
      }
    }
  }

  const int row = self.row + rows + int(fragment_row(self.lane));
  const int column = self.column + columns + int(fragment_column(self.lane));
  UNROLLED for (int i = 0; i < 4; ++i) {
    UNROLLED for (int j = 0; j < 4; ++j) {
      const float2 pair = float2(sum[i][j].thread_elements()[0], sum[i][j].thread_elements()[1]);
      if (row + 8 * i < shape.rows && column + 8 * j < shape.columns) {
        *(device float2*)(y + ulong(row + 8 * i) * shape.y_stride + column + 8 * j) = pair;
      }
    }
  }
}
