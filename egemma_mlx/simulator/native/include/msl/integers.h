// <metal_integer>
#pragma once

namespace metal {

MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE int popcount(int x) { return __builtin_popcount(x); }
MSL_INLINE ulong popcount(ulong x) { return __builtin_popcountl(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }
template <class T>
MSL_INLINE T rotate(T x, T bits) {
  static_assert(!is_signed_v<T>, "rotate of a signed integer");
  constexpr T width = sizeof(T) * 8;
  return T(x << (bits % width) | x >> ((width - bits % width) % width));
}
MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0 : x >> offset & ~0u >> (32 - bits);
}

}  // namespace metal
