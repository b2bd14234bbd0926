#include "access.h"

#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)

namespace msl {

uint64_t program_constants_loaded;

// ---- faults, out of the way of the code that finds them

[[noreturn]] static __attribute__((noinline)) void fail_bounds(uintptr_t address, uint64_t size, Access access,
                                                               Site site) {
  // The nearest region below is the one that the program meant, as a rule.
  const Region* nearest = nullptr;
  for (uint32_t i = 1; i < region_count; ++i)
    if (regions[i].begin <= address && (!nearest || regions[i].begin > nearest->begin)) nearest = &regions[i];
  // Page after page of what a buffer does not need lies after it, so a little below one is below it.
  for (uint32_t i = 1; i < region_count; ++i)
    if (regions[i].begin > address && regions[i].begin - address < 4096) nearest = &regions[i];
  if (!nearest)
    fail(Fault::out_of_bounds, offset_of(site), 0, "%s of %llu bytes at %p, where no memory is", name_of(access),
         (unsigned long long)size, (void*)address);
  fail(Fault::out_of_bounds, offset_of(site), 0, "%s of %llu bytes at byte %lld of %s, which has %llu", name_of(access),
       (unsigned long long)size, (long long)(address - nearest->begin), nearest->name,
       (unsigned long long)(nearest->end - nearest->begin));
}

[[noreturn]] static __attribute__((noinline)) void fail_alignment(const Region& region, uintptr_t address,
                                                                  uint64_t size, Access access, Site site) {
  fail(Fault::misaligned, offset_of(site), 0, "%s of %llu bytes at byte %llu of %s, which is no multiple of %llu",
       name_of(access), (unsigned long long)size, (unsigned long long)(address - region.begin), region.name,
       (unsigned long long)size);
}

[[noreturn]] static __attribute__((noinline)) void fail_read_only(const Region& region, Access access, Site site) {
  fail(Fault::read_only_store, offset_of(site), 0, "%s to %s, which is read-only", name_of(access), region.name);
}

[[noreturn]] static __attribute__((noinline)) void fail_budget(Site site) {
  fail(Fault::resource_limit, offset_of(site), 0, "the access budget is spent: does this loop end?");
}

// ---- shadows

static bool touched(const Shadow& shadow) { return shadow.write.epoch || shadow.read.epoch; }

// Gives every `1 << shift` bytes a shadow of their own, in place, from the end. Untouched pages stay so.
static __attribute__((noinline)) void refine_shadow(Region& region, uint32_t shift) {
  uint64_t pieces = 1u << (region.shadow_shift - shift);
  for (uint64_t i = ((region.end - region.begin) >> region.shadow_shift) + 1; i-- > 0;) {
    Shadow coarse = region.shadow[i];
    for (uint64_t j = i * pieces; j < (i + 1) * pieces; ++j)
      if (touched(coarse) || touched(region.shadow[j])) region.shadow[j] = coarse;
  }
  region.shadow_shift = shift;
}

template <Access access>
static ALWAYS_INLINE void trace(Shadow& shadow, const Accessor& self, const Region& region, uint64_t offset) {
  if (UNLIKELY(unordered(shadow.write, self)) && !(is_atomic(access) && shadow.write.atomic))
    fail_race(shadow.write, self, name_of(access), shadow.write.atomic ? "atomic access" : "store", region.name,
              offset);
  if (stores(access) && UNLIKELY(unordered(shadow.read, self)))
    fail_race(shadow.read, self, name_of(access), "load", region.name, offset);
  if (loads(access) && UNLIKELY(shadow.write.epoch < self.oldest_write))
    remember_uninitialised_read((Site)(machine.code_begin + self.site), region.name, offset);
  if (access == Access::load) {
    add(shadow.read, self);
  } else if (access == Access::store) {
    // All earlier accesses come before this one, so it stands for them.
    shadow.write = {self.now, self.site, self.who, false, false};
    shadow.read.epoch = 0;
  } else if (stores(access)) {
    if (shadow.write.atomic) {
      add(shadow.write, self);
    } else if (shadow.write.who != self.who || shadow.write.epoch != self.now) {
      // (The thread's own plain store, unfenced, is the stricter of the two to remember.)
      shadow.write = {self.now, self.site, self.who, true, false};
    }
  }
}

template <Access access>
static ALWAYS_INLINE void trace_range(Region& region, uint64_t offset, uint64_t size, const Accessor& self) {
  uint64_t mask = (1u << region.shadow_shift) - 1;
  if (UNLIKELY((offset | size) & mask)) refine_shadow(region, (offset | size) & 1 ? 0 : 1);
  Shadow* shadow = region.shadow + (offset >> region.shadow_shift);
  uint64_t step = 1u << region.shadow_shift;
  for (uint64_t done = 0; done < size; done += step, ++shadow) trace<access>(*shadow, self, region, offset + done);
}

static ALWAYS_INLINE Accessor accessor(const Fiber& fiber, const Region& region, Site site) {
  const bool device = region.space != Space::threadgroup;
  const Clock& clock = machine.clocks[!device];
  const uint32_t simdgroup = fiber.simdgroup_index_in_threadgroup;
  return {uint16_t(fiber.thread_index_in_threadgroup),
          device,
          simdgroup,
          uint32_t((uintptr_t)site - machine.code_begin),
          clock.threadgroup_start,
          clock.since,
          clock.now[simdgroup],
          region.initialised ? 0
          : device           ? 1
                             : clock.threadgroup_start};
}

// ---- one access

template <Access access>
static ALWAYS_INLINE Region& find_region(uintptr_t address, uint64_t size, Site site) {
  Region& region = regions[region_on_page[(address - arena) >> kPageShift]];
  if (UNLIKELY(address < region.begin || address + size > region.end)) fail_bounds(address, size, access, site);
  if (stores(access) && UNLIKELY(!region.writable)) fail_read_only(region, access, site);
  if (loads(access)) region.loaded += size;
  if (stores(access)) region.stored += size;
  if (UNLIKELY(--machine.budget == 0)) fail_budget(site);
  return region;
}

// Outside the arena: this thread's own variables and the constants of the program.
static ALWAYS_INLINE bool is_own_stack(uintptr_t address) { return address - current().stack < kStackBytes; }
static bool is_program_constant(uintptr_t address, Access access) {
  return !stores(access) && address >= machine.code_begin && address < machine.code_end;
}

template <Access access>
static ALWAYS_INLINE void check(uintptr_t address, uint64_t size, Site site) {
  if (!msl_current || is_own_stack(address)) return;
  if (UNLIKELY(address - arena >= kArenaBytes)) {
    if (is_program_constant(address, access)) {
      program_constants_loaded += size;
      return;
    }
    fail_bounds(address, size, access, site);
  }
  Region& region = find_region<access>(address, size, site);
  if (UNLIKELY((address & (size - 1)) != 0 && (size & (size - 1)) == 0 && size <= 16))
    fail_alignment(region, address, size, access, site);
  if (region.shadow) trace_range<access>(region, address - region.begin, size, accessor(current(), region, site));
}

// ---- matrices

template <Access access>
static void check_tile(const Tile& tile, Site site) {
  const uint32_t bytes = tile.element_bytes;
  const uint32_t first_thread = current().simdgroup_index_in_threadgroup * kLanes;
  for (uint32_t row = 0; row < 8; ++row) {
    uintptr_t address = tile.address + row * tile.row_bytes;
    if (UNLIKELY(address - arena >= kArenaBytes)) fail_bounds(address, 8 * bytes, access, site);
    Region& region = find_region<access>(address, 8 * bytes, site);
    if (UNLIKELY(address & (bytes - 1))) fail_alignment(region, address, bytes, access, site);
    if (!region.shadow) continue;
    Accessor self = accessor(current(), region, site);
    for (uint32_t column = 0; column < 8; ++column) {
      uint32_t r = tile.transposed ? column : row, c = tile.transposed ? row : column;
      self.who = uint16_t(first_thread + lane_of_element(r, c));
      trace_range<access>(region, address - region.begin + column * bytes, bytes, self);
    }
  }
}

void access_tile(const Tile& tile, bool is_store, Site site) {
  if (is_store)
    check_tile<Access::store>(tile, site);
  else
    check_tile<Access::load>(tile, site);
}

// A copy of a struct: word by word, where it divides.
template <Access access>
static void check_range(uintptr_t address, size_t size, Site site) {
  size_t step = (address | size) % 4 == 0 ? 4 : 1;
  for (size_t done = 0; done < size; done += step) check<access>(address + done, step, site);
}

}  // namespace msl

