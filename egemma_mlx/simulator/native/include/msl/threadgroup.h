// Threadgroup memory and barriers.
#pragma once

// Line and column of the call, when it is a default argument. Two calls in one helper that is inlined twice share
// them, so the runtime looks at the return address too.
#define MSL_POSITION (uint32_t(__builtin_LINE()) << 10 | (uint32_t(__builtin_COLUMN()) & 0x3ff))

namespace msl {
// What `threadgroup T x;` in a kernel's body becomes: threadgroup auto& x = ::msl::threadgroup_variable<T, ID>();
template <class T, uint32_t ID>
MSL_INLINE threadgroup T& threadgroup_variable() {
  static_assert(alignof(T) <= 64, "threadgroup variables are 64-byte aligned");
  return *(threadgroup T*)(uintptr_t)msl_threadgroup_variable(ID, sizeof(T));
}
}  // namespace msl

namespace metal {

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint32_t(a) | uint32_t(b)); }

MSL_INLINE void threadgroup_barrier(mem_flags flags, uint32_t position = MSL_POSITION) {
  msl_threadgroup_barrier(uint32_t(flags), position);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, uint32_t position = MSL_POSITION) {
  msl_simdgroup_barrier(uint32_t(flags), position);
}

}  // namespace metal
