// The state of the simulated GPU while it runs one kernel. One kernel runs at a time.
#pragma once
#define MSL_RUNTIME
#include "../abi.h"
#include "fibers.h"

namespace msl {

constexpr int kLanes = 32;
constexpr int kMostSimdgroups = kMostFibers / kLanes;

// What machine.py makes an exception class of; keep the order.
enum class Fault : uint32_t {
  none,
  out_of_bounds,
  misaligned,
  read_only_store,
  data_race,
  divergence,
  uninitialised_read,
  resource_limit,
};

// A point in the kernel, as a return address.
typedef const void* Site;

// A call that the lanes of a simdgroup (or all threads of a threadgroup) make together.
struct Collective {
  const char* name;
  Site site;
  uint32_t position;

  bool is(const Collective& other) const { return site == other.site && position == other.position; }
};

constexpr uint32_t kQueuedProducts = 32;
constexpr uint32_t kSlots = 64;
constexpr uint32_t kMatrixLog = 256;

// Apple's layout of a matrix: two neighbouring elements of a row in each lane, lanes in quads.
inline uint32_t row_of_lane(uint32_t lane) { return (lane >> 2 & 4) | (lane >> 1 & 3); }
inline uint32_t column_of_lane(uint32_t lane) { return (lane >> 1 & 4) | (lane << 1 & 2); }
inline uint32_t lane_of_element(uint32_t row, uint32_t column) {
  return (row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column >> 1 & 1);
}

struct Fiber : msl_lane {
  void* stack_pointer;
  uintptr_t stack;
  uint32_t operations, products;  // of matrices, since the simdgroup's queue was last empty
  uint64_t targeted;              // slots whose value goes to one of this lane's matrices: `targets`
  msl_accumulator* targets[kSlots];
};

// A matrix operation, which must be the same in every lane.
struct MatrixOperation {
  Site site;
  const void* tile;  // of a load or store
  uint64_t stride;
};

// d = a · b + c, or a copy d = c. Here are a and b, while c and d are in slots.
struct Product {
  float a[8][8], b[8][8];
  uint32_t c, d;
  bool is_copy;
};

struct Simdgroup {
  uint32_t ready;  // a bit a lane
  uint32_t size, live, waiting;
  uint32_t waiting_for_products;  // a bit a lane
  Collective collective;          // what the waiting lanes wait for
  uint32_t exchange;              // which of `values` is in use; lanes may still be reading the other one
  msl_values values[2];
  // Since the queue was last empty:
  uint32_t operations;  // of the lane that has done most
  uint32_t settled;     // products that have run
  uint32_t slots_used;
  MatrixOperation log[kMatrixLog];
  Product products[kQueuedProducts];
  float slots[kSlots][8][8];
};

// Memory fences, counted. Of two accesses in a threadgroup the earlier one is ordered when a threadgroup barrier
// (`since` has moved past it) or, within one simdgroup, a simdgroup barrier (`now` has) lies between.
struct Clock {
  uint32_t threadgroup_start;
  uint32_t since;
  uint32_t now[kMostSimdgroups];
};

struct Counts {
  uint64_t multiply_accumulates, threadgroup_barriers, simdgroup_barriers, simd_operations, atomics;
  uint64_t threads, threadgroups, threadgroup_memory, fragment_bytes;
};

struct Options {
  uint32_t checked, reversed;
  uint64_t access_budget;
};

struct Machine {
  msl_group group;
  Fiber fibers[kMostFibers];
  Simdgroup simdgroups[kMostSimdgroups];
  uint32_t thread_count, simdgroup_count;
  uint32_t simdgroups_waiting;        // at the threadgroup barrier
  Collective threadgroup_collective;  // which one that is
  uint32_t threadgroup_flags;
  Clock clocks[2];  // of device and of threadgroup memory
  uint64_t budget;
  Counts counts;
  Options options;
  msl_entry entry;
  void** buffers;
  void* host_stack;
  uintptr_t code_begin, code_end;  // of the kernel's shared object
};

extern Machine machine;

inline Fiber& current() { return *(Fiber*)msl_current; }
inline Simdgroup& simdgroup_of(const Fiber& fiber) { return machine.simdgroups[fiber.simdgroup_index_in_threadgroup]; }

}  // namespace msl
