// What the processor itself finds in a checked kernel, as faults instead of the end of the process.
#pragma once

namespace msl {

// From here to remove_traps, signals of the kernel are faults.
void set_traps();
void remove_traps();

}  // namespace msl
