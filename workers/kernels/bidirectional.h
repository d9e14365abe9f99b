// Attention in which every token sees its whole text.
//
// Legend: L tokens of a text, H head size, a turn is 16 queries.
//
// One text and head at a time, in int16: queries, keys and values each have one scale, as large as sums of 32 bits allow. A register
// holds a score of 16 queries, one a lane, so that a softmax is done down the keys, and nothing is summed across lanes. Two neighbouring
// dimensions of queries and keys, and two neighbouring positions of weights and values, are what one instruction multiplies. A query's
// arithmetic depends on its text alone, not on the queries that are computed with it.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace headrace {

constexpr int kTileTokens = 6;    // keys, or queries, that are computed together
constexpr int kDims = 2 * kLanes;  // that are computed together: a head size is a multiple of them

// One head of a text. The rows that come out lie `out_stride` apart.
struct TextHead {
  const float *queries, *keys, *values;  // [L, H]
  float* out;                            // [L, H]
  int64_t out_stride;
  int num_tokens, head_size;
};

// What a thread needs for one head.
struct AttentionDesk {
  int16_t* queries;  // [H / 2, 16, 2], of a turn
  int16_t* keys;     // [L, H]
  int16_t* values;   // [L / 2, H, 2]
  int32_t* scores;   // [L, 16], of a turn; then weights [L / 2, 16, 2]
};

// Call with a count from 1 to kTileTokens as a constant.
template <typename Body>
inline void with_constant(int count, Body&& body) {
  switch (count) {
    case 1: body(std::integral_constant<int, 1>()); break;
    case 2: body(std::integral_constant<int, 2>()); break;
    case 3: body(std::integral_constant<int, 3>()); break;
    case 4: body(std::integral_constant<int, 4>()); break;
    case 5: body(std::integral_constant<int, 5>()); break;
    default: body(std::integral_constant<int, kTileTokens>());
  }
}

// Call with the first one and the number of each of nearly equal tiles.
template <typename Body>
inline void for_tiles(int count, Body&& body) {
  for (int first = 0; first < count;) {
    const int num_tiles = (count - first + kTileTokens - 1) / kTileTokens, size = (count - first + num_tiles - 1) / num_tiles;
    with_constant(size, [&](auto constant) { body(first, constant); });
    first += size;
  }
}

// 16 rows of 16 words of 32 bits: rows become columns.
inline void transpose16(__m512i (&rows)[kLanes]) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int step = 1; step < kLanes; step *= 2) {
    // Of a pair of rows `step` apart, the blocks off the diagonal change places; 16 and more is a lane of the second row.
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(step));
    const __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(kLanes - step));
    const __m512i high = _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(step)), upper, lane, _mm512_set1_epi32(kLanes));
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const __m512i a = rows[i], b = rows[i + step];
      rows[i] = _mm512_permutex2var_epi32(a, low, b);
      rows[i + step] = _mm512_permutex2var_epi32(a, high, b);
    }
  }
}

// The largest of numbers that are not negative; NaN where there is one, as its bits are the largest.
inline __m512 max_or_nan(__m512 a, __m512 b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}

inline float reduce_max_or_nan(__m512 x) {
  const int bits = _mm512_reduce_max_epi32(_mm512_castps_si512(x));
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// A unit in which no number of the rows is larger than `largest`; NaN or infinite where one of them is.
inline float unit_by_numbers(const float* rows, const TextHead& head, float largest) {
  __m512 found = _mm512_setzero_ps();
  for (int token = 0; token < head.num_tokens; ++token)
    for (int h = 0; h < head.head_size; h += kLanes) found = max_or_nan(found, _mm512_abs_ps(load16(rows + token * head.head_size + h)));
  return reduce_max_or_nan(found) / largest;
}

// The same, in which no row's norm is larger than kLargestNorm either: two such rows have a product below 2^31.
constexpr float kLargestNorm = 46000.0f, kLargestNumber = 32767.0f;

inline float unit_by_norms(const float* rows, const TextHead& head) {
  __m512 found = _mm512_setzero_ps();  // of each lane the largest sum of squares: together no row's is larger
  for (int token = 0; token < head.num_tokens; ++token) {
    __m512 squares = _mm512_setzero_ps();
    for (int h = 0; h < head.head_size; h += kLanes) {
      const __m512 x = load16(rows + token * head.head_size + h);
      squares = _mm512_fmadd_ps(x, x, squares);
    }
    found = max_or_nan(found, squares);
  }
  return std::max(std::sqrt(_mm512_reduce_add_ps(found)) / kLargestNorm, std::sqrt(reduce_max_or_nan(found)) / kLargestNumber);
}

inline __m512 times_per(float unit) { return _mm512_set1_ps(unit > 1e-30f ? 1.0f / unit : 0.0f); }
inline __m512i whole16(const float* from, __m512 per_unit) { return _mm512_cvtps_epi32(_mm512_mul_ps(load16(from), per_unit)); }

// 32 dimensions in the order that queries and keys have in common.
inline __m512i whole32(const float* from, __m512 per_unit) {
  return _mm512_packs_epi32(whole16(from, per_unit), whole16(from + kLanes, per_unit));
}

// 16 numbers of each of two neighbouring positions, in pairs.
inline __m512i pair16(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaau, first, _mm512_slli_epi32(second, 16));
}

inline void take_keys(const TextHead& head, float unit, int16_t* keys) {
  const __m512 per_unit = times_per(unit);
  for (int token = 0; token < head.num_tokens; ++token)
    for (int h = 0; h < head.head_size; h += kDims)
      _mm512_storeu_si512(keys + token * head.head_size + h, whole32(head.keys + token * head.head_size + h, per_unit));
}

