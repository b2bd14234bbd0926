#include "host.h"

#include <link.h>
#include <string.h>

#include "access.h"
#include "scheduler.h"
#include "traps.h"

namespace msl {

static bool reserve_memory() {
  static bool reserved = reserve_stacks() && reserve_arena();
  return reserved;
}

// The address range of the shared object that `entry` is in.
static int find_code(dl_phdr_info* info, size_t, void*) {
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    uintptr_t low = info->dlpi_addr + segment.p_vaddr, high = low + segment.p_memsz;
    begin = low < begin ? low : begin;
    end = high > end ? high : end;
  }
  uintptr_t entry = (uintptr_t)machine.entry;
  if (entry < begin || entry >= end) return 0;
  machine.code_begin = info->dlpi_addr;
  machine.code_end = end;
  return 1;
}

static bool copy_in(const Buffer* buffers, uint32_t count, void** addresses) {
  for (uint32_t i = 0; i < count; ++i) {
    const Buffer& buffer = buffers[i];
    uint32_t shift = buffer.item_bytes >= 4 ? 2 : buffer.item_bytes == 2 ? 1 : 0;
    Region* region = add_region({buffer.name, buffer.bytes, buffer.constant ? Space::constant : Space::device, 0, shift,
                                 0, buffer.writable != 0, buffer.initialised != 0});
    if (!region) return false;
    addresses[i] = (void*)region->begin;
    if (buffer.initialised)
      memcpy(addresses[i], buffer.data, buffer.bytes);
    else
      memset(addresses[i], 0xff, buffer.bytes);
  }
  return true;
}

static void copy_out(const Buffer* buffers, uint32_t count, void** addresses) {
  for (uint32_t i = 0; i < count; ++i)
    if (buffers[i].writable) memcpy(buffers[i].data, addresses[i], buffers[i].bytes);
}

static void prepare_threadgroup(const uint32_t grid[3], uint64_t index) {
  msl_group& group = machine.group;
  const uint32_t* counts = group.threadgroups_per_grid;
  uint32_t* position = group.threadgroup_position_in_grid;
  position[0] = uint32_t(index % counts[0]);
  position[1] = uint32_t(index / counts[0] % counts[1]);
  position[2] = uint32_t(index / counts[0] / counts[1]);
  machine.thread_count = 1;
  for (int axis = 0; axis < 3; ++axis) {
    uint32_t size = group.dispatch_threads_per_threadgroup[axis];
    uint32_t rest = grid[axis] - position[axis] * size;
    group.threads_per_threadgroup[axis] = rest < size ? rest : size;
    machine.thread_count *= group.threads_per_threadgroup[axis];
  }
  machine.simdgroup_count = group.simdgroups_per_threadgroup = (machine.thread_count + kLanes - 1) / kLanes;
}

static uint64_t prepare_launch(const uint32_t grid[3], const uint32_t threadgroup[3]) {
  msl_group& group = machine.group;
  uint64_t threadgroups = 1, threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    group.threads_per_grid[axis] = grid[axis];
    group.dispatch_threads_per_threadgroup[axis] = threadgroup[axis];
    group.threadgroups_per_grid[axis] = (grid[axis] + threadgroup[axis] - 1) / threadgroup[axis];
    threadgroups *= group.threadgroups_per_grid[axis];
    threads *= threadgroup[axis];
  }
  group.dispatch_simdgroups_per_threadgroup = uint32_t((threads + kLanes - 1) / kLanes);
  return threadgroups;
}

static void run_threadgroups(const uint32_t grid[3], const uint32_t threadgroup[3]) {
  uint64_t count = prepare_launch(grid, threadgroup);
  for (uint64_t i = 0; i < count && report.fault == Fault::none; ++i) {
    prepare_threadgroup(grid, machine.options.reversed ? count - 1 - i : i);
    begin_threadgroup_memory();
    run_threadgroup();
    machine.counts.threads += machine.thread_count;
    ++machine.counts.threadgroups;
  }
  msl_current = nullptr;
}

static void count_bytes(Buffer* buffers, uint32_t count, Result& result) {
  for (uint32_t i = 0; i < count; ++i) {
    buffers[i].loaded = regions[1 + i].loaded;
    buffers[i].stored = regions[1 + i].stored;
  }
  for (uint32_t i = 1 + count; i < region_count; ++i) {
    result.threadgroup_loaded += regions[i].loaded;
    result.threadgroup_stored += regions[i].stored;
  }
  result.program_constants_loaded = program_constants_loaded;
}

}  // namespace msl

using namespace msl;

extern "C" __attribute__((visibility("default"))) uint32_t msl_run(msl_entry entry, Buffer* buffers, uint32_t count,
                                                                   const uint32_t grid[3],
                                                                   const uint32_t threadgroup[3],
                                                                   const Options* options, Result* result) {
  if (!reserve_memory()) return 0;
  void* addresses[32];
  machine.options = *options;
  machine.entry = entry;
  machine.buffers = addresses;
  machine.budget = options->access_budget;
  machine.counts = {};
  memset(machine.clocks, 0, sizeof machine.clocks);
  program_constants_loaded = 0;
  clear_report();
  dl_iterate_phdr(find_code, nullptr);
  bool fits = copy_in(buffers, count, addresses);
  if (fits) {
    if (options->checked) set_traps();
    run_threadgroups(grid, threadgroup);
    if (options->checked) remove_traps();
    if (report.fault == Fault::none && !report_uninitialised_read()) copy_out(buffers, count, addresses);
    *result = {};
    count_bytes(buffers, count, *result);
    result->counts = machine.counts;
    result->report = report;
  }
  remove_regions();
  return fits;
}
