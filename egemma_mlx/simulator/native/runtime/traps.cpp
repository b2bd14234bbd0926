#include "traps.h"

#include <signal.h>
#include <ucontext.h>

#include "faults.h"

namespace msl {

// -fsanitize=local-bounds traps (ud2 on x86-64, brk on aarch64); a stack that is too small meets its guard page.
constexpr int kSignals[] = {SIGILL, SIGTRAP, SIGSEGV};
constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;
static struct sigaction previous[kSignalCount];
static stack_t previous_stack;
static char handler_stack[64 << 10];  // the fiber's own may be full

static uintptr_t program_counter(const void* context) {
  const mcontext_t& machine_context = ((const ucontext_t*)context)->uc_mcontext;
#if defined(__x86_64__)
  return (uintptr_t)machine_context.gregs[REG_RIP];
#else
  return (uintptr_t)machine_context.pc;
#endif
}

static bool in_guard_page(const siginfo_t* info) {
  uintptr_t address = (uintptr_t)info->si_addr;
  return msl_current && address < current().stack + kStackBytes && address + kStackBytes >= current().stack;
}

static void handle(int signal, siginfo_t* info, void* context) {
  uint32_t site = offset_of((Site)(program_counter(context) + 1));  // as a return address: just behind
  if (msl_current && site && signal != SIGSEGV)
    fail(Fault::out_of_bounds, site, 0, "an access outside a local variable");
  if (msl_current && site && in_guard_page(info))
    fail(Fault::resource_limit, site, 0, "a thread has more than %u KiB of local variables", uint32_t(kStackBytes >> 10));
  remove_traps();  // not ours: the same again, for whom it concerns
}

void set_traps() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  // `fail` leaves the handler for good, so the signal must not stay blocked.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  stack_t stack = {};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &previous_stack);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &action, &previous[i]);
}

void remove_traps() {
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
}

}  // namespace msl
