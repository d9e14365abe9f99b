// Decode attention over block tables: one query token per sequence, exact lengths, no padding, no copy of the history.
//
// Legend: S sequences, N query heads, K key-value heads, G = N / K query heads per key-value head, H head size,
// B blocks of P positions. Pools are [B, K, P, H], queries and outputs [S, N, H], tables [S, max_blocks] of int32.
//
// One task is one (sequence, key-value head): it reads that history once for all G query heads. Scores of the whole
// history are kept (G x length floats), so softmax is exact and in one pass each.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HEADRACE_AVX512_BF16 1
#endif

namespace {

using namespace headrace;

// scores[g * stride + j] = scale * q[g] . k[j] for `num_keys` keys of one block.
template <typename T>
void score_block(const T* q, int64_t q_stride, const T* k, int num_groups, int head_size, int num_keys, float scale,
                 float* scores, int64_t stride) {
  for (int j = 0; j < num_keys; ++j) {
    for (int g = 0; g < num_groups; ++g) {
      const T* a = q + g * q_stride;
      const T* b = k + static_cast<int64_t>(j) * head_size;
      float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
      for (int h = 0; h < head_size; ++h) sum += widen(a[h]) * widen(b[h]);
      scores[g * stride + j] = sum * scale;
    }
  }
}

#ifdef HEADRACE_AVX512_BF16
inline __m512bh load_bf16(const bf16* from) {
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
}

template <>
void score_block<bf16>(const bf16* q, int64_t q_stride, const bf16* k, int num_groups, int head_size, int num_keys,
                       float scale, float* scores, int64_t stride) {
  if (head_size % 32 != 0) {
    for (int j = 0; j < num_keys; ++j)
      for (int g = 0; g < num_groups; ++g) {
        float sum = 0.0f;
        for (int h = 0; h < head_size; ++h)
          sum += widen(q[g * q_stride + h]) * widen(k[static_cast<int64_t>(j) * head_size + h]);
        scores[g * stride + j] = sum * scale;
      }
    return;
  }
  for (int g = 0; g < num_groups; ++g) {
    const bf16* a = q + g * q_stride;
    int j = 0;
    for (; j + 4 <= num_keys; j += 4) {
      __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0;
      const bf16* b = k + static_cast<int64_t>(j) * head_size;
      for (int h = 0; h < head_size; h += 32) {
        const __m512bh x = load_bf16(a + h);
        s0 = _mm512_dpbf16_ps(s0, x, load_bf16(b + h));
        s1 = _mm512_dpbf16_ps(s1, x, load_bf16(b + head_size + h));
        s2 = _mm512_dpbf16_ps(s2, x, load_bf16(b + 2 * head_size + h));
        s3 = _mm512_dpbf16_ps(s3, x, load_bf16(b + 3 * head_size + h));
      }
      // Four horizontal sums at once: fold 16 lanes to 4, then transpose the 4 x 4 of partial sums.
      auto fold = [](__m512 s) {
        __m256 t = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
        return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
      };
      __m128 r0 = fold(s0), r1 = fold(s1), r2 = fold(s2), r3 = fold(s3);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      __m128 sum = _mm_add_ps(_mm_add_ps(r0, r1), _mm_add_ps(r2, r3));
      _mm_storeu_ps(scores + g * stride + j, _mm_mul_ps(sum, _mm_set1_ps(scale)));
    }
    for (; j < num_keys; ++j) {
      __m512 s = _mm512_setzero_ps();
      const bf16* b = k + static_cast<int64_t>(j) * head_size;
      for (int h = 0; h < head_size; h += 32) s = _mm512_dpbf16_ps(s, load_bf16(a + h), load_bf16(b + h));
      scores[g * stride + j] = _mm512_reduce_add_ps(s) * scale;
    }
  }
}
#endif

// e^x to 2e-7 relative, in a form that compilers vectorise: 2^n times a polynomial (Cephes' expf).
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = std::nearbyint(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return y * power;
}

// Softmax in place over scores[0, length); returns the reciprocal of the sum.
float exponentiate(float* scores, int length) {
  float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
  for (int j = 0; j < length; ++j) top = std::max(top, scores[j]);
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < length; ++j) {
    scores[j] = fast_exp(scores[j] - top);
    sum += scores[j];
  }
  return 1.0f / sum;
}

