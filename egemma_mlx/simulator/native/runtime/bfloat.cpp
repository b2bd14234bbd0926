// What compilers call to round a float to bfloat16 on processors that cannot; libgcc has it since version 13 only.
#include <stdint.h>
#include <string.h>

extern "C" __attribute__((visibility("default"))) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  uint16_t high = uint16_t(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  __bf16 result;
  memcpy(&result, &high, sizeof result);
  return result;
}
