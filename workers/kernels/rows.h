// Operations on single rows: normalisation, quantisation, rotation. Sizes are multiples of 16.

#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace headrace {

// 1 / root mean square.
inline float inverse_rms(const float* row, int size, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int d = 0; d < size; d += kLanes) squares = _mm512_fmadd_ps(load16(row + d), load16(row + d), squares);
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps);
}

#if HEADRACE_HAS_BF16
inline void normalise_row(const float* row, const float* weight, int size, float eps, bf16* out) {
  const __m512 inverse = _mm512_set1_ps(inverse_rms(row, size, eps));
  for (int d = 0; d < size; d += kLanes)
    store16(out + d, _mm512_mul_ps(_mm512_mul_ps(load16(row + d), inverse), load16(weight + d)));
}
#endif

// To mean 0 and variance 1, then weight and bias, in place. The size is a multiple of 32; sums are two, so that one does not wait for the
// other.
inline void layer_norm_row(float* row, const float* weight, const float* bias, int size, float eps) {
  __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int d = 0; d < size; d += 2 * kLanes)
    for (int i = 0; i < 2; ++i) sum[i] = _mm512_add_ps(sum[i], load16(row + d + i * kLanes));
  const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(_mm512_add_ps(sum[0], sum[1])) / static_cast<float>(size));
  for (int d = 0; d < size; d += 2 * kLanes)
    for (int i = 0; i < 2; ++i) {
      const __m512 x = _mm512_sub_ps(load16(row + d + i * kLanes), mean);
      squares[i] = _mm512_fmadd_ps(x, x, squares[i]);
    }
  const float variance = _mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])) / static_cast<float>(size);
  const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(variance + eps));
  for (int d = 0; d < size; d += kLanes) {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(load16(row + d), mean), inverse);
    store16(row + d, _mm512_fmadd_ps(x, load16(weight + d), load16(bias + d)));
  }
}

// Symmetric bytes with 128 added, and one scale a group of `group` inputs, NaN where the group holds NaN.
inline void to_bytes(const bf16* row, int size, int group, uint8_t* out, float* scales) {
  for (int begin = 0; begin < size; begin += group) {
    const int end = std::min(size, begin + group);
    __m512 largest = _mm512_setzero_ps();
    __mmask16 broken = 0;
    for (int d = begin; d < end; d += kLanes) {
      const __m512 x = load16(row + d);
      largest = _mm512_max_ps(_mm512_abs_ps(x), largest);
      broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    const float scale = _mm512_reduce_max_ps(largest) / 127.0f;
    const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f);
    for (int d = begin; d < end; d += kLanes) {
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load16(row + d), inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + d),
                       _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, _mm512_set1_epi32(128))));
    }
    *scales++ = broken ? std::numeric_limits<float>::quiet_NaN() : scale;
  }
}

// The largest norms that a group of int16 inputs and that of an output's weights may have: their product, and thus any sum of their
// products, stays below 2^31, what rounding adds to a norm included.
constexpr float kWordsNorm = 64000.0f, kWeightsNorm = 32768.0f;
constexpr float kLargestWord = 32767.0f;

// 32 floats as int16.
inline __m512i words32(const float* from, __m512 factor) {
  const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(load16(from), factor));
  const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(load16(from + kLanes), factor));
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0), _mm512_packs_epi32(low, high));
}

// Symmetric int16, and one scale a group of `group` inputs, NaN or infinite where the group holds such. Sizes are multiples of 32.
inline void to_words(const float* row, int size, int group, int16_t* out, float* scales) {
  for (int begin = 0; begin < size; begin += group) {
    const int end = std::min(size, begin + group);
    __m512 largest = _mm512_setzero_ps(), squares[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int d = begin; d < end; d += 2 * kLanes)
      for (int i = 0; i < 2; ++i) {
        const __m512 x = load16(row + d + i * kLanes);
        largest = _mm512_max_ps(_mm512_abs_ps(x), largest);
        squares[i] = _mm512_fmadd_ps(x, x, squares[i]);
      }
    const float norm = std::sqrt(_mm512_reduce_add_ps(_mm512_add_ps(squares[0], squares[1])));
    const float scale = std::max(norm / kWordsNorm, _mm512_reduce_max_ps(largest) / kLargestWord);  // a NaN is in the norm alone
    const __m512 inverse = _mm512_set1_ps(scale > 1e-30f ? 1.0f / scale : 0.0f);
    for (int d = begin; d < end; d += 2 * kLanes) _mm512_storeu_si512(out + d, words32(row + d, inverse));
    *scales++ = scale;
  }
}

// A head (first half, second half) becomes (a cos - b sin, b cos + a sin), after an RMS norm where the model has one.
inline void rotate_head(float* head, int head_size, const float* cos, const float* sin, const float* norm, float eps) {
  if (norm) {
    const __m512 inverse = _mm512_set1_ps(inverse_rms(head, head_size, eps));
    for (int h = 0; h < head_size; h += kLanes)
      store16(head + h, _mm512_mul_ps(_mm512_mul_ps(load16(head + h), inverse), load16(norm + h)));
  }
  const int half = head_size / 2;
  int h = 0;
  for (; h + kLanes <= half; h += kLanes) {
    const __m512 a = load16(head + h), b = load16(head + half + h), c = load16(cos + h), s = load16(sin + h);
    store16(head + h, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
    store16(head + half + h, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
  }
  for (; h < half; ++h) {
    const float a = head[h], b = head[half + h];
    head[h] = std::fma(a, cos[h], -(b * sin[h]));
    head[half + h] = std::fma(b, cos[h], a * sin[h]);
  }
}

}  // namespace headrace
