// Vector types. A vector is clang's ext_vector_type, which has MSL's arithmetic and swizzles but not its constructors:
// `float4(a, b)` is a macro, which an ordinary mention of the type, without a parenthesis after it, does not trigger.
// `vec<T, 4>(…)` cannot be one: translate.py writes ::msl::make_vector<T, 4>(…) for it.
#pragma once

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}

namespace msl {

using metal::vec;

template <class T>
struct shape_of {
  static constexpr bool is_vector = false;
  static constexpr int size = 1;
  typedef T scalar;
};
template <class T, int N>
struct shape_of<vec<T, N>> {
  static constexpr bool is_vector = true;
  static constexpr int size = N;
  typedef T scalar;
};

// Clang has no cast between half and bfloat.
template <class T, class A>
MSL_INLINE T convert(A value) {
  constexpr bool between_halves = (metal::is_same_v<T, half> && metal::is_same_v<A, bfloat>) ||
                                  (metal::is_same_v<T, bfloat> && metal::is_same_v<A, half>);
  if constexpr (between_halves)
    return T(float(value));
  else
    return T(value);
}

template <class V, class A>
MSL_INLINE void append(V& vector, int& filled, A argument) {
  typedef typename shape_of<V>::scalar T;
  typedef typename shape_of<A>::scalar S;
  if constexpr (shape_of<A>::is_vector)
    for (int i = 0; i < shape_of<A>::size; ++i) vector[filled++] = convert<T, S>(argument[i]);
  else
    vector[filled++] = convert<T, S>(argument);
}

// Components one after the other, or one scalar in all of them. Converts each, as MSL's constructors do.
template <class T, int N, class... A>
MSL_INLINE vec<T, N> make_vector(A... arguments) {
  constexpr int given = (shape_of<A>::size + ... + 0);
  static_assert(given == N || given == 1, "wrong number of components in a vector constructor");
  vec<T, N> vector{};
  int filled = 0;
  (append(vector, filled, arguments), ...);
  if constexpr (given == 1)
    for (int i = 1; i < N; ++i) vector[i] = vector[0];
  return vector;
}

}  // namespace msl

#define MSL_DEFINE_VECTOR(T, N)                       \
  typedef T T##N __attribute__((ext_vector_type(N))); \
  template <class... A>                               \
  MSL_INLINE T##N msl_make_##T##N(A... arguments) {   \
    return ::msl::make_vector<T, N>(arguments...);    \
  }                                                   \
  namespace metal {                                   \
  using ::T##N;                                       \
  using ::msl_make_##T##N;                            \
  }
#define MSL_DEFINE_VECTORS(T) MSL_DEFINE_VECTOR(T, 2) MSL_DEFINE_VECTOR(T, 3) MSL_DEFINE_VECTOR(T, 4)

MSL_DEFINE_VECTORS(bool)
MSL_DEFINE_VECTORS(char)
MSL_DEFINE_VECTORS(uchar)
MSL_DEFINE_VECTORS(short)
MSL_DEFINE_VECTORS(ushort)
MSL_DEFINE_VECTORS(int)
MSL_DEFINE_VECTORS(uint)
MSL_DEFINE_VECTORS(long)
MSL_DEFINE_VECTORS(ulong)
MSL_DEFINE_VECTORS(half)
MSL_DEFINE_VECTORS(bfloat)
MSL_DEFINE_VECTORS(float)

namespace metal {
using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
}  // namespace metal

#define bool2(...) msl_make_bool2(__VA_ARGS__)
#define bool3(...) msl_make_bool3(__VA_ARGS__)
#define bool4(...) msl_make_bool4(__VA_ARGS__)
#define char2(...) msl_make_char2(__VA_ARGS__)
#define char3(...) msl_make_char3(__VA_ARGS__)
#define char4(...) msl_make_char4(__VA_ARGS__)
#define uchar2(...) msl_make_uchar2(__VA_ARGS__)
#define uchar3(...) msl_make_uchar3(__VA_ARGS__)
#define uchar4(...) msl_make_uchar4(__VA_ARGS__)
#define short2(...) msl_make_short2(__VA_ARGS__)
#define short3(...) msl_make_short3(__VA_ARGS__)
#define short4(...) msl_make_short4(__VA_ARGS__)
#define ushort2(...) msl_make_ushort2(__VA_ARGS__)
#define ushort3(...) msl_make_ushort3(__VA_ARGS__)
#define ushort4(...) msl_make_ushort4(__VA_ARGS__)
#define int2(...) msl_make_int2(__VA_ARGS__)
#define int3(...) msl_make_int3(__VA_ARGS__)
#define int4(...) msl_make_int4(__VA_ARGS__)
#define uint2(...) msl_make_uint2(__VA_ARGS__)
#define uint3(...) msl_make_uint3(__VA_ARGS__)
#define uint4(...) msl_make_uint4(__VA_ARGS__)
#define long2(...) msl_make_long2(__VA_ARGS__)
#define long3(...) msl_make_long3(__VA_ARGS__)
#define long4(...) msl_make_long4(__VA_ARGS__)
#define ulong2(...) msl_make_ulong2(__VA_ARGS__)
#define ulong3(...) msl_make_ulong3(__VA_ARGS__)
#define ulong4(...) msl_make_ulong4(__VA_ARGS__)
#define half2(...) msl_make_half2(__VA_ARGS__)
#define half3(...) msl_make_half3(__VA_ARGS__)
#define half4(...) msl_make_half4(__VA_ARGS__)
#define bfloat2(...) msl_make_bfloat2(__VA_ARGS__)
#define bfloat3(...) msl_make_bfloat3(__VA_ARGS__)
#define bfloat4(...) msl_make_bfloat4(__VA_ARGS__)
#define float2(...) msl_make_float2(__VA_ARGS__)
#define float3(...) msl_make_float3(__VA_ARGS__)
#define float4(...) msl_make_float4(__VA_ARGS__)

// The same bits as another type.
template <class To, class From>
MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, from);
}
namespace metal {
using ::as_type;
}
