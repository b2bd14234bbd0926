// Which thread runs next, and the calls that threads make together.
#pragma once
#include "machine.h"

namespace msl {

// Runs all threads of machine.group to their end, or until one fails.
void run_threadgroup();

// Waits until the other lanes of the simdgroup have queued the products that the calling lane has, and these have run.
void wait_for_products();

}  // namespace msl
