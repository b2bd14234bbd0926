#include "races.h"

#include <stdio.h>

namespace msl {

static void describe(char* text, size_t size, const Trace& trace, const Accessor& self) {
  if (trace.other_threadgroups || trace.epoch < self.threadgroup_start)
    snprintf(text, size, "another threadgroup");
  else if (trace.who == kOfSeveral)
    snprintf(text, size, "threads of several simdgroups");
  else if (trace.who & kOfSimdgroup)
    snprintf(text, size, "threads of simdgroup %u", simdgroup_in(trace.who));
  else
    snprintf(text, size, "thread %u", trace.who);
}

void fail_race(const Trace& earlier, const Accessor& self, const char* access, const char* earlier_access,
               const char* memory, uint64_t offset) {
  char who[64];
  describe(who, sizeof who, earlier, self);
  fail(Fault::data_race, self.site, earlier.site,
       "data race: no barrier orders this %s of byte %llu of %s after a %s by %s at {other}", access,
       (unsigned long long)offset, memory, earlier_access, who);
}

}  // namespace msl
