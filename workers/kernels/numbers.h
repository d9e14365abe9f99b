// Numbers that all kernels share: bfloat16, and the exponential.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace headrace {

struct bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline void narrow(float value, float* out) { *out = value; }
inline void narrow(float value, bf16* out) {  // round to nearest even, as torch does
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) {
    out->bits = 0x7fc0;
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace headrace
