#include "matrices.h"

#include <string.h>

#include "access.h"
#include "scheduler.h"

namespace msl {

static Fiber* lanes_of(uint32_t simdgroup) { return &machine.fibers[simdgroup * kLanes]; }

// The lane that has done the fewest matrix operations.
static const Fiber& hindmost(uint32_t simdgroup) {
  const Fiber* lanes = lanes_of(simdgroup);
  const Fiber* last = lanes;
  for (uint32_t lane = 1; lane < kLanes; ++lane)
    if (lanes[lane].operations < last->operations) last = &lanes[lane];
  return *last;
}

// Eight floats: a row.
typedef float Row __attribute__((vector_size(32), aligned(4)));

static void multiply(const Product& product, float (*slots)[8][8]) {
  const Row* b = (const Row*)product.b;
  const Row* c = (const Row*)slots[product.c];
  Row* d = (Row*)slots[product.d];
  for (int row = 0; row < 8; ++row) {
    Row sum = c[row];
    for (int k = 0; k < 8; ++k) sum += product.a[row][k] * b[k];
    d[row] = sum;
  }
}

static void write_back(Fiber& fiber, const Simdgroup& simdgroup) {
  for (; fiber.targeted; fiber.targeted &= fiber.targeted - 1) {
    int slot = __builtin_ctzll(fiber.targeted);
    memcpy(fiber.targets[slot]->elements, &simdgroup.slots[slot][fiber.fragment_row][fiber.fragment_column], 8);
  }
  ++fiber.generation;
}

uint32_t settle_products(uint32_t index) {
  Simdgroup& simdgroup = machine.simdgroups[index];
  Fiber* lanes = lanes_of(index);
  const uint32_t operations = hindmost(index).operations, products = hindmost(index).products;
  for (; simdgroup.settled < products; ++simdgroup.settled) {
    const Product& product = simdgroup.products[simdgroup.settled];
    if (product.is_copy) {
      memcpy(simdgroup.slots[product.d], simdgroup.slots[product.c], sizeof simdgroup.slots[0]);
    } else {
      multiply(product, simdgroup.slots);
      ++machine.counts.multiply_accumulates;
    }
  }
  uint32_t served = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (lanes[lane].operations != operations) continue;
    write_back(lanes[lane], simdgroup);
    served |= 1u << lane;
  }
  if (served == ~0u) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) lanes[lane].operations = lanes[lane].products = 0;
    simdgroup.operations = simdgroup.settled = simdgroup.slots_used = 0;
  }
  return served;
}

void fail_missing_operation(uint32_t index) {
  const Fiber& last = hindmost(index);
  fail(Fault::divergence, offset_of(machine.simdgroups[index].log[last.operations].site), 0,
       "a matrix operation that lane %u of the simdgroup does not take part in", last.thread_index_in_simdgroup);
}

void settle_all(uint32_t index) {
  const Simdgroup& simdgroup = machine.simdgroups[index];
  if (simdgroup.operations == 0) return;
  if (hindmost(index).operations < simdgroup.operations) fail_missing_operation(index);
  settle_products(index);
}

// Is the calling lane the first one to come to its next matrix operation?
static bool leads(const Fiber& self, const Simdgroup& simdgroup) { return self.operations == simdgroup.operations; }

// Logs the calling lane's next matrix operation. The first lane to get there decides what it is, and the others must
// do the same.
static inline __attribute__((always_inline)) void log_operation(Fiber& self, Simdgroup& simdgroup,
                                                                const MatrixOperation& operation) {
  if (simdgroup.size < kLanes)
    fail(Fault::divergence, offset_of(operation.site), 0, "a matrix operation in a simdgroup of %u lanes",
         simdgroup.size);
  MatrixOperation& logged = simdgroup.log[self.operations];
  if (leads(self, simdgroup)) {
    ++simdgroup.operations;
    logged = operation;
  } else if (logged.site != operation.site) {
    fail(Fault::divergence, offset_of(operation.site), offset_of(logged.site),
         "a matrix operation in this lane, while other lanes of its simdgroup are at {other}");
  } else if (logged.tile != operation.tile || logged.stride != operation.stride) {
    fail(Fault::divergence, offset_of(operation.site), 0,
         "a matrix operation at another address than in the other lanes of the simdgroup");
  }
  ++self.operations;
}

