// A head of D channels, normed and rotated by one simdgroup.
//
// RoPE turns the pairs (i, i + SECTION/2) inside each section ("rotate half"); pair j of a section takes angle j of the
// section's position. A lane holds four pairs at a time: j = 4·lane … 4·lane + 3 of every 128. D is a multiple of SECTION, SECTION of 8.
template <int D>
struct Pairs {
  float4 low[(D / 2 + 127) / 128];
  float4 high[(D / 2 + 127) / 128];
  float inverse;
};

// The channel of the lower half of pair j.
template <int SECTION>
METAL_FUNC uint low_channel(uint pair) {
  return pair + pair / (SECTION / 2) * (SECTION / 2);
}

template <int D, int SECTION>
METAL_FUNC Pairs<D> load_head(const device float* x, float eps, uint lane) {
  Pairs<D> head;
  float square = 0.0f;
  UNROLLED for (uint i = 0; i < (D / 2 + 127) / 128; ++i) {
    const uint pair = 4 * lane + 128 * i;
    if (pair < D / 2) {
      head.low[i] = load4(x + low_channel<SECTION>(pair));
      head.high[i] = load4(x + low_channel<SECTION>(pair) + SECTION / 2);
      square += dot(head.low[i], head.low[i]) + dot(head.high[i], head.high[i]);
    }
  }
  head.inverse = precise::rsqrt(simd_sum(square) / float(D) + eps);
  return head;
}

template <int D, int SECTION>
METAL_FUNC void store_normed(Pairs<D> head, device float* y, uint lane) {
  UNROLLED for (uint i = 0; i < (D / 2 + 127) / 128; ++i) {
    const uint pair = 4 * lane + 128 * i;
    if (pair < D / 2) {
      store4(y + low_channel<SECTION>(pair), head.low[i] * head.inverse);
      store4(y + low_channel<SECTION>(pair) + SECTION / 2, head.high[i] * head.inverse);
    }
  }
}

// Where the angles of a pair and of the three after it are in tables of `length` positions. `positions` has one a
// section: −1 takes 0, one past the tables their last.
template <int SECTION, typename P>
METAL_FUNC ulong angles_at(P positions, int length, uint pair) {
  const uint position = uint(clamp(positions[pair / (SECTION / 2)], 0, length - 1));
  return ulong(position) * (SECTION / 2) + pair % (SECTION / 2);
}

template <int D, int SECTION, typename W, typename A, typename P>
METAL_FUNC void store_rotated(Pairs<D> head, W w, A cos, A sin, int length, P positions, device float* y, uint lane) {
  UNROLLED for (uint i = 0; i < (D / 2 + 127) / 128; ++i) {
    const uint pair = 4 * lane + 128 * i;
    if (pair < D / 2) {
      const uint channel = low_channel<SECTION>(pair);
      const float4 low = head.low[i] * head.inverse * load4(w + channel);
      const float4 high = head.high[i] * head.inverse * load4(w + channel + SECTION / 2);
      const ulong angles = angles_at<SECTION>(positions, length, pair);
      const float4 c = load4(cos + angles), s = load4(sin + angles);
      store4(y + channel, low * c - high * s);
      store4(y + channel + SECTION / 2, high * c + low * s);
    }
  }
}
