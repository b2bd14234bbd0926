// simd_* operations: every lane of the simdgroup brings a value, and computes from all of them.
#pragma once

namespace msl {

template <class T>
MSL_INLINE T from_words(uint64_t low, uint64_t high) {
  uint64_t words[2] = {low, high};
  T value;
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}

template <class T>
MSL_INLINE T value_of_lane(const msl_values MSL_RAW* values, uint32_t lane) {
  return from_words<T>(values->lane[lane][0], values->lane[lane][1]);
}

template <class T>
MSL_INLINE msl_values MSL_RAW* exchange(const char* name, uint32_t position, T value) {
  static_assert(sizeof(T) <= 16, "simd operations take at most 16 bytes a lane");
  uint64_t words[2] = {0, 0};
  __builtin_memcpy(words, &value, sizeof(T));
  return msl_exchange(name, position, words[0], words[1]);
}

// Combines the lanes as a balanced tree, once for the whole simdgroup.
template <class T, class F>
MSL_INLINE T reduce(const char* name, uint32_t position, T value, F combine) {
  msl_values MSL_RAW* values = exchange(name, position, value);
  if (!values->is_reduced) {
    T partial[32];
    uint32_t count = values->count;
    for (uint32_t i = 0; i < count; ++i) *raw<T>(&partial[i]) = value_of_lane<T>(values, i);
    for (; count > 1; count = (count + 1) / 2)
      for (uint32_t i = 0; i < count / 2; ++i) {
        T low = *raw<T>(&partial[i]), high = *raw<T>(&partial[i + (count + 1) / 2]);
        *raw<T>(&partial[i]) = combine(low, high);
      }
    T result = *raw<T>(&partial[0]);
    uint64_t words[2] = {0, 0};
    __builtin_memcpy(words, &result, sizeof(T));
    values->reduced[0] = words[0];
    values->reduced[1] = words[1];
    values->is_reduced = 1;
  }
  return from_words<T>(values->reduced[0], values->reduced[1]);
}

template <class T>
MSL_INLINE T shuffle(const char* name, uint32_t position, T value, uint32_t source) {
  const msl_values MSL_RAW* values = exchange(name, position, value);
  if (source >= values->count) msl_bad_lane(name, source);
  return value_of_lane<T>(values, source);
}

// A shift: the lanes that would read past the simdgroup keep `otherwise`.
template <class T>
MSL_INLINE T shift(const char* name, uint32_t position, T value, T otherwise, int distance) {
  const msl_values MSL_RAW* values = exchange(name, position, value);
  int source = int(msl_current->thread_index_in_simdgroup) + distance;
  if (source < 0 || source >= 32) return otherwise;
  if (source >= int(values->count)) msl_bad_lane(name, source);
  return value_of_lane<T>(values, source);
}

template <class T, class F>
MSL_INLINE T scan(const char* name, uint32_t position, T value, T start, bool inclusive, F combine) {
  const msl_values MSL_RAW* values = exchange(name, position, value);
  uint32_t end = msl_current->thread_index_in_simdgroup + inclusive;
  T result = start;
  for (uint32_t i = 0; i < end; ++i) result = combine(result, value_of_lane<T>(values, i));
  return result;
}

}  // namespace msl

namespace metal {

#define MSL_REDUCTION(name, expression)                                                        \
  template <class T>                                                                           \
  MSL_INLINE T name(T value, uint32_t position = MSL_POSITION) {                               \
    return ::msl::reduce(#name, position, value, [](T a, T b) -> T { return T(expression); }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)

MSL_INLINE bool simd_any(bool value, uint32_t position = MSL_POSITION) {
  return ::msl::reduce("simd_any", position, value, [](bool a, bool b) { return a || b; });
}
MSL_INLINE bool simd_all(bool value, uint32_t position = MSL_POSITION) {
  return ::msl::reduce("simd_all", position, value, [](bool a, bool b) { return a && b; });
}

template <class T>
MSL_INLINE T simd_shuffle(T value, ushort lane, uint32_t position = MSL_POSITION) {
  return ::msl::shuffle("simd_shuffle", position, value, lane);
}
template <class T>
MSL_INLINE T simd_broadcast(T value, ushort lane, uint32_t position = MSL_POSITION) {
  return ::msl::shuffle("simd_broadcast", position, value, lane);
}
template <class T>
MSL_INLINE T simd_broadcast_first(T value, uint32_t position = MSL_POSITION) {
  return ::msl::shuffle("simd_broadcast_first", position, value, 0);
}
template <class T>
MSL_INLINE T simd_shuffle_xor(T value, ushort mask, uint32_t position = MSL_POSITION) {
  return ::msl::shuffle("simd_shuffle_xor", position, value, msl_current->thread_index_in_simdgroup ^ mask);
}
template <class T>
MSL_INLINE T simd_shuffle_down(T value, ushort delta, uint32_t position = MSL_POSITION) {
  return ::msl::shift("simd_shuffle_down", position, value, value, int(delta));
}
template <class T>
MSL_INLINE T simd_shuffle_up(T value, ushort delta, uint32_t position = MSL_POSITION) {
  return ::msl::shift("simd_shuffle_up", position, value, value, -int(delta));
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_down(T value, T fill, ushort delta, uint32_t position = MSL_POSITION) {
  return ::msl::shift("simd_shuffle_and_fill_down", position, value, fill, int(delta));
}
template <class T>
MSL_INLINE T simd_shuffle_and_fill_up(T value, T fill, ushort delta, uint32_t position = MSL_POSITION) {
  return ::msl::shift("simd_shuffle_and_fill_up", position, value, fill, -int(delta));
}

template <class T>
MSL_INLINE T simd_prefix_inclusive_sum(T value, uint32_t position = MSL_POSITION) {
  return ::msl::scan("simd_prefix_inclusive_sum", position, value, T(0), true, [](T a, T b) { return T(a + b); });
}
template <class T>
MSL_INLINE T simd_prefix_exclusive_sum(T value, uint32_t position = MSL_POSITION) {
  return ::msl::scan("simd_prefix_exclusive_sum", position, value, T(0), false, [](T a, T b) { return T(a + b); });
}

MSL_INLINE bool simd_is_first() { return msl_current->thread_index_in_simdgroup == 0; }

}  // namespace metal
