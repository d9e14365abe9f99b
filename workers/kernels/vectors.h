// Sixteen floats in one AVX-512 register, and what the kernels of whole models do with them.

#pragma once

#include <immintrin.h>

#include "processor.h"
#include "numbers.h"

namespace headrace {

constexpr int kLanes = 16;
constexpr int kVectors = 4;  // registers that are worked on together: 64 values

inline __m512 widen16(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }
inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load16(const bf16* from) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline void store16(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
#if HEADRACE_HAS_BF16
inline void store16(bf16* to, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}
inline __m512bh load_pairs(const void* from) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from)); }
#endif
// Two neighbouring bfloat16 (or four bytes) in every lane.
inline __m512i spread(const void* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return _mm512_set1_epi32(word);
}

// _mm512_dpbusd_epi32 and _mm512_dpwssd_epi32: sums of 4 products of bytes, or 2 of words. Written so that compilers keep all sums of a tile
// in registers (gcc 12 does not of itself).
inline void add_bytes(__m512i& sum, __m512i x, __m512i w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
inline void add_words(__m512i& sum, __m512i x, __m512i w) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

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

// 1 / x to 1e-7 relative; x is neither 0 nor infinite.
inline __m512 inverse16(__m512 x) {
  const __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

// GELU in its exact form and that of tanh: x / (1 + 2^(x r(x^2))), where r is a polynomial of these coefficients, those of x^0 first.
constexpr int kGeluTerms = 6;

inline __m512 gelu16(__m512 x, const float* terms) {
  // Beyond, the factor of x stays what it is there: 0 or 1 to 2e-7.
  const __m512 limit = _mm512_set1_ps(5.5f);
  const __m512 y = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, x));
  const __m512 square = _mm512_mul_ps(y, y);
  __m512 r = _mm512_set1_ps(terms[kGeluTerms - 1]);
#pragma GCC unroll 8
  for (int term = kGeluTerms - 2; term >= 0; --term) r = _mm512_fmadd_ps(r, square, _mm512_set1_ps(terms[term]));
  const __m512 e = exp2_16(_mm512_mul_ps(y, r));
  return _mm512_mul_ps(x, inverse16(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

}  // namespace headrace
