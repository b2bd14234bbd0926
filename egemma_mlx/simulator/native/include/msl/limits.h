// <metal_limits>
#pragma once

namespace metal {

template <class T>
struct numeric_limits {
  static_assert(is_integral_v<T>, "numeric_limits of an unknown type");
  static constexpr T lowest() { return is_signed_v<T> ? T(T(1) << (sizeof(T) * 8 - 1)) : T(0); }
  static constexpr T min() { return lowest(); }
  static constexpr T max() { return T(~lowest()); }
};

template <class T>
struct msl_float_limits {
  static constexpr T infinity() { return T(__builtin_inff()); }
  static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }
};

template <>
struct numeric_limits<float> : msl_float_limits<float> {
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
};

template <>
struct numeric_limits<half> : msl_float_limits<half> {
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half min() { return half(0x1p-14f); }
  static constexpr half max() { return half(65504.0f); }
  static constexpr half epsilon() { return half(0x1p-10f); }
};

template <>
struct numeric_limits<bfloat> : msl_float_limits<bfloat> {
  static constexpr bfloat lowest() { return bfloat(-0x1.fep127f); }
  static constexpr bfloat min() { return bfloat(0x1p-126f); }
  static constexpr bfloat max() { return bfloat(0x1.fep127f); }
  static constexpr bfloat epsilon() { return bfloat(0x1p-7f); }
};

}  // namespace metal
