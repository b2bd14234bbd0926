// Errors. A fault leaves the kernel for good.
#pragma once
#include "machine.h"

namespace msl {

// Sites are offsets into the kernel's shared object, 0 for none. The message mentions the second one as {other}.
struct Report {
  Fault fault;
  uint32_t site, other_site;
  char message[1024];
};

extern Report report;

inline uint32_t offset_of(Site site) {
  uintptr_t address = (uintptr_t)site;
  return address >= machine.code_begin && address < machine.code_end ? uint32_t(address - machine.code_begin) : 0;
}

__attribute__((noreturn, noinline, format(printf, 4, 5))) void fail(Fault fault, uint32_t site, uint32_t other_site,
                                                                    const char* format, ...);

// A read of memory that nothing has written yet. It is reported when the kernel ends, or instead of what the rubbish
// that it read led to; a data race goes first, because then the read lacks no write but a barrier.
void remember_uninitialised_read(Site site, const char* memory, uint64_t offset);
bool report_uninitialised_read();
void clear_report();

}  // namespace msl
