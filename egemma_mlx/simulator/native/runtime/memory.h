// Device and threadgroup memory: where it is, and the passing of time by barriers.
#pragma once
#include "faults.h"
#include "machine.h"
#include "races.h"

namespace msl {

enum class Space : uint32_t { device, constant, threadgroup };

// A buffer or a threadgroup variable.
struct Region {
  uintptr_t begin, end;
  Shadow* shadow;  // one for `1 << shadow_shift` bytes; null when nothing may write here
  uint32_t shadow_shift;
  Space space;
  bool writable, initialised;
  uint32_t id;  // of a threadgroup variable
  uint64_t loaded, stored;
  char name[64];
};

constexpr uint32_t kMostRegions = 128;  // 31 buffers and the threadgroup variables; the first one is nowhere
extern Region regions[kMostRegions];
extern uint32_t region_count;

// The arena in which all regions lie, each on pages of its own with an empty page after it.
constexpr uint32_t kPageShift = 16;
constexpr uintptr_t kArenaBytes = 32ull << 30;
extern uintptr_t arena;
extern uint8_t region_on_page[kArenaBytes >> kPageShift];

bool reserve_arena();

struct RegionSpec {
  const char* name;
  uint64_t bytes;
  Space space;
  uint64_t colour;  // how far into its first page it begins
  uint32_t shadow_shift;
  uint32_t id;
  bool writable, initialised;
};
// Null when there is no room.
Region* add_region(const RegionSpec& spec);
void remove_regions();

void begin_threadgroup_memory();
void fence_threadgroup(uint32_t flags);
void fence_simdgroup(uint32_t simdgroup, uint32_t flags);

}  // namespace msl
