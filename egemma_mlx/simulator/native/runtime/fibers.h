// Threads of execution that switch by hand: one for each GPU thread.
#pragma once
#include <stdint.h>

namespace msl {

constexpr int kMostFibers = 1024;
constexpr uintptr_t kStackBytes = 256 << 10;  // with a guard page at its low end

// Reserves the stacks; false when the address space has no room.
bool reserve_stacks();
uintptr_t stack_of(int fiber);

// A stack pointer from which switch_stack runs `entry` on that fiber's stack.
void* fresh_stack(int fiber, void (*entry)());

extern "C" __attribute__((visibility("hidden"))) void msl_switch_stack(void** save_here, void* continue_there);

}  // namespace msl
