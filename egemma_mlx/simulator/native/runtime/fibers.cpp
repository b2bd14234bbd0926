#include "fibers.h"

#include <sys/mman.h>

// Pushes the registers that a callee must keep, changes stacks, pops them again: 8 ns, where ucontext takes 160.
#if defined(__x86_64__)
asm(R"(
  .text
  .globl msl_switch_stack
  .hidden msl_switch_stack
  .type msl_switch_stack, @function
msl_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size msl_switch_stack, .-msl_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
  .text
  .globl msl_switch_stack
  .hidden msl_switch_stack
  .type msl_switch_stack, @function
msl_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size msl_switch_stack, .-msl_switch_stack
)");
#else
#error "fibers exist for x86-64 and aarch64"
#endif

namespace msl {

static uintptr_t stacks;

bool reserve_stacks() {
  void* memory = mmap(nullptr, kStackBytes * kMostFibers, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  stacks = (uintptr_t)memory;
  constexpr uintptr_t kLargestPage = 64 << 10;  // of aarch64 kernels
  for (int i = 0; i < kMostFibers; ++i) mprotect((void*)stack_of(i), kLargestPage, PROT_NONE);
  return true;
}

uintptr_t stack_of(int fiber) { return stacks + kStackBytes * fiber; }

void* fresh_stack(int fiber, void (*entry)()) {
  // Tops at different cache sets: the lanes of a simdgroup touch the same variables one after the other.
  uintptr_t top = stack_of(fiber) + kStackBytes - 128 - fiber % 61 * 64;
#if defined(__x86_64__)
  // Six registers, then the address that `ret` takes; rsp is 8 off 16 in a function's first instruction.
  void** pointer = (void**)top - 8;
  for (int i = 0; i < 6; ++i) pointer[i] = nullptr;
  pointer[6] = (void*)entry;
  pointer[7] = nullptr;
#else
  constexpr int kLinkRegister = 11;
  void** pointer = (void**)top - 20;
  for (int i = 0; i < 20; ++i) pointer[i] = nullptr;
  pointer[kLinkRegister] = (void*)entry;
#endif
  return pointer;
}

}  // namespace msl
