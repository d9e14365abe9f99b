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

// 2^x to 2e-7 relative for x <= 0 and a little above; 0 below -126.
inline __m512 exp2_16(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.339887440266574e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.618437357674640e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.550332471162809e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402264791363012e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931472028550421e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN stays NaN
  return _mm512_maskz_scalef_ps(some, y, whole);
}

// x * sigmoid(x)
inline __m512 silu16(__m512 x) {
  const __m512 magnitude = _mm512_abs_ps(x);
  const __m512 e = exp2_16(_mm512_mul_ps(magnitude, _mm512_set1_ps(-1.44269504088896341f)));  // e^-|x|
  const __m512 one = _mm512_set1_ps(1.0f);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  const __m512 top = _mm512_mask_mov_ps(one, negative, e);  // sigmoid = (e^-|x| or 1) / (1 + e^-|x|)
  return _mm512_mul_ps(x, _mm512_div_ps(top, _mm512_add_ps(one, e)));
}

}  // namespace headrace
