#include "faults.h"

#include <stdarg.h>
#include <stdio.h>

namespace msl {

Machine machine;
Report report;
static Report uninitialised_read;

static void describe_thread(char* text, size_t size) {
  const uint32_t* group = machine.group.threadgroup_position_in_grid;
  const Fiber& fiber = current();
  snprintf(text, size, " [threadgroup (%u, %u, %u), thread %u: simdgroup %u, lane %u]", group[0], group[1], group[2],
           fiber.thread_index_in_threadgroup, fiber.simdgroup_index_in_threadgroup, fiber.thread_index_in_simdgroup);
}

void fail(Fault fault, uint32_t site, uint32_t other_site, const char* format, ...) {
  report.fault = fault;
  report.site = site;
  report.other_site = other_site;
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(report.message, sizeof report.message, format, arguments);
  va_end(arguments);
  if (length < (int)sizeof report.message) describe_thread(report.message + length, sizeof report.message - length);
  if (fault != Fault::data_race) report_uninitialised_read();
  void* never_continued;
  msl_switch_stack(&never_continued, machine.host_stack);
  __builtin_unreachable();
}

void remember_uninitialised_read(Site site, const char* memory, uint64_t offset) {
  Report& read = uninitialised_read;
  if (read.fault != Fault::none) return;
  read.fault = Fault::uninitialised_read;
  read.site = offset_of(site);
  int length = snprintf(read.message, sizeof read.message, "read of byte %llu of %s, which nothing has written",
                        (unsigned long long)offset, memory);
  describe_thread(read.message + length, sizeof read.message - length);
}

bool report_uninitialised_read() {
  if (uninitialised_read.fault == Fault::none) return false;
  report = uninitialised_read;
  return true;
}

void clear_report() { report = uninitialised_read = Report{}; }

}  // namespace msl
