// The race detector. Each element has a shadow: who wrote it last, and who has read it since.
#pragma once
#include "faults.h"
#include "machine.h"

namespace msl {

// Who accessed an element, as exactly as it takes to tell whether a later access is ordered after all of them.
struct Trace {
  uint32_t epoch;  // of the latest; 0: nobody
  uint32_t site;
  uint16_t who;  // a thread, or kOfSimdgroup | simdgroup, or kOfSeveral
  bool atomic;
  bool other_threadgroups;  // have accessed it too, in this launch
};

struct Shadow {
  Trace write, read;
};

constexpr uint16_t kOfSimdgroup = 0x8000;
constexpr uint16_t kOfSeveral = 0xffff;

inline uint32_t simdgroup_in(uint16_t who) { return who & kOfSimdgroup ? who & ~kOfSimdgroup : who / kLanes; }

// The thread that accesses memory now, and what its clock says.
struct Accessor {
  uint16_t who;
  bool device;
  uint32_t simdgroup;
  uint32_t site;
  uint32_t threadgroup_start, since, now;
  uint32_t oldest_write;  // what was written before is not there; 0 in memory that began initialised
};

// Is there no barrier between the trace and now?
inline bool unordered(const Trace& trace, const Accessor& self) {
  if (self.device && trace.other_threadgroups) return trace.epoch != 0;
  if (trace.epoch < self.since) return self.device && trace.epoch != 0 && trace.epoch < self.threadgroup_start;
  if (trace.who == self.who) return false;
  return simdgroup_in(trace.who) != self.simdgroup || trace.epoch == self.now;
}

// Adds an access to those that the trace stands for. What barriers have ordered is dropped.
inline void add(Trace& trace, const Accessor& self) {
  if (trace.epoch < self.since) {
    bool others = self.device && trace.epoch != 0 && (trace.other_threadgroups || trace.epoch < self.threadgroup_start);
    trace = {self.now, self.site, self.who, trace.atomic, others};
    return;
  }
  if (simdgroup_in(trace.who) != self.simdgroup)
    trace.who = kOfSeveral;
  else if (trace.epoch < self.now)
    trace.who = self.who;
  else if (trace.who != self.who)
    trace.who = uint16_t(kOfSimdgroup | self.simdgroup);
  trace.epoch = self.now;
  trace.site = self.site;
}

__attribute__((noreturn, noinline)) void fail_race(const Trace& earlier, const Accessor& self, const char* access,
                                                   const char* earlier_access, const char* memory, uint64_t offset);

}  // namespace msl
