// What machine.py calls. Its ctypes structures mirror these.
#pragma once
#include "faults.h"
#include "machine.h"

namespace msl {

struct Buffer {
  const char* name;
  void* data;
  uint64_t bytes;
  uint32_t item_bytes;
  uint32_t writable, constant, initialised;
  uint64_t loaded, stored;  // out
};

struct Result {
  Counts counts;
  uint64_t threadgroup_loaded, threadgroup_stored, program_constants_loaded;
  Report report;
};

}  // namespace msl
