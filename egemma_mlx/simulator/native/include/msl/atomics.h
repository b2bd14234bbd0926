// <metal_atomic>. Threads change places at barriers and simd operations alone, so plain code is atomic here; the
// runtime hears of each access, which may race with ordinary ones.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template <class T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

}  // namespace metal

namespace msl {
template <class T, class P>
MSL_INLINE T MSL_RAW* atomic_access(P pointer, msl_atomic_kind kind) {
  msl_access_atomic((const void*)(uintptr_t)pointer, sizeof(T), kind);
  return raw<T>(pointer);
}
}  // namespace msl

namespace metal {

// The value's type is not deduced from the operand: `atomic_fetch_add_explicit(counter, 1, …)` converts the 1.
template <class T>
struct msl_same {
  typedef T type;
};

#define MSL_ATOMIC_MODIFY(space, name, expression)                                                  \
  template <class T>                                                                                \
  MSL_INLINE T name(volatile space atomic<T>* object, typename msl_same<T>::type b, memory_order) { \
    T MSL_RAW* place = ::msl::atomic_access<T>(object, msl_atomic_modify);                          \
    T a = *place;                                                                                   \
    *place = T(expression);                                                                         \
    return a;                                                                                       \
  }

#define MSL_ATOMICS(space)                                                                                             \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_add_explicit, a + b)                                                           \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_sub_explicit, a - b)                                                           \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_max_explicit, a < b ? b : a)                                                   \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_min_explicit, b < a ? b : a)                                                   \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_and_explicit, a& b)                                                            \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_or_explicit, a | b)                                                            \
  MSL_ATOMIC_MODIFY(space, atomic_fetch_xor_explicit, a ^ b)                                                           \
  MSL_ATOMIC_MODIFY(space, atomic_exchange_explicit, b)                                                                \
  template <class T>                                                                                                   \
  MSL_INLINE T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                            \
    return *::msl::atomic_access<T>(object, msl_atomic_load);                                                          \
  }                                                                                                                    \
  template <class T>                                                                                                   \
  MSL_INLINE void atomic_store_explicit(volatile space atomic<T>* object, typename msl_same<T>::type value,            \
                                        memory_order) {                                                                \
    *::msl::atomic_access<T>(object, msl_atomic_store) = value;                                                        \
  }                                                                                                                    \
  template <class T>                                                                                                   \
  MSL_INLINE bool atomic_compare_exchange_weak_explicit(                                                               \
      volatile space atomic<T>* object, T* expected, typename msl_same<T>::type desired, memory_order, memory_order) { \
    T MSL_RAW* place = ::msl::atomic_access<T>(object, msl_atomic_modify);                                             \
    T found = *place;                                                                                                  \
    if (__builtin_memcmp(&found, expected, sizeof(T)) == 0) {                                                          \
      *place = desired;                                                                                                \
      return true;                                                                                                     \
    }                                                                                                                  \
    *expected = found;                                                                                                 \
    return false;                                                                                                      \
  }
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)

}  // namespace metal