// Sixteen lanes of a head: the unit in which values are mixed. Plain arrays where there is no AVX-512.
#if defined(__AVX512F__)
using lanes = __m512;
inline lanes load_lanes(const float* from) { return _mm512_loadu_ps(from); }
inline lanes load_lanes(const bf16* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline lanes add_scaled(lanes sum, float weight, lanes value) { return _mm512_fmadd_ps(_mm512_set1_ps(weight), value, sum); }
inline void store_lanes(float* to, lanes value) { _mm512_storeu_ps(to, value); }
#else
struct lanes {
  float at[16];
};
template <typename T>
inline lanes load_lanes(const T* from) {
  lanes value;
  for (int h = 0; h < 16; ++h) value.at[h] = widen(from[h]);
  return value;
}
inline lanes add_scaled(lanes sum, float weight, const lanes& value) {
  for (int h = 0; h < 16; ++h) sum.at[h] += weight * value.at[h];
  return sum;
}
inline void store_lanes(float* to, const lanes& value) { std::memcpy(to, value.at, sizeof(value.at)); }
#endif

// acc[g * head_size + h] += p[g * stride + j] * v[j, h] for `num_keys` keys of one block; head_size is a multiple of 16.
template <typename T, int G>
void mix_block(const float* p, int64_t stride, const T* v, int head_size, int num_keys, float* acc) {
  for (int h = 0; h < head_size; h += 16) {
    lanes part[G];
    for (int g = 0; g < G; ++g) part[g] = load_lanes(acc + g * head_size + h);
    const T* row = v + h;
    for (int j = 0; j < num_keys; ++j, row += head_size) {
      const lanes value = load_lanes(row);
      for (int g = 0; g < G; ++g) part[g] = add_scaled(part[g], p[g * stride + j], value);
    }
    for (int g = 0; g < G; ++g) store_lanes(acc + g * head_size + h, part[g]);
  }
}

template <typename T>
void mix(const float* p, int64_t stride, const T* v, int num_groups, int head_size, int num_keys, float* acc) {
  int g = 0;
  for (; g + 4 <= num_groups; g += 4) mix_block<T, 4>(p + g * stride, stride, v, head_size, num_keys, acc + g * head_size);
  const float* rest = p + g * stride;
  float* out = acc + g * head_size;
  switch (num_groups - g) {
    case 3: mix_block<T, 3>(rest, stride, v, head_size, num_keys, out); break;
    case 2: mix_block<T, 2>(rest, stride, v, head_size, num_keys, out); break;
    case 1: mix_block<T, 1>(rest, stride, v, head_size, num_keys, out); break;
    default: break;
  }
}

template <typename T>
inline void prefetch(const T* from, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(bytes + at, 0, 3);
}

template <typename T>
void decode(const T* q, const T* k_pool, const T* v_pool, const int32_t* tables, const int32_t* lengths, T* out,
            int num_seqs, int num_heads, int num_kv_heads, int head_size, int block_size, int max_blocks, float scale,
            int window) {
  const int num_groups = num_heads / num_kv_heads;
  const int64_t block_stride = static_cast<int64_t>(num_kv_heads) * block_size * head_size;
  const int64_t head_stride = static_cast<int64_t>(block_size) * head_size;
#pragma omp parallel
  {
    std::vector<float> scores, acc(static_cast<size_t>(num_groups) * head_size);
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < num_seqs * num_kv_heads; ++task) {
      const int seq = task / num_kv_heads, kv_head = task % num_kv_heads;
      const int length = lengths[seq];
      // A window of w lets a query at position length - 1 see positions (length - 1 - w, length - 1].
      const int begin = window > 0 ? std::max(0, length - window) : 0;
      const int first_block = begin / block_size;
      const int64_t stride = length - begin;
      scores.resize(static_cast<size_t>(num_groups) * stride);
      const int32_t* table = tables + static_cast<int64_t>(seq) * max_blocks;
      const T* query = q + (static_cast<int64_t>(seq) * num_heads + kv_head * num_groups) * head_size;
      auto each_block = [&](const T* pool, auto&& visit) {
        for (int index = first_block; index * block_size < length; ++index) {
          const int from = std::max(begin, index * block_size);
          const int to = std::min(length, (index + 1) * block_size);
          const int64_t base = table[index] * block_stride + kv_head * head_stride +
                               static_cast<int64_t>(from - index * block_size) * head_size;
          // Blocks lie anywhere, so the hardware sees no stream: fetch the next one while this one is used.
          if ((index + 1) * block_size < length) prefetch(pool + table[index + 1] * block_stride + kv_head * head_stride, head_stride);
          visit(base, from - begin, to - from);
        }
      };
      each_block(k_pool, [&](int64_t base, int at, int count) {
        score_block<T>(query, head_size, k_pool + base, num_groups, head_size, count, scale, scores.data() + at, stride);
      });
      std::fill(acc.begin(), acc.end(), 0.0f);
      float inverse[64];
      for (int g = 0; g < num_groups; ++g) inverse[g] = exponentiate(scores.data() + g * stride, stride);
      each_block(v_pool, [&](int64_t base, int at, int count) {
        mix<T>(scores.data() + at, stride, v_pool + base, num_groups, head_size, count, acc.data());
      });
      T* result = out + (static_cast<int64_t>(seq) * num_heads + kv_head * num_groups) * head_size;
      for (int g = 0; g < num_groups; ++g)
        for (int h = 0; h < head_size; ++h) narrow(acc[g * head_size + h] * inverse[g], result + g * head_size + h);
    }
  }
}

}  // namespace

extern "C" {

void headrace_decode_f32(const float* q, const float* k, const float* v, const int32_t* tables, const int32_t* lengths,
                         float* out, int num_seqs, int num_heads, int num_kv_heads, int head_size, int block_size,
                         int max_blocks, float scale, int window) {
  decode<float>(q, k, v, tables, lengths, out, num_seqs, num_heads, num_kv_heads, head_size, block_size, max_blocks,
                scale, window);
}

void headrace_decode_bf16(const void* q, const void* k, const void* v, const int32_t* tables, const int32_t* lengths,
                          void* out, int num_seqs, int num_heads, int num_kv_heads, int head_size, int block_size,
                          int max_blocks, float scale, int window) {
  decode<bf16>(static_cast<const bf16*>(q), static_cast<const bf16*>(k), static_cast<const bf16*>(v), tables, lengths,
               static_cast<bf16*>(out), num_seqs, num_heads, num_kv_heads, head_size, block_size, max_blocks, scale,
               window);
}

int headrace_abi_version() { return 2; }
}
