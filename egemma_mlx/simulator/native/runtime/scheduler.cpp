#include "scheduler.h"

#include "faults.h"
#include "matrices.h"
#include "memory.h"

namespace msl {

static bool reversed() { return machine.options.reversed; }

static Fiber* next_of(uint32_t simdgroup) {
  uint32_t ready = machine.simdgroups[simdgroup].ready;
  if (!ready) return nullptr;
  uint32_t lane = reversed() ? kLanes - 1 - __builtin_clz(ready) : __builtin_ctz(ready);
  return &machine.fibers[simdgroup * kLanes + lane];
}

// A ready lane of this simdgroup, else of the next one in order.
static Fiber* next_fiber(uint32_t simdgroup) {
  const uint32_t count = machine.simdgroup_count;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t step = reversed() ? count - i : i;
    if (Fiber* fiber = next_of((simdgroup + step) % count)) return fiber;
  }
  return nullptr;
}

static void start(Fiber& fiber) {
  simdgroup_of(fiber).ready &= ~(1u << fiber.thread_index_in_simdgroup);
  msl_current = &fiber;
}

static void switch_to(Fiber& next) {
  Fiber& self = current();
  start(next);
  if (&next != &self) msl_switch_stack(&self.stack_pointer, next.stack_pointer);
}

static uint32_t site_of(const Collective& collective) { return offset_of(collective.site); }

// Every thread that has not ended waits at the threadgroup barrier, and it needs those that have.
[[noreturn]] static void fail_stuck() {
  uint32_t waiting = 0;
  for (uint32_t s = 0; s < machine.simdgroup_count; ++s) waiting += machine.simdgroups[s].waiting;
  fail(Fault::divergence, site_of(machine.threadgroup_collective), 0,
       "threadgroup_barrier reached by %u threads, while %u have ended without it", waiting,
       machine.thread_count - waiting);
}

static void run_next(uint32_t simdgroup) {
  Fiber* next = next_fiber(simdgroup);
  if (!next) fail_stuck();
  switch_to(*next);
}

// Once no lane of the simdgroup can go on: lets those go on that wait for products and have them.
static void serve_waiting(uint32_t index) {
  Simdgroup& simdgroup = machine.simdgroups[index];
  if (!simdgroup.waiting_for_products || simdgroup.ready) return;
  uint32_t served = settle_products(index) & simdgroup.waiting_for_products;
  if (!served) fail_missing_operation(index);
  simdgroup.waiting_for_products &= ~served;
  simdgroup.ready = served;
}

// The calling lane waits for `collective`. True when it is the last one of its simdgroup to do so.
static bool join(Simdgroup& simdgroup, Fiber& self, const Collective& collective) {
  if (--machine.budget == 0)
    fail(Fault::resource_limit, site_of(collective), 0, "the access budget is spent: does this loop end?");
  if (simdgroup.waiting == 0)
    simdgroup.collective = collective;
  else if (!simdgroup.collective.is(collective))
    fail(Fault::divergence, site_of(collective), site_of(simdgroup.collective),
         "%s in this lane, while other lanes of its simdgroup are at {other} (%s)", collective.name,
         simdgroup.collective.name);
  if (++simdgroup.waiting < simdgroup.live) {
    serve_waiting(self.simdgroup_index_in_threadgroup);
    return false;
  }
  if (simdgroup.live < simdgroup.size)
    fail(Fault::divergence, site_of(collective), 0, "%s in %u of %u lanes: the others have ended", collective.name,
         simdgroup.live, simdgroup.size);
  settle_all(self.simdgroup_index_in_threadgroup);
  return true;
}

static void release(uint32_t index) {
  Simdgroup& simdgroup = machine.simdgroups[index];
  simdgroup.ready = ~0u >> (kLanes - simdgroup.size);
  simdgroup.waiting = 0;
}

// Waits for the simdgroup; `once` runs when all of it has arrived, before any lane goes on.
template <class F>
static void meet_simdgroup(const Collective& collective, F once) {
  Fiber& self = current();
  uint32_t index = self.simdgroup_index_in_threadgroup;
  if (join(simdgroup_of(self), self, collective)) {
    once(index);
    release(index);
  }
  run_next(index);
}

void wait_for_products() {
  Fiber& self = current();
  uint32_t index = self.simdgroup_index_in_threadgroup;
  simdgroup_of(self).waiting_for_products |= 1u << self.thread_index_in_simdgroup;
  serve_waiting(index);
  run_next(index);
}

static void meet_threadgroup(const Collective& collective, uint32_t flags) {
  Fiber& self = current();
  uint32_t first = self.simdgroup_index_in_threadgroup;
  if (join(simdgroup_of(self), self, collective)) {
    if (machine.simdgroups_waiting == 0) {
      machine.threadgroup_collective = collective;
    } else if (!machine.threadgroup_collective.is(collective)) {
      fail(Fault::divergence, site_of(collective), site_of(machine.threadgroup_collective),
           "threadgroup_barrier in this simdgroup, while another one is at the threadgroup_barrier at {other}");
    }
    if (++machine.simdgroups_waiting == machine.simdgroup_count) {
      machine.simdgroups_waiting = 0;
      ++machine.counts.threadgroup_barriers;
      fence_threadgroup(flags);
      for (uint32_t s = 0; s < machine.simdgroup_count; ++s) release(s);
      first = reversed() ? machine.simdgroup_count - 1 : 0;
    }
  }
  run_next(first);
}

