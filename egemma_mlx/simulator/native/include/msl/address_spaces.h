// Address spaces and the function qualifiers.
#pragma once

// The OpenCL attributes rather than address_space(N): clang checks conversions as strictly, but lowers them all to
// address space 0 on a CPU, the one that the sanitizer instruments.
#define device __attribute__((opencl_global))
#define constant __attribute__((opencl_constant)) const
#define threadgroup __attribute__((opencl_local))
#define thread

#define kernel
#define vertex MSL_vertex_functions_are_not_simulated
#define fragment MSL_fragment_functions_are_not_simulated

#define MSL_INLINE inline __attribute__((always_inline))
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constant constexpr const

namespace msl {
// `pointer`, as one that the sanitizer does not see.
template <class T, class P>
MSL_INLINE T MSL_RAW* raw(P pointer) {
  return (T MSL_RAW*)(uintptr_t)pointer;
}
}  // namespace msl
