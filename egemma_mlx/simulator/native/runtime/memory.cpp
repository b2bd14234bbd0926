#include "memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "access.h"

namespace msl {

constexpr uint64_t kThreadgroupBytes = 32 << 10;
constexpr uintptr_t kPageBytes = 1 << kPageShift;
// An index that is wrong by a multiple of a row's or a tile's bytes lands between buffers, not in the next one.
constexpr uintptr_t kGapBytes = 128 << 20;

Region regions[kMostRegions];
uint32_t region_count;
uintptr_t arena;
uint8_t region_on_page[kArenaBytes >> kPageShift];
static uintptr_t arena_top;

bool reserve_arena() {
  // Not accessible until a region lies there: a wild access of an unchecked kernel stops the process.
  void* memory = mmap(nullptr, kArenaBytes + kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  arena = ((uintptr_t)memory + kPageBytes - 1) & ~(kPageBytes - 1);
  remove_regions();
  return true;
}

static uintptr_t first_page(const Region& region) { return region.begin & ~(kPageBytes - 1); }
static uintptr_t page_bytes(const Region& region) {
  return ((region.end + kPageBytes - 1) & ~(kPageBytes - 1)) - first_page(region);
}

// Room for a shadow of every byte, and of the bytes that fill up the last element.
static uint64_t shadow_bytes(const Region& region) { return (region.end - region.begin + 8) * sizeof(Shadow); }

static bool add_shadow(Region& region) {
  void* memory =
      mmap(nullptr, shadow_bytes(region), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  region.shadow = memory == MAP_FAILED ? nullptr : (Shadow*)memory;
  return memory != MAP_FAILED;
}

Region* add_region(const RegionSpec& spec) {
  if (region_count == kMostRegions) return nullptr;
  Region region = {};
  region.begin = arena_top + spec.colour;
  region.end = region.begin + spec.bytes;
  region.space = spec.space;
  region.writable = spec.writable;
  region.initialised = spec.initialised;
  region.shadow_shift = spec.shadow_shift;
  region.id = spec.id;
  snprintf(region.name, sizeof region.name, "%s", spec.name);
  if (region.end + 2 * kPageBytes > arena + kArenaBytes) return nullptr;
  // An empty region has a page all the same: its address must be known, to be out of bounds.
  if (mprotect((void*)first_page(region), page_bytes(region), PROT_READ | PROT_WRITE) != 0) return nullptr;
  if (machine.options.checked && spec.writable && !add_shadow(region)) return nullptr;
  memset(&region_on_page[(first_page(region) - arena) >> kPageShift], region_count, page_bytes(region) >> kPageShift);
  arena_top = first_page(region) + page_bytes(region) + kGapBytes;
  regions[region_count] = region;
  return &regions[region_count++];
}

void remove_regions() {
  for (uint32_t i = 1; i < region_count; ++i) {
    Region& region = regions[i];
    memset(&region_on_page[(first_page(region) - arena) >> kPageShift], 0, page_bytes(region) >> kPageShift);
    mmap((void*)first_page(region), page_bytes(region), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (region.shadow) munmap(region.shadow, shadow_bytes(region));
  }
  regions[0].begin = UINTPTR_MAX;  // no access lies in the region that is nowhere
  region_count = 1;
  arena_top = arena + kPageBytes;
}

// ---- time

static void advance(Clock& clock) {
  uint32_t latest = 0;
  for (uint32_t now : clock.now) latest = now > latest ? now : latest;
  clock.since = latest + 1;
  for (uint32_t& now : clock.now) now = clock.since;
}

static bool orders(uint32_t flags, Space space) { return flags & (space == Space::device ? 1 : 2); }
static Clock& clock_of(Space space) { return machine.clocks[space == Space::threadgroup]; }

void fence_threadgroup(uint32_t flags) {
  if (orders(flags, Space::device)) advance(clock_of(Space::device));
  if (orders(flags, Space::threadgroup)) advance(clock_of(Space::threadgroup));
}

void fence_simdgroup(uint32_t simdgroup, uint32_t flags) {
  if (orders(flags, Space::device)) ++clock_of(Space::device).now[simdgroup];
  if (orders(flags, Space::threadgroup)) ++clock_of(Space::threadgroup).now[simdgroup];
}

// ---- threadgroup variables

void begin_threadgroup_memory() {
  for (Clock& clock : machine.clocks) {
    advance(clock);
    clock.threadgroup_start = clock.since;
  }
  for (uint32_t i = 1; i < region_count; ++i)
    if (regions[i].space == Space::threadgroup)
      memset((void*)regions[i].begin, 0xff, regions[i].end - regions[i].begin);
}

static Region& add_variable(uint32_t id, uint32_t size, Site site) {
  char name[64];
  snprintf(name, sizeof name, "threadgroup variable #%u", id);
  machine.counts.threadgroup_memory += (size + 15) & ~15u;
  if (machine.counts.threadgroup_memory > kThreadgroupBytes)
    fail(Fault::resource_limit, offset_of(site), 0, "%llu bytes of threadgroup memory: there are %llu",
         (unsigned long long)machine.counts.threadgroup_memory, (unsigned long long)kThreadgroupBytes);
  // Variables start at different cache sets.
  uint64_t colour = region_count % 16 * 1088;
  Region* region = add_region({name, size, Space::threadgroup, colour, 2, id, true, false});
  if (!region) fail(Fault::resource_limit, offset_of(site), 0, "too many threadgroup variables");
  memset((void*)region->begin, 0xff, size);
  return *region;
}

}  // namespace msl

using namespace msl;

void* msl_threadgroup_variable(uint32_t id, uint32_t size) {
  for (uint32_t i = 1; i < region_count; ++i)
    if (regions[i].space == Space::threadgroup && regions[i].id == id) return (void*)regions[i].begin;
  return (void*)add_variable(id, size, __builtin_return_address(0)).begin;
}
