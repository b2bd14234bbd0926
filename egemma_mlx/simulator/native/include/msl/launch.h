// Calls a kernel with its arguments, each of which a code describes: a [[buffer(n)]] index or a thread attribute.
#pragma once

namespace msl {

enum attribute {
  at_thread_position_in_grid = -1,
  at_thread_position_in_threadgroup = -2,
  at_threadgroup_position_in_grid = -3,
  at_threads_per_threadgroup = -4,
  at_dispatch_threads_per_threadgroup = -5,
  at_threadgroups_per_grid = -6,
  at_threads_per_grid = -7,
  at_grid_size = at_threads_per_grid,
  at_grid_origin = -8,
  // The ones above are uint, uint2 or uint3; the ones below are scalars.
  at_thread_index_in_threadgroup = -9,
  at_thread_index_in_simdgroup = -10,
  at_thread_index_in_quadgroup = -11,
  at_simdgroup_index_in_threadgroup = -12,
  at_quadgroup_index_in_threadgroup = -13,
  at_simdgroups_per_threadgroup = -14,
  at_quadgroups_per_threadgroup = -15,
  at_dispatch_simdgroups_per_threadgroup = -16,
  at_dispatch_quadgroups_per_threadgroup = -17,
  at_threads_per_simdgroup = -18,
  at_thread_execution_width = at_threads_per_simdgroup,
};

template <int Code>
MSL_INLINE ::uint3 position_attribute(const msl_lane MSL_RAW* lane, const msl_group MSL_RAW* group) {
  const uint32_t MSL_RAW* values = nullptr;
  if constexpr (Code == at_thread_position_in_grid) values = lane->thread_position_in_grid;
  if constexpr (Code == at_thread_position_in_threadgroup) values = lane->thread_position_in_threadgroup;
  if constexpr (Code == at_threadgroup_position_in_grid) values = group->threadgroup_position_in_grid;
  if constexpr (Code == at_threads_per_threadgroup) values = group->threads_per_threadgroup;
  if constexpr (Code == at_dispatch_threads_per_threadgroup) values = group->dispatch_threads_per_threadgroup;
  if constexpr (Code == at_threadgroups_per_grid) values = group->threadgroups_per_grid;
  if constexpr (Code == at_threads_per_grid) values = group->threads_per_grid;
  if constexpr (Code == at_grid_origin) return ::uint3{0, 0, 0};
  return ::uint3{values[0], values[1], values[2]};
}

template <int Code>
MSL_INLINE uint32_t scalar_attribute(const msl_lane MSL_RAW* lane, const msl_group MSL_RAW* group) {
  if constexpr (Code == at_thread_index_in_threadgroup) return lane->thread_index_in_threadgroup;
  if constexpr (Code == at_thread_index_in_simdgroup) return lane->thread_index_in_simdgroup;
  if constexpr (Code == at_thread_index_in_quadgroup) return lane->thread_index_in_threadgroup % 4;
  if constexpr (Code == at_simdgroup_index_in_threadgroup) return lane->simdgroup_index_in_threadgroup;
  if constexpr (Code == at_quadgroup_index_in_threadgroup) return lane->thread_index_in_threadgroup / 4;
  if constexpr (Code == at_simdgroups_per_threadgroup) return group->simdgroups_per_threadgroup;
  if constexpr (Code == at_quadgroups_per_threadgroup) return group->simdgroups_per_threadgroup * 8;
  if constexpr (Code == at_dispatch_simdgroups_per_threadgroup) return group->dispatch_simdgroups_per_threadgroup;
  if constexpr (Code == at_dispatch_quadgroups_per_threadgroup) return group->dispatch_simdgroups_per_threadgroup * 8;
  return 32;  // at_threads_per_simdgroup
}

// P from what the runtime has: a pointer, a reference or a position of one to three dimensions.
template <class P>
struct Argument {
  static MSL_INLINE P from_position(::uint3 position) { return P(position.x); }
};
template <class T>
struct Argument<vec<T, 2>> {
  static MSL_INLINE vec<T, 2> from_position(::uint3 position) { return make_vector<T, 2>(position.x, position.y); }
};
template <class T>
struct Argument<vec<T, 3>> {
  static MSL_INLINE vec<T, 3> from_position(::uint3 position) { return make_vector<T, 3>(position); }
};
template <class T>
struct Argument<T*> {
  static MSL_INLINE T* from_buffer(void* data) { return (T*)(uintptr_t)data; }
};
template <class T>
struct Argument<T&> {
  static MSL_INLINE T& from_buffer(void* data) { return *(T*)(uintptr_t)data; }
};

template <class P, int Code>
MSL_INLINE P argument(msl_buffers buffers, const msl_lane MSL_RAW* lane, const msl_group MSL_RAW* group) {
  if constexpr (Code >= 0)
    return Argument<P>::from_buffer(buffers[Code]);
  else if constexpr (Code >= at_grid_origin)
    return Argument<P>::from_position(position_attribute<Code>(lane, group));
  else
    return P(scalar_attribute<Code>(lane, group));
}

template <int... Codes>
struct codes {};

template <class... P, int... Codes>
MSL_INLINE void launch(void (*function)(P...), codes<Codes...>, msl_buffers buffers, const msl_lane MSL_RAW* lane,
                       const msl_group MSL_RAW* group) {
  function(argument<P, Codes>(buffers, lane, group)...);
}

}  // namespace msl
