// Products of rows with packed weights: out[m, n] = sum over k of a[m, k] * w[n, k].
//
// Legend: M rows, N outputs, K inputs, a panel is 64 outputs.
//
// A weight is packed once. A panel holds, for each run of inputs that one instruction takes (2 of bfloat16, 4 of int8), that run of
// all its 64 outputs one after another, so that a step of the inner loop is 4 loads, and one multiply-add for each row
// and load. Every output is one sum over ascending k, whatever M and wherever the row stands in it: results do not
// depend on the batch.

#pragma once

#include <omp.h>

#include <algorithm>

#include "vectors.h"

namespace headrace {

constexpr int kPanel = 64;
constexpr int kTasksWanted = 32;
constexpr int kTileRows = 6;  // 24 sums, 4 weights and 1 input are 29 of 32 registers

enum class Format : int32_t { bfloat16 = 0, int8 = 1 };

// A packed weight. With Format::int8 an output is scale * (sum over groups of inputs of the row's scale * integer sum).
// Inputs are stored with 128 added; correction is -128 times the sum of a group's weights.
struct Weight {
  const void* packed;
  const float* scale;         // [N], int8 only
  const int32_t* correction;  // [groups, N], int8 only
  const float* bias;          // [N] or null
  int32_t num_outputs;        // N, as packed: filled up to whole panels with zeros
  int32_t num_inputs;         // K
  Format format;
};

// Rows to be multiplied: bfloat16, or bytes with one scale for each group of a row.
struct Rows {
  const void* values;   // [M, K]
  const float* scales;  // [M, groups], int8 only
};

constexpr int kGroup = 96;  // inputs that share a scale
inline int num_groups(int64_t num_inputs) { return static_cast<int>((num_inputs + kGroup - 1) / kGroup); }

// One tile: M rows times one panel, over all inputs. Meanwhile one line a run is fetched from `ahead`.
struct Tile {
  const char* rows;
  int64_t row_bytes;
  const char* panel;
  const char* ahead;
  int64_t num_runs;
  const float* scales;        // of the rows' groups, int8 only
  const int32_t* correction;  // of the panel, int8 only
  int64_t correction_stride;
};

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
    for (int v = 0; v < kVectors; ++v) store16(sums + m * kPanel + v * kLanes, sum[m][v]);
}

// _mm512_dpbusd_epi32, written so that compilers keep all sums of a tile in registers (gcc 12 does not of itself).
inline void add_products(__m512i& sum, __m512i x, __m512i w) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }

template <int M>
void multiply_int8(const Tile& tile, float* sums) {
  const char *rows = tile.rows, *panel = tile.panel, *ahead = tile.ahead;
  const int64_t row_bytes = tile.row_bytes, groups = (tile.num_runs + kGroup / 4 - 1) / (kGroup / 4);
  for (int64_t group = 0; group < groups; ++group) {
    __m512i sum[M][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512i correction = _mm512_loadu_si512(tile.correction + group * tile.correction_stride + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m][v] = correction;
    }
    const int64_t end = std::min(tile.num_runs, (group + 1) * (kGroup / 4));
    for (int64_t k = group * (kGroup / 4); k < end; ++k, rows += 4, panel += kPanel * 4, ahead += 64) {
      __builtin_prefetch(ahead, 0, 2);
      __m512i w[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) w[v] = _mm512_loadu_si512(panel + v * 64);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const __m512i x = spread(rows + m * row_bytes);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) add_products(sum[m][v], x, w[v]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512 scale = _mm512_set1_ps(tile.scales[m * groups + group]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* to = sums + m * kPanel + v * kLanes;
        const __m512 value = _mm512_cvtepi32_ps(sum[m][v]);
        store16(to, group ? _mm512_fmadd_ps(value, scale, load16(to)) : _mm512_mul_ps(value, scale));
      }
    }
  }
}

using MultiplyTile = void (*)(const Tile& tile, float* sums);