static bool all_ended() {
  for (uint32_t s = 0; s < machine.simdgroup_count; ++s)
    if (machine.simdgroups[s].live) return false;
  return true;
}

// What each fiber runs.
static void run_thread() {
  machine.entry(machine.buffers, &current(), &machine.group);
  Fiber& self = current();
  Simdgroup& simdgroup = simdgroup_of(self);
  --simdgroup.live;
  if (self.most_fragment_bytes > machine.counts.fragment_bytes) machine.counts.fragment_bytes = self.most_fragment_bytes;
  if (simdgroup.waiting)
    fail(Fault::divergence, site_of(simdgroup.collective), 0,
         "%s in some lanes of a simdgroup, while this one has ended", simdgroup.collective.name);
  if (simdgroup.live)
    serve_waiting(self.simdgroup_index_in_threadgroup);
  else
    settle_all(self.simdgroup_index_in_threadgroup);
  if (!all_ended()) run_next(self.simdgroup_index_in_threadgroup);
  void* never_continued;
  msl_switch_stack(&never_continued, machine.host_stack);
  __builtin_unreachable();
}

static void prepare_simdgroups() {
  for (uint32_t s = 0; s < machine.simdgroup_count; ++s) {
    Simdgroup& simdgroup = machine.simdgroups[s];
    uint32_t rest = machine.thread_count - s * kLanes;
    simdgroup.size = simdgroup.live = rest < kLanes ? rest : kLanes;
    simdgroup.operations = simdgroup.settled = simdgroup.slots_used = simdgroup.waiting_for_products = 0;
    release(s);
  }
  machine.simdgroups_waiting = 0;
}

static void prepare_fiber(uint32_t index) {
  const msl_group& group = machine.group;
  const uint32_t* size = group.threads_per_threadgroup;
  Fiber& fiber = machine.fibers[index];
  fiber.thread_position_in_threadgroup[0] = index % size[0];
  fiber.thread_position_in_threadgroup[1] = index / size[0] % size[1];
  fiber.thread_position_in_threadgroup[2] = index / size[0] / size[1];
  for (int axis = 0; axis < 3; ++axis)
    fiber.thread_position_in_grid[axis] =
        group.threadgroup_position_in_grid[axis] * group.dispatch_threads_per_threadgroup[axis] +
        fiber.thread_position_in_threadgroup[axis];
  uint32_t lane = index % kLanes;
  fiber.thread_index_in_threadgroup = index;
  fiber.thread_index_in_simdgroup = lane;
  fiber.simdgroup_index_in_threadgroup = index / kLanes;
  fiber.fragment_row = row_of_lane(lane);
  fiber.fragment_column = column_of_lane(lane);
  fiber.generation = 1;
  fiber.operations = fiber.products = 0;
  fiber.fragment_bytes = fiber.most_fragment_bytes = 0;
  fiber.targeted = 0;
  fiber.stack = stack_of(index);
  fiber.stack_pointer = fresh_stack(index, run_thread);
}

void run_threadgroup() {
  prepare_simdgroups();
  for (uint32_t i = 0; i < machine.thread_count; ++i) prepare_fiber(i);
  Fiber* first = next_fiber(reversed() ? machine.simdgroup_count - 1 : 0);
  start(*first);
  msl_switch_stack(&machine.host_stack, first->stack_pointer);
}

}  // namespace msl

using namespace msl;

msl_lane* msl_current;

void msl_threadgroup_barrier(uint32_t flags, uint32_t position) {
  meet_threadgroup({"threadgroup_barrier", __builtin_return_address(0), position}, flags);
}

void msl_simdgroup_barrier(uint32_t flags, uint32_t position) {
  meet_simdgroup({"simdgroup_barrier", __builtin_return_address(0), position}, [flags](uint32_t index) {
    ++machine.counts.simdgroup_barriers;
    fence_simdgroup(index, flags);
  });
}

msl_values* msl_exchange(const char* name, uint32_t position, uint64_t low, uint64_t high) {
  Collective operation = {name, __builtin_return_address(0), position};
  Fiber& self = current();
  Simdgroup& simdgroup = simdgroup_of(self);
  msl_values& values = simdgroup.values[simdgroup.exchange];
  values.lane[self.thread_index_in_simdgroup][0] = low;
  values.lane[self.thread_index_in_simdgroup][1] = high;
  meet_simdgroup(operation, [&](uint32_t) {
    ++machine.counts.simd_operations;
    values.count = simdgroup.size;
    values.is_reduced = 0;
    simdgroup.exchange ^= 1;
  });
  return &values;
}

void msl_bad_lane(const char* name, uint32_t lane) {
  fail(Fault::out_of_bounds, offset_of(__builtin_return_address(0)), 0, "%s reads lane %u of a simdgroup of %u", name,
       lane, simdgroup_of(current()).size);
}
