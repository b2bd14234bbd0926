// What happens at every access to memory in a checked kernel: bounds, alignment, counters and the race detector.
#pragma once
#include "memory.h"

namespace msl {

enum class Access { load, store, atomic_load, atomic_store, atomic_modify };

constexpr bool loads(Access access) { return access != Access::store && access != Access::atomic_store; }
constexpr bool stores(Access access) { return access != Access::load && access != Access::atomic_load; }
constexpr bool is_atomic(Access access) { return access != Access::load && access != Access::store; }
constexpr const char* name_of(Access access) {
  return is_atomic(access) ? "atomic access" : access == Access::load ? "load" : "store";
}

extern uint64_t program_constants_loaded;  // bytes

// Eight rows of eight elements, each by the lane that holds it.
struct Tile {
  uintptr_t address;
  uint64_t row_bytes;
  uint32_t element_bytes;
  bool transposed;
};
void access_tile(const Tile& tile, bool is_store, Site site);

}  // namespace msl
