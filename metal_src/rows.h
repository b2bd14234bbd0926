// A row of D float32 in the registers of one simdgroup: lane l holds columns 4·l … 4·l + 3 of every 128.
//
// D is a multiple of 4; slots past the end of a row hold 0, which adds nothing to a sum of squares.
template <int D>
struct Row {
  float4 slot[(D + 127) / 128];
};

template <int D>
METAL_FUNC uint row_column(uint lane, uint slot) {
  return 4 * lane + 128 * slot;
}

template <int D, typename P>
METAL_FUNC Row<D> load_row(P x, uint lane) {
  Row<D> row;
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    const uint column = row_column<D>(lane, i);
    row.slot[i] = column < D ? load4(x + column) : float4(0.0f);
  }
  return row;
}

template <int D>
METAL_FUNC void store_row(device float* y, Row<D> row, uint lane) {
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    const uint column = row_column<D>(lane, i);
    if (column < D) {
      store4(y + column, row.slot[i]);
    }
  }
}

// (mean(x²) + eps)^−½
template <int D>
METAL_FUNC float inverse_rms(Row<D> row, float eps) {
  float square = 0.0f;
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    square += dot(row.slot[i], row.slot[i]);
  }
  return precise::rsqrt(simd_sum(square) / float(D) + eps);
}

// row·scale·w
template <int D, typename P>
METAL_FUNC Row<D> weighted(Row<D> row, float scale, P w, uint lane) {
  UNROLLED for (uint i = 0; i < (D + 127) / 128; ++i) {
    const uint column = row_column<D>(lane, i);
    if (column < D) {
      row.slot[i] = row.slot[i] * scale * load4(w + column);
    }
  }
  return row;
}
