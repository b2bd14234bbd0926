// <metal_math>: computed in float and rounded to the argument's type; vectors component by component.
#pragma once

#define MSL_UNARY(name, expression)                     \
  MSL_INLINE float name(float x) { return expression; } \
  MSL_INLINE half name(half h) {                        \
    float x = h;                                        \
    return half(expression);                            \
  }                                                     \
  MSL_INLINE bfloat name(bfloat b) {                    \
    float x = b;                                        \
    return bfloat(expression);                          \
  }                                                     \
  template <class T, int N>                             \
  MSL_INLINE vec<T, N> name(vec<T, N> v) {              \
    vec<T, N> result{};                                 \
    for (int i = 0; i < N; ++i) result[i] = name(v[i]); \
    return result;                                      \
  }

#define MSL_BINARY(name, expression)                                \
  MSL_INLINE float name(float x, float y) { return expression; }    \
  MSL_INLINE half name(half a, half b) {                            \
    float x = a, y = b;                                             \
    return half(expression);                                        \
  }                                                                 \
  MSL_INLINE bfloat name(bfloat a, bfloat b) {                      \
    float x = a, y = b;                                             \
    return bfloat(expression);                                      \
  }                                                                 \
  template <class T, int N>                                         \
  MSL_INLINE vec<T, N> name(vec<T, N> a, vec<T, N> b) {             \
    vec<T, N> result{};                                             \
    for (int i = 0; i < N; ++i) result[i] = name(T(a[i]), T(b[i])); \
    return result;                                                  \
  }

// The functions that exist in metal::, metal::precise:: and metal::fast:: alike.
#define MSL_MATH_FUNCTIONS                    \
  MSL_UNARY(exp, __builtin_expf(x))           \
  MSL_UNARY(exp2, __builtin_exp2f(x))         \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))  \
  MSL_UNARY(log, __builtin_logf(x))           \
  MSL_UNARY(log2, __builtin_log2f(x))         \
  MSL_UNARY(log10, __builtin_log10f(x))       \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))         \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  MSL_UNARY(sin, __builtin_sinf(x))           \
  MSL_UNARY(cos, __builtin_cosf(x))           \
  MSL_UNARY(tan, __builtin_tanf(x))           \
  MSL_UNARY(sinh, __builtin_sinhf(x))         \
  MSL_UNARY(cosh, __builtin_coshf(x))         \
  MSL_UNARY(tanh, __builtin_tanhf(x))         \
  MSL_UNARY(asin, __builtin_asinf(x))         \
  MSL_UNARY(acos, __builtin_acosf(x))         \
  MSL_UNARY(atan, __builtin_atanf(x))         \
  MSL_UNARY(floor, __builtin_floorf(x))       \
  MSL_UNARY(ceil, __builtin_ceilf(x))         \
  MSL_UNARY(trunc, __builtin_truncf(x))       \
  MSL_UNARY(rint, __builtin_rintf(x))         \
  MSL_UNARY(round, __builtin_roundf(x))       \
  MSL_UNARY(fabs, __builtin_fabsf(x))         \
  MSL_UNARY(fract, x - __builtin_floorf(x))   \
  MSL_BINARY(pow, __builtin_powf(x, y))       \
  MSL_BINARY(powr, __builtin_powf(x, y))      \
  MSL_BINARY(fmod, __builtin_fmodf(x, y))     \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))   \
  MSL_BINARY(fmin, __builtin_fminf(x, y))     \
  MSL_BINARY(fmax, __builtin_fmaxf(x, y))

namespace metal {

MSL_MATH_FUNCTIONS
namespace precise {
MSL_MATH_FUNCTIONS
}
namespace fast {
MSL_MATH_FUNCTIONS
}

MSL_BINARY(copysign, __builtin_copysignf(x, y))

MSL_INLINE float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }

MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
template <class T, int N>
MSL_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  vec<T, N> result{};
  for (int i = 0; i < N; ++i) result[i] = fma(T(a[i]), T(b[i]), T(c[i]));
  return result;
}

// Apple's headers have no math functions of integers: an integer becomes a float.
#define MSL_UNARY_OF_INTEGER(name)                          \
  template <class T, class = enable_if_t<is_integral_v<T>>> \
  MSL_INLINE float name(T x) {                              \
    return name(float(x));                                  \
  }
MSL_UNARY_OF_INTEGER(exp)
MSL_UNARY_OF_INTEGER(log)
MSL_UNARY_OF_INTEGER(sqrt)
MSL_UNARY_OF_INTEGER(rsqrt)

MSL_INLINE bool isnan(float x) { return __builtin_isnan(x); }
MSL_INLINE bool isinf(float x) { return __builtin_isinf(x); }
MSL_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }

}  // namespace metal