static bool waits(const Fiber& self, const msl_accumulator* matrix) { return matrix->generation == self.generation; }
static bool waits_elsewhere(const Fiber& self, const msl_accumulator* matrix, uint32_t slot) {
  return waits(self, matrix) && matrix->slot != slot;
}

// Queues d = … + c. Matrices live in slots while their value is not known; the lane that leads chooses them.
static inline __attribute__((always_inline)) Product& queue_product(Fiber& self, Simdgroup& simdgroup, Site site,
                                                                    msl_accumulator* d, const msl_accumulator* c) {
  if (self.products == kQueuedProducts || self.operations == kMatrixLog) wait_for_products();
  if (leads(self, simdgroup)) {
    if (simdgroup.slots_used > kSlots - 2) wait_for_products();
  } else {
    // A lane that has read c or d alone may have them elsewhere than the one that leads.
    const Product& chosen = simdgroup.products[self.products];
    if (waits_elsewhere(self, c, chosen.c) || waits_elsewhere(self, d, chosen.d)) wait_for_products();
  }
  Product& product = simdgroup.products[self.products++];
  if (leads(self, simdgroup)) {
    product.c = waits(self, c) ? c->slot : simdgroup.slots_used++;
    product.d = d == c ? product.c : waits(self, d) ? d->slot : simdgroup.slots_used++;
  }
  log_operation(self, simdgroup, {site, nullptr, 0});
  if (!waits(self, c))
    memcpy(&simdgroup.slots[product.c][self.fragment_row][self.fragment_column], c->elements, sizeof c->elements);
  d->slot = product.d;
  d->generation = self.generation;
  self.targets[product.d] = d;
  self.targeted |= 1ull << product.d;
  return product;
}

}  // namespace msl

using namespace msl;

void msl_settle_matrices() { wait_for_products(); }

void msl_forget_matrix(uint32_t slot) { current().targeted &= ~(1ull << slot); }

void msl_multiply_accumulate(msl_accumulator* d, uint64_t a, uint64_t b, const msl_accumulator* c) {
  Fiber& self = current();
  Product& product = queue_product(self, simdgroup_of(self), __builtin_return_address(0), d, c);
  memcpy(&product.a[self.fragment_row][self.fragment_column], &a, sizeof a);
  memcpy(&product.b[self.fragment_row][self.fragment_column], &b, sizeof b);
  product.is_copy = false;
}

// Queued too while the value is not known.
void msl_copy_matrix(msl_accumulator* to, const msl_accumulator* from) {
  if (to == from) return;
  Site site = __builtin_return_address(0);
  Fiber& self = current();
  Simdgroup& simdgroup = simdgroup_of(self);
  bool queued = leads(self, simdgroup) ? waits(self, from) : simdgroup.log[self.operations].site == site;
  if (queued) {
    queue_product(self, simdgroup, site, to, from).is_copy = true;
    return;
  }
  if (waits(self, from)) wait_for_products();
  if (waits(self, to)) msl_forget_matrix(to->slot);
  memcpy(to->elements, from->elements, sizeof to->elements);
  to->generation = 0;
}

void msl_access_matrix(const void* tile, uint64_t stride, uint32_t element_size, uint32_t transposed,
                       uint32_t is_store) {
  Site site = __builtin_return_address(0);
  Fiber& self = current();
  Simdgroup& simdgroup = simdgroup_of(self);
  if (self.operations == kMatrixLog) wait_for_products();
  bool first = leads(self, simdgroup);
  log_operation(self, simdgroup, {site, tile, stride << 1 | transposed});
  if (first) access_tile({(uintptr_t)tile, stride * element_size, element_size, transposed != 0}, is_store, site);
}
