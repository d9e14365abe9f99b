// Products of rows with packed weights: out[m, n] = sum over k of a[m, k] * w[n, k].
//
// Legend: M rows, N outputs, K inputs, a panel is 64 outputs.
//
// A weight is packed once. A panel holds, for each run of inputs that one instruction takes (2 of bfloat16 or int16, 4 of int8), that
// run of all its 64 outputs one after another, so that a step of the inner loop is 4 loads, and one multiply-add for each row
// and load. Every output is one sum over ascending k, whatever M and wherever the row stands in it: results do not
// depend on the batch.
//
// int16 is as fast as bfloat16 and several times as exact: 12 bits and more of both sides instead of 8, and sums without rounding.
// No sum can leave its 32 bits, as scales are such that the norms of a row's group and of a weight's are bounded (Cauchy-Schwarz).

#pragma once

#include <omp.h>

#include <algorithm>

#include "vectors.h"

namespace headrace {

constexpr int kPanel = 64;
constexpr int kTasksWanted = 32;
constexpr int kTileRows = 6;  // 24 sums, 4 weights and 1 input are 29 of 32 registers

enum class Format : int32_t { bfloat16 = 0, int8 = 1, int16 = 2 };

// A packed weight. With integers an output is scale * (sum over groups of inputs of the row's scale * integer sum).
// Inputs of int8 are stored with 128 added; correction is -128 times the sum of a group's weights.
struct Weight {
  const void* packed;
  const float* scale;         // [N], integers only
  const int32_t* correction;  // [groups, N], int8 only
  const float* bias;          // [N] or null
  int32_t num_outputs;        // N, as packed: filled up to whole panels with zeros
  int32_t num_inputs;         // K
  Format format;
};

// Rows to be multiplied: bfloat16, or integers with one scale for each group of a row.
struct Rows {
  const void* values;   // [M, K]
  const float* scales;  // [M, groups], integers only
};

constexpr int value_bytes(Format format) { return format == Format::int8 ? 1 : 2; }

// Inputs that share a scale, and whose products are added up as integers.
constexpr int group_size(Format format) { return format == Format::int16 ? 384 : 96; }
inline int num_groups(int64_t num_inputs, Format format) {
  return static_cast<int>((num_inputs + group_size(format) - 1) / group_size(format));
}

// One tile: M rows times one panel, over all inputs. Meanwhile one line a run is fetched from `ahead`.
struct Tile {
  const char* rows;
  int64_t row_bytes;
  const char* panel;
  const char* ahead;
  int64_t num_runs;
  const float* scales;        // of the rows' groups, integers only
  const int32_t* correction;  // of the panel, int8 only
  int64_t correction_stride;
  const float* scale;  // of the panel, integers only
  const float* bias;   // of the panel, or null
};

inline __m512 load_bias(const Tile& tile, int v) { return tile.bias ? load16(tile.bias + v * kLanes) : _mm512_setzero_ps(); }

#if HEADRACE_HAS_BF16
template <int M>
void multiply_bf16(const Tile& tile, float* sums) {
  const char *rows = tile.rows, *panel = tile.panel, *ahead = tile.ahead;
  const int64_t row_bytes = tile.row_bytes;
  __m512 sum[M][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < tile.num_runs; ++k, rows += 4, panel += kPanel * 4, ahead += 64) {
    __builtin_prefetch(ahead, 0, 2);
    __m512bh w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load_pairs(panel + v * 64);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512bh x = reinterpret_cast<__m512bh>(spread(rows + m * row_bytes));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], x, w[v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store16(sums + m * kPanel + v * kLanes, _mm512_add_ps(sum[m][v], load_bias(tile, v)));
}
#endif

// Adds a group's integer sums to what a tile's values are so far; behind the last group they are scaled, with the bias.
template <int M>
inline void add_group(const Tile& tile, const __m512i (&sum)[M][kVectors], int64_t group, int64_t num_groups, float* values) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const __m512 row_scale = _mm512_set1_ps(tile.scales[m * num_groups + group]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* to = values + m * kPanel + v * kLanes;
      __m512 value = _mm512_cvtepi32_ps(sum[m][v]);
      value = group ? _mm512_fmadd_ps(value, row_scale, load16(to)) : _mm512_mul_ps(value, row_scale);
      if (group + 1 == num_groups) value = _mm512_fmadd_ps(value, load16(tile.scale + v * kLanes), load_bias(tile, v));
      store16(to, value);
    }
  }
}

