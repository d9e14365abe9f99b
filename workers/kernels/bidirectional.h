// Attention in which every token sees its whole text, in float32.
//
// Legend: L tokens of a text, W the same filled up to whole registers, H head size, R queries computed together, B registers of keys.
//
// One text and head at a time. Its keys are turned to [H, W] first, so that 16 scores come out side by side and nothing is summed across
// lanes. A query's arithmetic depends on its text alone, not on the queries that are computed with it.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace headrace {

constexpr int kQueries = 4;  // computed together

inline int filled_up(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// One head of a text. Of the tokens the rows lie `stride` apart, those that come out `out_stride`.
struct TextHead {
  const float *queries, *keys, *values;  // [L, H]
  float* out;                            // [L, H]
  int64_t stride, out_stride;
  int num_tokens, head_size;
};

// What a thread needs for one head.
struct AttentionDesk {
  float* keys;    // [H, W]
  float* scores;  // [kQueries, W]
};

// Call with a count from 1 to 4 as a constant.
template <typename Body>
inline void with_constant(int count, Body&& body) {
  switch (count) {
    case 1: body(std::integral_constant<int, 1>()); break;
    case 2: body(std::integral_constant<int, 2>()); break;
    case 3: body(std::integral_constant<int, 3>()); break;
    default: body(std::integral_constant<int, 4>());
  }
}

// 16 rows of 16 floats: rows become columns.
inline void transpose16(__m512 (&rows)[kLanes]) {
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
      const __m512 a = rows[i], b = rows[i + step];
      rows[i] = _mm512_permutex2var_ps(a, low, b);
      rows[i + step] = _mm512_permutex2var_ps(a, high, b);
    }
  }
}

// What lies behind the last token repeats it, and is not looked at.
inline void turn_keys(const TextHead& head, int width, float* keys) {
  for (int first = 0; first < width; first += kLanes)
    for (int h = 0; h < head.head_size; h += kLanes) {
      __m512 rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = load16(head.keys + std::min(first + i, head.num_tokens - 1) * head.stride + h);
      transpose16(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store16(keys + (h + i) * width + first, rows[i]);
    }
}

// Scores of R queries and 16 B keys from `first` on.
template <int R, int B>
inline void score_keys(const TextHead& head, const float* queries, int width, int first, const AttentionDesk& desk) {
  __m512 score[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) score[r][b] = _mm512_setzero_ps();
  for (int h = 0; h < head.head_size; ++h) {
    __m512 k[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) k[b] = load16(desk.keys + h * width + first + b * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 q = _mm512_set1_ps(queries[r * head.stride + h]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) score[r][b] = _mm512_fmadd_ps(q, k[b], score[r][b]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) store16(desk.scores + r * width + first + b * kLanes, score[r][b]);
}

// Scores of a query become weights whose sum is given; `scale` takes a score to powers of two.
inline float weigh(float* scores, int num_tokens, float scale) {
  const int width = filled_up(num_tokens);
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __mmask16 seen = 0xffff >> (width - num_tokens);  // of the last register
  float* last = scores + width - kLanes;
  store16(last, _mm512_mask_mov_ps(hidden, seen, load16(last)));
  __m512 largest = hidden, total = _mm512_setzero_ps();
  for (int first = 0; first < width; first += kLanes) largest = _mm512_max_ps(load16(scores + first), largest);
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int first = 0; first < width; first += kLanes) {
    const __m512 weight = exp2_16(_mm512_mul_ps(_mm512_sub_ps(load16(scores + first), top), _mm512_set1_ps(scale)));
    total = _mm512_add_ps(total, weight);
    store16(scores + first, weight);
  }
  return _mm512_reduce_add_ps(total);
}

// out = weights times values, divided by the weights' totals: R queries, 16 V dimensions.
template <int R, int V>
inline void mix_values(const TextHead& head, int first_query, int h, const float* weights, int width, const float* totals) {
  __m512 mixed[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) mixed[r][v] = _mm512_setzero_ps();
  for (int token = 0; token < head.num_tokens; ++token) {
    __m512 x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load16(head.values + token * head.stride + h + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 p = _mm512_set1_ps(weights[r * width + token]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) mixed[r][v] = _mm512_fmadd_ps(p, x[v], mixed[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      store16(head.out + (first_query + r) * head.out_stride + h + v * kLanes, _mm512_mul_ps(mixed[r][v], _mm512_set1_ps(1.0f / totals[r])));
}

// All queries of one head of a text.
inline void attend_text(const TextHead& head, const AttentionDesk& desk) {
  constexpr int kStretch = kVectors * kLanes;
  const int width = filled_up(head.num_tokens);
  const float scale = 1.44269504088896341f / std::sqrt(static_cast<float>(head.head_size));
  turn_keys(head, width, desk.keys);
  for (int query = 0; query < head.num_tokens; query += kQueries)
    with_constant(head.num_tokens - query, [&](auto rows) {
      constexpr int R = decltype(rows)::value;
      const float* queries = head.queries + query * head.stride;
      for (int first = 0; first < width; first += kStretch)
        with_constant((width - first) / kLanes,
                      [&](auto keys) { score_keys<R, decltype(keys)::value>(head, queries, width, first, desk); });
      float totals[R];
      for (int r = 0; r < R; ++r) totals[r] = weigh(desk.scores + r * width, head.num_tokens, scale);
      for (int h = 0; h < head.head_size; h += kStretch)
        with_constant((head.head_size - h) / kLanes,
                      [&](auto values) { mix_values<R, decltype(values)::value>(head, query, h, desk.scores, width, totals); });
    });
}

}  // namespace headrace
