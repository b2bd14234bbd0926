// <metal_type_traits>: the traits that templated kernels use.
#pragma once

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B>
using bool_constant = integral_constant<bool, B>;

template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct remove_reference {
  typedef T type;
};
template <class T>
struct remove_reference<T&> {
  typedef T type;
};
template <class T>
using remove_reference_t = typename remove_reference<T>::type;

template <class T>
struct remove_addrspace {
  typedef T type;
};
template <class T>
struct remove_addrspace<device T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<__attribute__((opencl_constant)) T> {
  typedef T type;
};
template <class T>
struct remove_addrspace<threadgroup T> {
  typedef T type;
};
template <class T>
using remove_addrspace_t = typename remove_addrspace<T>::type;

template <class T>
struct remove_const {
  typedef T type;
};
template <class T>
struct remove_const<const T> {
  typedef T type;
};
template <class T>
using remove_cv_t = typename remove_const<remove_addrspace_t<typename remove_const<T>::type>>::type;

template <class T>
struct is_pointer : false_type {};
template <class T>
struct is_pointer<T*> : true_type {};
template <class T>
constexpr bool is_pointer_v = is_pointer<T>::value;

template <class T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <class T>
constexpr bool is_integral_v = is_integral<T>::value;

template <class T>
struct is_floating_point : bool_constant<is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <class T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;

template <class T>
struct is_signed : bool_constant<(T(-1) < T(0))> {};
template <class T>
constexpr bool is_signed_v = is_signed<T>::value;
template <class T>
constexpr bool is_unsigned_v = !is_signed<T>::value;

}  // namespace metal