template <int M, Format F>
void multiply_integers(const Tile& tile, float* sums) {
  constexpr int64_t kRuns = group_size(F) * value_bytes(F) / 4;  // of a group
  const char *rows = tile.rows, *panel = tile.panel, *ahead = tile.ahead;
  const int64_t row_bytes = tile.row_bytes, groups = (tile.num_runs + kRuns - 1) / kRuns;
  for (int64_t group = 0; group < groups; ++group) {
    __m512i sum[M][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      __m512i start = _mm512_setzero_si512();
      if constexpr (F == Format::int8) start = _mm512_loadu_si512(tile.correction + group * tile.correction_stride + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m][v] = start;
    }
    const int64_t end = std::min(tile.num_runs, (group + 1) * kRuns);
    for (int64_t k = group * kRuns; k < end; ++k, rows += 4, panel += kPanel * 4, ahead += 64) {
      __builtin_prefetch(ahead, 0, 2);
      __m512i w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_si512(panel + v * 64);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512i x = spread(rows + m * row_bytes);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (F == Format::int8) add_bytes(sum[m][v], x, w[v]);
          else add_words(sum[m][v], x, w[v]);
        }
      }
    }
    add_group<M>(tile, sum, group, groups, sums);
  }
}

using MultiplyTile = void (*)(const Tile& tile, float* sums);

template <int M>
MultiplyTile multiply_rows(Format format) {
  switch (format) {
    case Format::int8: return multiply_integers<M, Format::int8>;
    case Format::int16: return multiply_integers<M, Format::int16>;
#if HEADRACE_HAS_BF16
    case Format::bfloat16: return multiply_bf16<M>;
#endif
    default: return nullptr;
  }
}

inline MultiplyTile multiply_tile(Format format, int num_rows) {
  switch (num_rows) {
    case 1: return multiply_rows<1>(format);
    case 2: return multiply_rows<2>(format);
    case 3: return multiply_rows<3>(format);
    case 4: return multiply_rows<4>(format);
    case 5: return multiply_rows<5>(format);
    default: return multiply_rows<kTileRows>(format);
  }
}

// Rows [begin, end) times one panel, while a quarter of the panel `next` is fetched during each of the first tiles.
template <typename Take>
void multiply_panel(const Rows& rows, int begin, int end, const Weight& weight, int panel, int next, Take&& take) {
  const int64_t row_bytes = static_cast<int64_t>(weight.num_inputs) * value_bytes(weight.format);
  const int64_t num_runs = row_bytes / 4, panel_bytes = num_runs * kPanel * 4;
  const int groups = num_groups(weight.num_inputs, weight.format);
  const char* packed = static_cast<const char*>(weight.packed);
  Tile tile{nullptr, row_bytes, packed + panel * panel_bytes, nullptr, num_runs, nullptr,
            weight.correction ? weight.correction + panel * kPanel : nullptr, weight.num_outputs,
            weight.scale ? weight.scale + panel * kPanel : nullptr, weight.bias ? weight.bias + panel * kPanel : nullptr};
  for (int row = begin, index = 0; row < end; ++index) {
    const int num_tiles = (end - row + kTileRows - 1) / kTileRows;
    const int count = (end - row + num_tiles - 1) / num_tiles;
    tile.rows = static_cast<const char*>(rows.values) + row * row_bytes;
    tile.ahead = index < 4 ? packed + next * panel_bytes + index * num_runs * 64 : tile.panel;
    tile.scales = rows.scales ? rows.scales + static_cast<int64_t>(row) * groups : nullptr;
    alignas(64) float values[kTileRows * kPanel];
    multiply_tile(weight.format, count)(tile, values);
    for (int m = 0; m < count; ++m) take(row + m, panel, values + m * kPanel);
    row += count;
  }
}

// Run all tiles of a product, the threads of the surrounding parallel region sharing them. `take(row, panel, values)` gets
// the 64 values of each row and panel, once.
template <typename Take>
void multiply(const Rows& rows, int num_rows, const Weight& weight, Take&& take) {
  const int num_panels = weight.num_outputs / kPanel;
  // Enough tasks that the threads end together; a panel is fetched once for all rows of a task.
  const int num_chunks = std::min((num_rows + kTileRows - 1) / kTileRows, (kTasksWanted + num_panels - 1) / num_panels);
#pragma omp for schedule(dynamic, 1)
  for (int task = 0; task < num_panels * num_chunks; ++task) {
    const int panel = task / num_chunks, chunk = task % num_chunks;
    const int begin = static_cast<int64_t>(num_rows) * chunk / num_chunks;
    const int end = static_cast<int64_t>(num_rows) * (chunk + 1) / num_chunks;
    const int next = std::min(panel + omp_get_num_threads(), num_panels - 1);  // that this thread takes next, most likely
    multiply_panel(rows, begin, end, weight, panel, next, take);
  }
}

// The same by one thread.
template <typename Take>
void multiply_alone(const Rows& rows, int num_rows, const Weight& weight, Take&& take) {
  const int num_panels = weight.num_outputs / kPanel;
  for (int panel = 0; panel < num_panels; ++panel)
    multiply_panel(rows, 0, num_rows, weight, panel, std::min(panel + 1, num_panels - 1), take);
}

}  // namespace headrace
