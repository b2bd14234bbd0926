// 8×8 simdgroup matrices. A product needs elements from all 32 lanes, but lanes run one after the other. So every lane
// leaves its parts of a, b and c in a queue of its simdgroup and goes on. A lane that reads a result waits until the
// others have queued as much: that is no barrier, since the others may read it elsewhere or not at all.
#pragma once
#include "machine.h"

namespace msl {

// Runs the products that all lanes have queued, and gives the results to the lanes that have queued no more than those.
// Returns these lanes, a bit each.
uint32_t settle_products(uint32_t simdgroup);

// Fails unless all lanes have done the same matrix operations; then settles.
void settle_all(uint32_t simdgroup);

// No lane can go on, and some wait for an operation that another one has not come to.
__attribute__((noreturn)) void fail_missing_operation(uint32_t simdgroup);

}  // namespace msl
