// Attention over block tables for any run of queries: chunks of a prompt and single tokens alike.
//
// Legend: B blocks, K key-value heads, N query heads, G = N / K, H head size, P = 16 positions of a block.
//
// The pool is laid out for the multiply-add of pairs. It is [K, B], and of each block and head the keys are [H / 2, P, 2]: one load is a pair of
// dimensions of 16 positions, so that 16 scores come out side by side and nothing is summed across lanes. Values are
// [P / 2, H, 2]: one load is a pair of positions of 16 dimensions. Softmax is online, 64 positions at a time from a multiple of 64 on,
// so that a query's result does not depend on the chunk or the batch in which it is computed.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace headrace {

constexpr int kBlock = 16;   // positions of a block
constexpr int kStretch = kVectors * kBlock;  // 64 positions of one turn of the online softmax
constexpr int kBlocksOfStretch = kVectors;
constexpr int kQueryRows = 4;  // rows (query, head) that are computed together
constexpr int kTileQueries = 16;
constexpr int kTileMembers = 8;  // single tokens that are computed together over a prefix that they share
constexpr int kMaxHeadSize = 256;

// Where one head of a block begins, in values: first its keys, then its values. Blocks that follow each other lie side by
// side, so that a sequence is read in long runs where its blocks are in order.
inline int64_t head_offset(int64_t block, int64_t num_blocks, int kv_head, int head_size) {
  return (kv_head * num_blocks + block) * 2 * kBlock * head_size;
}

inline void store_key(bf16* block_head, int position, int head_size, const float* key) {
  alignas(64) bf16 pairs[kMaxHeadSize];
  for (int h = 0; h < head_size; h += kLanes) store16(pairs + h, load16(key + h));
  for (int h = 0; h < head_size; h += 2) std::memcpy(block_head + (h / 2 * kBlock + position) * 2, pairs + h, 4);
}

inline void store_value(bf16* block_head, int position, int head_size, const float* value) {
  bf16* pairs = block_head + position / 2 * head_size * 2;
  for (int h = 0; h < head_size; h += kLanes) {
    const __m512i bits = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load16(value + h))));
    const __m512i old = _mm512_loadu_si512(pairs + 2 * h);  // read and written back whole: masked stores are slow
    const __m512i mixed = position % 2 ? _mm512_or_si512(_mm512_and_si512(old, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(bits, 16))
                                       : _mm512_or_si512(_mm512_andnot_si512(_mm512_set1_epi32(0xffff), old), bits);
    _mm512_storeu_si512(pairs + 2 * h, mixed);
  }
}

// One query of one head: what it sees, and its running softmax.
struct QueryRow {
  const bf16* query;  // [H]
  float* mixed;       // [H], sum of weights times values
  int begin, end;     // positions that it sees
  float top;          // largest score so far, in powers of two
  __m512 total;       // sums of weights, one a lane
};

struct Stretch {
  const bf16* keys[kBlocksOfStretch];
  const bf16* values[kBlocksOfStretch];
  const bf16* next_keys[kBlocksOfStretch];  // what will be read after it: fetched meanwhile
  const bf16* next_values[kBlocksOfStretch];
  int first;        // position of the first key
  int num_written;  // positions of it that have been written; what lies behind may hold anything
};