inline void take_values(const TextHead& head, float unit, int16_t* values) {
  const __m512 per_unit = times_per(unit);
  for (int token = 0; token < head.num_tokens; token += 2)
    for (int h = 0; h < head.head_size; h += kLanes) {
      const float* from = head.values + token * head.head_size + h;
      const bool has_second = token + 1 < head.num_tokens;
      const __m512i second = has_second ? whole16(from + head.head_size, per_unit) : _mm512_setzero_si512();
      _mm512_storeu_si512(values + token * head.head_size + 2 * h, pair16(whole16(from, per_unit), second));
    }
}

// Behind the last query it is repeated.
inline void take_queries(const TextHead& head, int first_query, float unit, int16_t* queries) {
  const __m512 per_unit = times_per(unit);
  for (int h = 0; h < head.head_size; h += kDims) {
    __m512i rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
      rows[i] = whole32(head.queries + std::min(first_query + i, head.num_tokens - 1) * head.head_size + h, per_unit);
    transpose16(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(queries + (h / 2 + i) * kDims, rows[i]);
  }
}

// Scores of a turn and R keys.
template <int R>
inline __m512i score_keys(const int16_t* queries, const int16_t* keys, int head_size, int32_t* scores, __m512i largest) {
  __m512i score[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) score[r] = _mm512_setzero_si512();
  for (int h = 0; h < head_size; h += 2) {
    const __m512i q = _mm512_loadu_si512(queries + h * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) score[r] = _mm512_dpwssd_epi32(score[r], spread(keys + r * head_size + h), q);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_si512(scores + r * kLanes, score[r]);
    largest = _mm512_max_epi32(largest, score[r]);
  }
  return largest;
}

// Scores of a turn, in units that `scale` takes to powers of two, become weights of which a query's have at most the sum `most`. Their sums
// are given.
inline __m512 weigh(int32_t* scores, int num_tokens, __m512i largest, float scale, float most) {
  __m512 total = _mm512_setzero_ps();
  for (int token = 0; token < num_tokens; ++token) {
    int32_t* at = scores + token * kLanes;
    const __m512 below = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(at), largest));
    const __m512 weight = exp2_16(_mm512_mul_ps(below, _mm512_set1_ps(scale)));
    total = _mm512_add_ps(total, weight);
    _mm512_storeu_ps(at, weight);
  }
  const __m512 unit = _mm512_min_ps(_mm512_div_ps(_mm512_set1_ps(most), total), _mm512_set1_ps(kLargestNumber));
  for (int token = 0; token < num_tokens; token += 2) {
    const float* from = reinterpret_cast<const float*>(scores + token * kLanes);
    const __m512i second = token + 1 < num_tokens ? whole16(from + kLanes, unit) : _mm512_setzero_si512();
    _mm512_storeu_si512(scores + token / 2 * kLanes, pair16(whole16(from, unit), second));
  }
  return _mm512_mul_ps(total, unit);
}

// R queries, 32 dimensions: weights times values, in the factor's unit.
template <int R>
inline void mix_values(const int32_t* weights, const int16_t* values, int num_tokens, int head_size, const float* factors, float* out,
                       int64_t out_stride) {
  __m512i mixed[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) mixed[r][0] = mixed[r][1] = _mm512_setzero_si512();
  for (int pair = 0; pair < (num_tokens + 1) / 2; ++pair) {
    const __m512i low = _mm512_loadu_si512(values + pair * 2 * head_size);
    const __m512i high = _mm512_loadu_si512(values + pair * 2 * head_size + kDims);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i weight = spread(weights + pair * kLanes + r);
      mixed[r][0] = _mm512_dpwssd_epi32(mixed[r][0], weight, low);
      mixed[r][1] = _mm512_dpwssd_epi32(mixed[r][1], weight, high);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      store16(out + r * out_stride + v * kLanes, _mm512_mul_ps(_mm512_cvtepi32_ps(mixed[r][v]), _mm512_set1_ps(factors[r])));
}

// All queries of one head of a text.
inline void attend_text(const TextHead& head, const AttentionDesk& desk) {
  const int size = head.head_size, num_tokens = head.num_tokens;
  const float query_unit = unit_by_norms(head.queries, head), key_unit = unit_by_norms(head.keys, head);
  // The largest sum of a query's weights times the largest value is below 2^31. The longer the text, the smaller are its weights and the
  // more of the 31 bits they get: so that both are rounded alike where all weights are equal.
  const float most = 20000.0f * std::sqrt(static_cast<float>(num_tokens));
  const float value_unit = unit_by_numbers(head.values, head, std::min(kLargestNumber, 2.12e9f / most));
  const float scale = 1.44269504088896341f / std::sqrt(static_cast<float>(size)) * query_unit * key_unit;
  take_keys(head, key_unit, desk.keys);
  take_values(head, value_unit, desk.values);
  for (int query = 0; query < num_tokens; query += kLanes) {
    take_queries(head, query, query_unit, desk.queries);
    __m512i largest = _mm512_set1_epi32(std::numeric_limits<int32_t>::min());
    for_tiles(num_tokens, [&](int first, auto count) {
      largest = score_keys<decltype(count)::value>(desk.queries, desk.keys + first * size, size, desk.scores + first * kLanes, largest);
    });
    const __m512 totals = weigh(desk.scores, num_tokens, largest, scale, most);
    alignas(64) float factors[kLanes];
    store16(factors, _mm512_div_ps(_mm512_set1_ps(value_unit), totals));
    for_tiles(std::min(kLanes, num_tokens - query), [&](int first, auto count) {
      for (int h = 0; h < size; h += kDims)
        mix_values<decltype(count)::value>(desk.scores + first, desk.values + 2 * h, num_tokens, size, factors + first,
                                           head.out + (query + first) * head.out_stride + h, head.out_stride);
    });
  }
}

}  // namespace headrace
