// <metal_common>, <metal_geometric> and <metal_relational>.
#pragma once

namespace metal {

// One overload a scalar type, so that min(uint, int) is ambiguous here as it is in MSL.
#define MSL_MIN_MAX(T, minimum, maximum)                   \
  MSL_INLINE constexpr T min(T a, T b) { return minimum; } \
  MSL_INLINE constexpr T max(T a, T b) { return maximum; } \
  MSL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); }
#define MSL_MIN_MAX_INTEGER(T) MSL_MIN_MAX(T, b < a ? b : a, a < b ? b : a)
// A NaN loses against a number.
#define MSL_MIN_MAX_FLOAT(T) MSL_MIN_MAX(T, T(__builtin_fminf(a, b)), T(__builtin_fmaxf(a, b)))
MSL_MIN_MAX_INTEGER(char)
MSL_MIN_MAX_INTEGER(signed char)
MSL_MIN_MAX_INTEGER(uchar)
MSL_MIN_MAX_INTEGER(short)
MSL_MIN_MAX_INTEGER(ushort)
MSL_MIN_MAX_INTEGER(int)
MSL_MIN_MAX_INTEGER(uint)
MSL_MIN_MAX_INTEGER(long)
MSL_MIN_MAX_INTEGER(ulong)
MSL_MIN_MAX_FLOAT(half)
MSL_MIN_MAX_FLOAT(bfloat)
MSL_MIN_MAX_FLOAT(float)

#define MSL_MIN_MAX_VECTOR(name)                                    \
  template <class T, int N>                                         \
  MSL_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) {             \
    vec<T, N> result{};                                             \
    for (int i = 0; i < N; ++i) result[i] = name(T(a[i]), T(b[i])); \
    return result;                                                  \
  }                                                                 \
  template <class T, int N>                                         \
  MSL_INLINE vec<T, N> name(vec<T, N> a, T b) {                     \
    return name(a, vec<T, N>(b));                                   \
  }                                                                 \
  template <class T, int N>                                         \
  MSL_INLINE vec<T, N> name(T a, vec<T, N> b) {                     \
    return name(vec<T, N>(a), b);                                   \
  }
MSL_MIN_MAX_VECTOR(min)
MSL_MIN_MAX_VECTOR(max)

template <class T, int N>
MSL_INLINE vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N>
MSL_INLINE vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, low), high);
}

MSL_INLINE constexpr int abs(int x) { return x < 0 ? -x : x; }
MSL_INLINE constexpr long abs(long x) { return x < 0 ? -x : x; }
MSL_INLINE float abs(float x) { return __builtin_fabsf(x); }
MSL_INLINE half abs(half x) { return half(__builtin_fabsf(x)); }
MSL_INLINE bfloat abs(bfloat x) { return bfloat(__builtin_fabsf(x)); }
template <class T, int N>
MSL_INLINE vec<T, N> abs(vec<T, N> v) {
  vec<T, N> result{};
  for (int i = 0; i < N; ++i) result[i] = abs(T(v[i]));
  return result;
}

template <class T>
MSL_INLINE T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <class T>
MSL_INLINE T sign(T x) {
  return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0);
}
MSL_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N>
MSL_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, T t) {
  return a + (b - a) * t;
}

template <class T, int N>
MSL_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
template <class T, int N>
MSL_INLINE T length_squared(vec<T, N> a) {
  return dot(a, a);
}
template <class T, int N>
MSL_INLINE T length(vec<T, N> a) {
  return sqrt(dot(a, a));
}

template <class T>
MSL_INLINE T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
// Comparing two vectors gives an integer vector here (a bool vector in MSL): any component type will do.
template <class T, class C, int N>
MSL_INLINE vec<T, N> select(vec<T, N> if_false, vec<T, N> if_true, vec<C, N> condition) {
  vec<T, N> result{};
  for (int i = 0; i < N; ++i) result[i] = condition[i] ? if_true[i] : if_false[i];
  return result;
}

MSL_INLINE bool any(bool x) { return x; }
MSL_INLINE bool all(bool x) { return x; }
template <class T, int N>
MSL_INLINE bool any(vec<T, N> v) {
  bool result = false;
  for (int i = 0; i < N; ++i) result = result || v[i];
  return result;
}
template <class T, int N>
MSL_INLINE bool all(vec<T, N> v) {
  bool result = true;
  for (int i = 0; i < N; ++i) result = result && v[i];
  return result;
}

}  // namespace metal