// mixed += weights x values for V x 16 dimensions from h on, and `num_seen` positions.
template <int R, int V>
inline void mix_values(QueryRow* rows, const Stretch& stretch, int num_seen, int head_size, int h, const bf16 (*weight)[kStretch]) {
  __m512 mixed[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) mixed[r][v] = load16(rows[r].mixed + h + v * kLanes);
  const int num_pairs = (num_seen + 1) / 2;
  for (int pair = 0; pair < num_pairs; ++pair) {
    const int64_t at = (pair % (kBlock / 2)) * 2 * head_size + 2 * h;
    const bf16* values = stretch.values[pair / (kBlock / 2)] + at;
    const bf16* next = stretch.next_values[pair / (kBlock / 2)] + at;
    // Where only the first position of the pair has been written, the second may hold anything.
    const __m512i keep = _mm512_set1_epi32(2 * pair + 1 < stretch.num_written ? -1 : 0xffff);
    __m512bh x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      x[v] = reinterpret_cast<__m512bh>(_mm512_and_si512(keep, _mm512_loadu_si512(values + 2 * v * kLanes)));
      __builtin_prefetch(next + 2 * v * kLanes, 0, 2);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512bh p = reinterpret_cast<__m512bh>(spread(weight[r] + 2 * pair));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) mixed[r][v] = _mm512_dpbf16_ps(mixed[r][v], p, x[v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store16(rows[r].mixed + h + v * kLanes, mixed[r][v]);
}

// R rows over the first B blocks of a stretch, of which they see at most `num_seen` positions.
template <int R, int B>
void attend_rows(QueryRow* rows, const Stretch& stretch, int num_seen, int head_size, float scale) {
  __m512 score[R][B];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) score[r][b] = _mm512_setzero_ps();
  for (int h = 0; h < head_size; h += 2) {
    const int at = h * kBlock;
    __m512bh k[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) k[b] = load_pairs(stretch.keys[b] + at);
#pragma GCC unroll 4
    for (int b = 0; b < kBlocksOfStretch; ++b) __builtin_prefetch(stretch.next_keys[b] + at, 0, 2);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512bh q = reinterpret_cast<__m512bh>(spread(rows[r].query + h));
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) score[r][b] = _mm512_dpbf16_ps(score[r][b], q, k[b]);
    }
  }
  alignas(64) bf16 weight[R][kStretch];
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    QueryRow& row = rows[r];
    const bool whole = row.begin <= stretch.first && row.end >= stretch.first + kStretch;
    __mmask16 seen[B];
    const __m512 hidden = _mm512_set1_ps(-1e30f);
    __m512 largest = hidden;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      score[r][b] = _mm512_mul_ps(score[r][b], _mm512_set1_ps(scale));
      seen[b] = 0xffff;
      if (!whole) {
        const __m512i position = _mm512_add_epi32(lane, _mm512_set1_epi32(stretch.first + b * kBlock));
        seen[b] = _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(row.end)) &
                  _mm512_cmpge_epi32_mask(position, _mm512_set1_epi32(row.begin));
        score[r][b] = _mm512_mask_mov_ps(hidden, seen[b], score[r][b]);
      }
      largest = _mm512_max_ps(largest, score[r][b]);
    }
    const float top = std::max(row.top, _mm512_reduce_max_ps(largest));
    if (top > row.top) {
      const __m512 shrink = exp2_16(_mm512_set1_ps(row.top - top));
      row.top = top;
      row.total = _mm512_mul_ps(row.total, shrink);
      for (int h = 0; h < head_size; h += kLanes) store16(row.mixed + h, _mm512_mul_ps(load16(row.mixed + h), shrink));
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      __m512 w = exp2_16(_mm512_sub_ps(score[r][b], _mm512_set1_ps(top)));
      if (!whole) w = _mm512_maskz_mov_ps(seen[b], w);
      row.total = _mm512_add_ps(row.total, w);
      store16(weight[r] + b * kBlock, w);
    }
  }
  for (int h = 0; h < head_size; h += kStretch) {  // at most 64 dimensions at a time
    switch (std::min(kVectors, (head_size - h) / kLanes)) {
      case 4: mix_values<R, 4>(rows, stretch, num_seen, head_size, h, weight); break;
      case 3: mix_values<R, 3>(rows, stretch, num_seen, head_size, h, weight); break;
      case 2: mix_values<R, 2>(rows, stretch, num_seen, head_size, h, weight); break;
      default: mix_values<R, 1>(rows, stretch, num_seen, head_size, h, weight);
    }
  }
}

template <int R>
void attend_blocks(QueryRow* rows, const Stretch& stretch, int num_seen, int head_size, float scale) {
  switch ((num_seen + kBlock - 1) / kBlock) {
    case 1: attend_rows<R, 1>(rows, stretch, num_seen, head_size, scale); break;
    case 2: attend_rows<R, 2>(rows, stretch, num_seen, head_size, scale); break;
    case 3: attend_rows<R, 3>(rows, stretch, num_seen, head_size, scale); break;
    default: attend_rows<R, 4>(rows, stretch, num_seen, head_size, scale);
  }
}

// Up to four rows in order of their ends; what none of them sees is not computed.
inline void attend_group(QueryRow* rows, int count, const Stretch& stretch, int head_size, float scale) {
  const int num_seen = std::min(kStretch, rows[count - 1].end - stretch.first);
  if (num_seen <= 0 || rows[0].begin >= stretch.first + kStretch) return;
  switch (count) {
    case 4: attend_blocks<4>(rows, stretch, num_seen, head_size, scale); break;
    case 3: attend_blocks<3>(rows, stretch, num_seen, head_size, scale); break;
    case 2: attend_blocks<2>(rows, stretch, num_seen, head_size, scale); break;
    default: attend_blocks<1>(rows, stretch, num_seen, head_size, scale);
  }
}

}  // namespace headrace