using namespace msl;

// ---- what -fsanitize=kernel-address calls

#define SITE __builtin_return_address(0)
#pragma GCC visibility push(default)
extern "C" {

#define DEFINE_HOOKS(size)                                                                          \
  void __asan_load##size##_noabort(uintptr_t address) { check<Access::load>(address, size, SITE); } \
  void __asan_store##size##_noabort(uintptr_t address) { check<Access::store>(address, size, SITE); }
DEFINE_HOOKS(1)
DEFINE_HOOKS(2)
DEFINE_HOOKS(4)
DEFINE_HOOKS(8)
DEFINE_HOOKS(16)
void __asan_loadN_noabort(uintptr_t address, size_t size) { check<Access::load>(address, size, SITE); }
void __asan_storeN_noabort(uintptr_t address, size_t size) { check<Access::store>(address, size, SITE); }

void* __asan_memcpy(void* to, const void* from, size_t size) {
  check_range<Access::load>((uintptr_t)from, size, SITE);
  check_range<Access::store>((uintptr_t)to, size, SITE);
  return memcpy(to, from, size);
}
void* __asan_memmove(void* to, const void* from, size_t size) {
  check_range<Access::load>((uintptr_t)from, size, SITE);
  check_range<Access::store>((uintptr_t)to, size, SITE);
  return memmove(to, from, size);
}
void* __asan_memset(void* to, int byte, size_t size) {
  check_range<Access::store>((uintptr_t)to, size, SITE);
  return memset(to, byte, size);
}

void __asan_handle_no_return() {}

// -fsanitize=array-bounds
void __ubsan_handle_out_of_bounds_abort(void*, uintptr_t index) {
  fail(Fault::out_of_bounds, offset_of(SITE), 0, "index %lld of an array of a fixed size", (long long)index);
}

}  // extern "C"
#pragma GCC visibility pop

void msl_access_atomic(const void* pointer, uint32_t size, uint32_t kind) {
  ++machine.counts.atomics;
  if (!machine.options.checked) return;
  uintptr_t address = (uintptr_t)pointer;
  if (kind == msl_atomic_load)
    check<Access::atomic_load>(address, size, SITE);
  else if (kind == msl_atomic_store)
    check<Access::atomic_store>(address, size, SITE);
  else
    check<Access::atomic_modify>(address, size, SITE);
}