inline MultiplyTile multiply_tile(Format format, int num_rows) {
  static constexpr MultiplyTile bf16_tiles[] = {multiply_bf16<1>, multiply_bf16<2>, multiply_bf16<3>,
                                                multiply_bf16<4>, multiply_bf16<5>, multiply_bf16<6>};
  static constexpr MultiplyTile int8_tiles[] = {multiply_int8<1>, multiply_int8<2>, multiply_int8<3>,
                                                multiply_int8<4>, multiply_int8<5>, multiply_int8<6>};
  return (format == Format::bfloat16 ? bf16_tiles : int8_tiles)[num_rows - 1];
}

// Sums of a tile become values: scaled, with the bias.
inline void finish_sums(float* sums, int num_rows, const Weight& weight, int first_output) {
  if (weight.format == Format::bfloat16 && !weight.bias) return;
  for (int v = 0; v < kPanel; v += kLanes) {
    const int n = first_output + v;
    const __m512 scale = weight.format == Format::int8 ? load16(weight.scale + n) : _mm512_set1_ps(1.0f);
    const __m512 bias = weight.bias ? load16(weight.bias + n) : _mm512_setzero_ps();
    for (int m = 0; m < num_rows; ++m) {
      float* at = sums + m * kPanel + v;
      store16(at, _mm512_fmadd_ps(load16(at), scale, bias));
    }
  }
}

// Run all tiles of a product, the threads of the surrounding parallel region sharing them. `take(row, panel, values)` gets
// the 64 values of each row and panel, once.
template <typename Take>
void multiply(const Rows& rows, int num_rows, const Weight& weight, Take&& take) {
  const bool is_int8 = weight.format == Format::int8;
  const int64_t row_bytes = static_cast<int64_t>(weight.num_inputs) * (is_int8 ? 1 : 2);
  const int64_t num_runs = row_bytes / 4, panel_bytes = num_runs * kPanel * 4;
  const int num_panels = weight.num_outputs / kPanel;
  // Enough tasks that the threads end together; a panel is fetched once for all rows of a task.
  const int num_chunks = std::min((num_rows + kTileRows - 1) / kTileRows, (kTasksWanted + num_panels - 1) / num_panels);
#pragma omp for schedule(dynamic, 1)
  for (int task = 0; task < num_panels * num_chunks; ++task) {
    const int panel = task / num_chunks, chunk = task % num_chunks;
    const int begin = static_cast<int64_t>(num_rows) * chunk / num_chunks;
    const int end = static_cast<int64_t>(num_rows) * (chunk + 1) / num_chunks;
    Tile tile{nullptr, row_bytes, static_cast<const char*>(weight.packed) + panel * panel_bytes, nullptr, num_runs, nullptr,
              is_int8 ? weight.correction + panel * kPanel : nullptr, weight.num_outputs};
    // The panel that this thread takes next, most likely: a quarter of it is fetched during each of the first tiles.
    const char* ahead = tile.panel + std::min(omp_get_num_threads(), num_panels - 1 - panel) * panel_bytes;
    for (int row = begin, index = 0; row < end; ++index) {
      const int num_tiles = (end - row + kTileRows - 1) / kTileRows;
      const int count = (end - row + num_tiles - 1) / num_tiles;
      tile.rows = static_cast<const char*>(rows.values) + row * row_bytes;
      tile.ahead = index < 4 ? ahead + index * num_runs * 64 : tile.panel;
      tile.scales = is_int8 ? rows.scales + static_cast<int64_t>(row) * num_groups(weight.num_inputs) : nullptr;
      alignas(64) float sums[kTileRows * kPanel];
      multiply_tile(weight.format, count)(tile, sums);
      finish_sums(sums, count, weight, panel * kPanel);
      for (int m = 0; m < count; ++m) take(row + m, panel, sums + m * kPanel);
      row += count;
    }
  }
}

}  // namespace headrace
