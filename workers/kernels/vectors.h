// Sixteen floats in one AVX-512 register, and what the decoder's kernels do with them.

#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace headrace {

constexpr int kLanes = 16;
constexpr int kVectors = 4;  // registers that are worked on together: 64 values

inline __m512 widen16(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const bf16* from) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline void store16(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
inline void store16(bf16* to, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}
inline __m512bh load_pairs(const void* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
// Two neighbouring bfloat16 (or four bytes) in every lane.
inline __m512i spread(const void* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return _mm512_set1_epi32(word);
}

// 2^x to 3e-6 relative (what it goes into is bfloat16, 4e-3); 0 below -126, infinite above 128.
inline __m512 exp2_16(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.570096662e-3f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.591785991e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402474496e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931218148e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.999992614e-1f));
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN stays NaN
  return _mm512_maskz_scalef_ps(some, y, whole);
}

// x * sigmoid(x), to 6e-5 relative.
inline __m512 silu16(__m512 x) {
  const __m512 e = exp2_16(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504088896341f)));
  return _mm512_mul_ps(x, _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

}  // namespace headrace
