// What kernel objects (include/) and the runtime (runtime/) share.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Kernels see the runtime's state through an address space of its own: the machine code is the same, but the
// sanitizer instruments address space 0 alone.
#ifdef MSL_RUNTIME
#define MSL_RAW
#else
#define MSL_RAW __attribute__((address_space(1)))
#endif

// A call that the lanes of a simdgroup make together. `nomerge` keeps calls in two branches apart, so that the return
// address tells them apart too.
#define MSL_COLLECTIVE __attribute__((convergent, nomerge))

#pragma GCC visibility push(default)
extern "C" {

// One GPU thread.
struct msl_lane {
  uint32_t thread_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t fragment_row, fragment_column;  // of this lane's two elements of an 8×8 matrix
  uint32_t generation;                     // accumulators of this generation await msl_settle_matrices
  uint32_t fragment_bytes;                 // of the matrices that this lane holds now
  uint32_t most_fragment_bytes;
};

// One threadgroup, and the launch that it belongs to.
struct msl_group {
  uint32_t threadgroup_position_in_grid[3];
  uint32_t threads_per_threadgroup[3];  // smaller at the edges of the grid than what was dispatched
  uint32_t dispatch_threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t threads_per_grid[3];
  uint32_t simdgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup;
};

extern msl_lane MSL_RAW* MSL_RAW msl_current;

// A kernel's arguments by [[buffer(n)]], and the function that unpacks them.
typedef void* const MSL_RAW* msl_buffers;
typedef void (*msl_entry)(msl_buffers, const msl_lane MSL_RAW*, const msl_group MSL_RAW*);

// `position` is the line and column of the call in all of these.
MSL_COLLECTIVE void msl_threadgroup_barrier(uint32_t flags, uint32_t position);
MSL_COLLECTIVE void msl_simdgroup_barrier(uint32_t flags, uint32_t position);

// The values that the lanes bring to one simd_* operation. The first lane that needs a reduction leaves it here.
struct msl_values {
  uint64_t lane[32][2];
  uint64_t reduced[2];
  uint32_t count;  // lanes in this simdgroup
  uint32_t is_reduced;
};
MSL_COLLECTIVE msl_values MSL_RAW* msl_exchange(const char* name, uint32_t position, uint64_t low, uint64_t high);
__attribute__((noreturn)) void msl_bad_lane(const char* name, uint32_t lane);

// One lane's two elements of an 8×8 float matrix. Products are queued: while `generation` is the lane's, the value
// is to come, in the simdgroup's slot `slot`.
struct msl_accumulator {
  float elements[2];
  uint32_t slot, generation;
};
// Elements of a and b are two floats each, the first one in the low half.
MSL_COLLECTIVE void msl_multiply_accumulate(msl_accumulator* d, uint64_t a, uint64_t b, const msl_accumulator* c);
void msl_settle_matrices(void);
MSL_COLLECTIVE void msl_copy_matrix(msl_accumulator* to, const msl_accumulator* from);
void msl_forget_matrix(uint32_t slot);
// Checks one simdgroup_load or simdgroup_store of an 8×8 tile.
MSL_COLLECTIVE void msl_access_matrix(const void* tile, uint64_t stride, uint32_t element_size, uint32_t transposed,
                                      uint32_t is_store);

void* msl_threadgroup_variable(uint32_t id, uint32_t size);

enum msl_atomic_kind { msl_atomic_load, msl_atomic_store, msl_atomic_modify };
void msl_access_atomic(const void* address, uint32_t size, uint32_t kind);
}
#pragma GCC visibility pop
