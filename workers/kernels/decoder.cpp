// A decoder-only transformer on the CPU: one call runs a batch through all layers.
//
// Legend: T tokens of a batch, S sampled rows, D hidden size, I inner size, N query heads, K key-value heads, H head size,
// A = N + 2 K heads of the fused projection, V vocabulary.
//
// The residual stream is float32; what goes into a product is bfloat16, or bytes with a scale for each group of them. One parallel region spans
// the batch; in it every operation shares its tasks out among the threads.

#include "processor.h"

#if HEADRACE_HAS_BF16

#include <omp.h>

#include <vector>

#include "paged.h"
#include "products.h"
#include "rows.h"
#include "scratch.h"

using namespace headrace;

extern "C" {

struct HeadraceLayer {
  Weight qkv, out, gate_up, down;
  const float* attention_norm;  // [D]
  const float* mlp_norm;        // [D]
  const float* head_norm;       // [N + K, H] or null
  bf16* pool;                   // [K, B] of keys [H / 2, 16, 2] and values [8, H, 2]
  int32_t window;               // positions that a query sees; 0: all
};

struct HeadraceDecoder {
  const HeadraceLayer* layers;
  Weight head;
  const float* norm;      // [D]
  const bf16* embedding;  // [V, D]
  const float* cos;       // [positions, H / 2]
  const float* sin;
  int32_t num_layers, hidden_size, inner_size, num_heads, num_kv_heads, head_size, vocab_size;
  float eps;
  int64_t num_blocks;
};

struct HeadraceStep {
  const int64_t* token_ids;  // [T]
  const int64_t* positions;  // [T]
  const int64_t* slots;      // [T], block * 16 + position in it
  const int64_t* sampled;    // [S]
  const int32_t* begins;     // [segments + 1], rows
  const int32_t* starts;     // [segments], position of the first row
  const int32_t* tables;     // [segments, max_blocks]
  int32_t num_tokens, num_segments, max_blocks, num_sampled;
};

}  // extern "C"

namespace {

// Of attention: some queries of a segment, or single tokens of several segments, and one key-value head. Of the latter
// the first `num_shared` positions lie in the same blocks.
struct Unit {
  int32_t first_member, num_members, first_query, num_queries, kv_head, num_shared;
};

// Scratch memory of a batch.
struct Scratch : Cuts {
  Scratch(const HeadraceDecoder& model, int64_t num_rows, void* piece) : Cuts(piece) {
    const int64_t hidden = model.hidden_size, inner = model.inner_size;
    const int64_t width = static_cast<int64_t>(model.num_heads) * model.head_size;
    const int64_t num_heads = model.num_heads + 2 * model.num_kv_heads, num_threads = omp_get_max_threads();
    cut(&residual, num_rows * hidden);
    cut(&heads, num_rows * num_heads * model.head_size);
    cut(&normed, num_rows * hidden);
    cut(&queries, num_rows * width);
    cut(&attended, num_rows * width);
    cut(&inner_rows, num_rows * inner);
    cut(&bytes, num_rows * std::max({hidden, width, inner}));
    cut(&scales, num_rows * num_groups(std::max({hidden, width, inner}), Format::int8));
    cut(&best, num_rows * num_threads);
    cut(&best_ids, num_rows * num_threads);
  }

  float *residual, *heads, *scales, *best;
  bf16 *normed, *queries, *attended, *inner_rows;
  uint8_t* bytes;
  int64_t* best_ids;
};

// Scratch memory of one thread.
struct Desk {
  std::vector<float> mixed;
  std::vector<QueryRow> rows;
};

// A batch on its way through the layers. `run` is called by every thread of one parallel region.
class Batch {
 public:
  Batch(const HeadraceDecoder& model, const HeadraceStep& step, void* piece, Times& times)
      : model_(model), step_(step), times_(times), scratch_(model, step.num_tokens, piece) {
    plan_attention();
  }

  void run(float* out) {
    embed();
    Stopwatch watch;
    for (int index = 0; index < model_.num_layers; ++index) {
      const HeadraceLayer& layer = model_.layers[index];
      normalise(scratch_.residual, step_.num_tokens, layer.attention_norm);
      watch.lap(&times_.rows);
      project(layer);
      watch.lap(&times_.products);
      rotate_and_store(layer);
      watch.lap(&times_.rows);
      attend(layer);
      watch.lap(&times_.attention);
      const bool last = index + 1 == model_.num_layers;
      if (last) gather(out);  // nothing reads the other rows any more
      finish(layer, last ? out : scratch_.residual, last ? step_.num_sampled : step_.num_tokens, watch);
    }
  }

 private:
  int num_heads() const { return model_.num_heads + 2 * model_.num_kv_heads; }

  // Tiles of chunks first, as they take longest. Single tokens whose segments begin with the same blocks are computed together over
  // these, so that a shared prefix is read once for all of them.
  void plan_attention() {
    std::vector<int32_t> singles;
    for (int g = 0; g < step_.num_segments; ++g) {
      const int count = step_.begins[g + 1] - step_.begins[g];
      if (count == 1) singles.push_back(g);
      else
        for (int first = 0; first < count; first += kTileQueries) add_units({&g, &g + 1}, first, std::min(kTileQueries, count - first), 0);
    }
    std::stable_sort(singles.begin(), singles.end(), [&](int32_t a, int32_t b) {
      return std::lexicographical_compare(table(a), table(a) + num_full(a), table(b), table(b) + num_full(b));
    });
    for (size_t begin = 0, end; begin < singles.size(); begin = end) {
      int num_shared = num_written(singles[begin]) - 1;
      for (end = begin + 1; end < singles.size() && end < begin + kTileMembers; ++end) {
        const int common = num_common(singles[begin], singles[end]);
        if (common < kStretch) break;
        num_shared = std::min(num_shared, common);
      }
      add_units({singles.begin() + begin, singles.begin() + end}, 0, 1, end > begin + 1 ? num_shared / kStretch * kStretch : 0);
    }
  }

  void add_units(const std::vector<int32_t>& segments, int first_query, int num_queries, int num_shared) {
    const int first_member = members_.size(), num_members = segments.size();
    members_.insert(members_.end(), segments.begin(), segments.end());
    for (int kv_head = 0; kv_head < model_.num_kv_heads; ++kv_head)
      units_.push_back({first_member, num_members, first_query, num_queries, kv_head, num_shared});
  }

  const int32_t* table(int segment) const { return step_.tables + static_cast<int64_t>(segment) * step_.max_blocks; }

  // Blocks of a segment that lie before its last position: others may have the same.
  int num_full(int segment) const { return (num_written(segment) - 1) / kBlock; }

  // Positions that two segments have in the same blocks.
  int num_common(int a, int b) const {
    return (std::mismatch(table(a), table(a) + std::min(num_full(a), num_full(b)), table(b)).first - table(a)) * kBlock;
  }

  void embed() {
#pragma omp for schedule(static)
    for (int t = 0; t < step_.num_tokens; ++t) {
      const bf16* from = model_.embedding + step_.token_ids[t] * model_.hidden_size;
      float* to = scratch_.residual + static_cast<int64_t>(t) * model_.hidden_size;
      for (int d = 0; d < model_.hidden_size; d += kLanes) store16(to + d, load16(from + d));
    }
  }

  void normalise(const float* residual, int num_rows, const float* weight) {
    const int size = model_.hidden_size;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t) normalise_row(residual + t * size, weight, size, model_.eps, scratch_.normed + t * size);
  }

  // Rows as the weight wants them.
  Rows input(const bf16* values, int num_rows, const Weight& weight) {
    if (weight.format == Format::bfloat16) return {values, nullptr};
    const int64_t size = weight.num_inputs;
#pragma omp for schedule(static)
    for (int t = 0; t < num_rows; ++t)
      to_bytes(values + t * size, size, group_size(Format::int8), scratch_.bytes + t * size,
               scratch_.scales + t * num_groups(size, Format::int8));
    return {scratch_.bytes, scratch_.scales};
  }

  void project(const HeadraceLayer& layer) {
    const Rows rows = input(scratch_.normed, step_.num_tokens, layer.qkv);
    const int64_t width = static_cast<int64_t>(num_heads()) * model_.head_size;
    multiply(rows, step_.num_tokens, layer.qkv, [&](int row, int panel, const float* values) {
      const int first = panel * kPanel, count = std::min<int>(kPanel, width - first);
      std::copy(values, values + count, scratch_.heads + row * width + first);
    });
  }

  // A thread's first token. Two neighbours that share a pair of values, which is read and written back whole, are one
  // thread's.
  int first_token(int thread) const {
    const int t = static_cast<int64_t>(step_.num_tokens) * thread / omp_get_num_threads();
    const bool is_second = t > 0 && t < step_.num_tokens && step_.slots[t] % 2 && step_.slots[t] == step_.slots[t - 1] + 1;
    return is_second ? t + 1 : t;
  }

  void rotate_and_store(const HeadraceLayer& layer) {
    const int size = model_.head_size, width = model_.num_heads * size;
    const int end = first_token(omp_get_thread_num() + 1);
    for (int t = first_token(omp_get_thread_num()); t < end; ++t) {
      float* heads = scratch_.heads + static_cast<int64_t>(t) * num_heads() * size;
      const float* cos = model_.cos + step_.positions[t] * (size / 2);
      const float* sin = model_.sin + step_.positions[t] * (size / 2);
      for (int a = 0; a < model_.num_heads + model_.num_kv_heads; ++a)
        rotate_head(heads + a * size, size, cos, sin, layer.head_norm ? layer.head_norm + a * size : nullptr, model_.eps);
      bf16* query = scratch_.queries + static_cast<int64_t>(t) * width;
      for (int h = 0; h < width; h += kLanes) store16(query + h, load16(heads + h));
      const int64_t block = step_.slots[t] / kBlock;
      const int position = step_.slots[t] % kBlock;
      for (int k = 0; k < model_.num_kv_heads; ++k) {
        bf16* block_head = layer.pool + head_offset(block, model_.num_blocks, k, size);
        store_key(block_head, position, size, heads + width + k * size);
        store_value(block_head + kBlock * size, position, size, heads + width + (model_.num_kv_heads + k) * size);
      }
    }
#pragma omp barrier
  }

  void attend(const HeadraceLayer& layer) {
    static thread_local Desk desk;
    const int num_units = static_cast<int>(units_.size());
    const int groups = model_.num_heads / model_.num_kv_heads;
    desk.rows.resize(static_cast<size_t>(std::max(kTileQueries, kTileMembers)) * groups);
    desk.mixed.resize(desk.rows.size() * model_.head_size);
#pragma omp for schedule(dynamic, 2)
    for (int index = 0; index < num_units; ++index)
      attend_unit(layer, units_[index], index + 1 < num_units ? &units_[index + 1] : nullptr, desk);
  }

  void attend_unit(const HeadraceLayer& layer, const Unit& unit, const Unit* next, Desk& desk) {
    const int groups = model_.num_heads / model_.num_kv_heads, rows_per_member = unit.num_queries * groups;
    const int num_rows = unit.num_members * rows_per_member;
    std::fill(desk.mixed.begin(), desk.mixed.begin() + static_cast<int64_t>(num_rows) * model_.head_size, 0.0f);
    for (int r = 0; r < num_rows; ++r) desk.rows[r] = query_row(layer, unit, r, desk);
    const int num_shared = layer.window ? 0 : unit.num_shared;
    attend_stretches(layer, unit, 0, &desk.rows[0], num_rows, 0, num_shared, nullptr);
    for (int member = 0; member < unit.num_members; ++member) {
      QueryRow* rows = &desk.rows[member * rows_per_member];
      const int begin = std::max(num_shared, rows[0].begin / kStretch * kStretch);
      attend_stretches(layer, unit, member, rows, rows_per_member, begin, rows[rows_per_member - 1].end, member + 1 == unit.num_members ? next : nullptr);
    }
    for (int r = 0; r < num_rows; ++r) finish_row(desk.rows[r]);
  }

  QueryRow query_row(const HeadraceLayer& layer, const Unit& unit, int r, Desk& desk) const {
    const int size = model_.head_size, groups = model_.num_heads / model_.num_kv_heads;
    const int segment = members_[unit.first_member + r / (unit.num_queries * groups)];
    const int query = unit.first_query + r / groups % unit.num_queries, head = unit.kv_head * groups + r % groups;
    const int end = step_.starts[segment] + query + 1;
    const int64_t row = step_.begins[segment] + query;
    return {scratch_.queries + (row * model_.num_heads + head) * size,
            desk.mixed.data() + static_cast<int64_t>(r) * size,
            layer.window ? std::max(0, end - layer.window) : 0,
            end,
            -1e30f,
            _mm512_setzero_ps()};
  }

  // Rows over positions [begin, end) of a member's blocks.
  void attend_stretches(const HeadraceLayer& layer, const Unit& unit, int member, QueryRow* rows, int num_rows, int begin, int end,
                        const Unit* next) {
    const float scale = 1.44269504088896341f / std::sqrt(static_cast<float>(model_.head_size));
    for (int first = begin; first < end; first += kStretch) {
      Stretch stretch = find_stretch(layer, unit, member, first);
      if (first + kStretch < end) fetch_next(find_stretch(layer, unit, member, first + kStretch), stretch);
      else if (member + 1 < unit.num_members) fetch_next(find_stretch(layer, unit, member + 1, unit.num_shared), stretch);
      else if (next) fetch_next(find_stretch(layer, *next, 0, first_stretch(layer, *next)), stretch);
      for (int r = 0; r < num_rows; r += kQueryRows)
        attend_group(rows + r, std::min(kQueryRows, num_rows - r), stretch, model_.head_size, scale);
    }
  }

  void finish_row(const QueryRow& row) {
    const __m512 inverse = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(row.total));
    bf16* out = scratch_.attended + (row.query - scratch_.queries);
    for (int h = 0; h < model_.head_size; h += kLanes) store16(out + h, _mm512_mul_ps(load16(row.mixed + h), inverse));
  }

  int first_stretch(const HeadraceLayer& layer, const Unit& unit) const {
    const int end = step_.starts[members_[unit.first_member]] + unit.first_query + 1;
    return (layer.window ? std::max(0, end - layer.window) : 0) / kStretch * kStretch;
  }

  // Positions of a segment that have been written in this step at the latest.
  int num_written(int segment) const { return step_.starts[segment] + step_.begins[segment + 1] - step_.begins[segment]; }

  Stretch find_stretch(const HeadraceLayer& layer, const Unit& unit, int member, int first) const {
    Stretch stretch;
    const int segment = members_[unit.first_member + member];
    const int written = num_written(segment), last_block = (written - 1) / kBlock;
    for (int b = 0; b < kVectors; ++b) {
      const int block = table(segment)[std::min(first / kBlock + b, last_block)];
      stretch.keys[b] = stretch.next_keys[b] = layer.pool + head_offset(block, model_.num_blocks, unit.kv_head, model_.head_size);
      stretch.values[b] = stretch.next_values[b] = stretch.keys[b] + kBlock * model_.head_size;
    }
    stretch.first = first;
    stretch.num_written = std::min(kStretch, written - first);
    return stretch;
  }

  static void fetch_next(const Stretch& next, Stretch& stretch) {
    std::copy(next.keys, next.keys + kVectors, stretch.next_keys);
    std::copy(next.values, next.values + kVectors, stretch.next_values);
  }

  // The sampled rows alone, in their order.
  void gather(float* out) {
    const int size = model_.hidden_size, width = model_.num_heads * model_.head_size;
#pragma omp for schedule(static)
    for (int s = 0; s < step_.num_sampled; ++s) {
      const int64_t row = step_.sampled[s];
      std::copy(scratch_.residual + row * size, scratch_.residual + (row + 1) * size, out + static_cast<int64_t>(s) * size);
      std::copy(scratch_.attended + row * width, scratch_.attended + (row + 1) * width, scratch_.queries + static_cast<int64_t>(s) * width);
    }
#pragma omp single
    std::swap(scratch_.queries, scratch_.attended);
  }

  void finish(const HeadraceLayer& layer, float* residual, int num_rows, Stopwatch& watch) {
    add_product(scratch_.attended, num_rows, layer.out, residual);
    watch.lap(&times_.products);
    normalise(residual, num_rows, layer.mlp_norm);
    watch.lap(&times_.rows);
    const Rows rows = input(scratch_.normed, num_rows, layer.gate_up);
    const int inner = model_.inner_size;
    multiply(rows, num_rows, layer.gate_up, [&](int row, int panel, const float* values) {
      // A panel is 32 outputs of the gate and the same 32 of up.
      const int first = panel * (kPanel / 2);
      for (int i = 0; i < kPanel / 2 && first + i < inner; i += kLanes)
        store16(scratch_.inner_rows + static_cast<int64_t>(row) * inner + first + i,
                _mm512_mul_ps(silu16(load16(values + i)), load16(values + kPanel / 2 + i)));
    });
    add_product(scratch_.inner_rows, num_rows, layer.down, residual);
    watch.lap(&times_.products);
  }

  void add_product(const bf16* values, int num_rows, const Weight& weight, float* residual) {
    const Rows rows = input(values, num_rows, weight);
    const int size = model_.hidden_size;
    multiply(rows, num_rows, weight, [&](int row, int panel, const float* values) {
      const int first = panel * kPanel;
      float* to = residual + static_cast<int64_t>(row) * size + first;
      for (int d = 0; d < kPanel && first + d < size; d += kLanes) store16(to + d, _mm512_add_ps(load16(to + d), load16(values + d)));
    });
  }

  const HeadraceDecoder& model_;
  const HeadraceStep& step_;
  Times& times_;
  Scratch scratch_;
  std::vector<Unit> units_;
  std::vector<int32_t> members_;  // segments of the units
};

// The output projection over rows of the residual stream.
class Head {
 public:
  Head(const HeadraceDecoder& model, const float* residual, int num_rows, void* piece)
      : model_(model), residual_(residual), num_rows_(num_rows), scratch_(model, num_rows, piece) {}

  void logits(float* out) {
    const int64_t vocab_size = model_.vocab_size;
    multiply(input(), num_rows_, model_.head, [&](int row, int panel, const float* values) {
      const int64_t first = static_cast<int64_t>(panel) * kPanel;
      std::copy(values, values + std::min<int64_t>(kPanel, vocab_size - first), out + row * vocab_size + first);
    });
  }

  // The largest logit of each row, NaN where there is one, and the first id that has it.
  void likeliest(int64_t* ids, float* best) {
    const int num_threads = omp_get_num_threads();
    float* own_best = scratch_.best + static_cast<int64_t>(omp_get_thread_num()) * num_rows_;
    int64_t* own_ids = scratch_.best_ids + static_cast<int64_t>(omp_get_thread_num()) * num_rows_;
    std::fill(own_best, own_best + num_rows_, -std::numeric_limits<float>::infinity());
    std::fill(own_ids, own_ids + num_rows_, model_.vocab_size);
    multiply(input(), num_rows_, model_.head, [&](int row, int panel, const float* values) {
      const int64_t first = static_cast<int64_t>(panel) * kPanel;
      look(values, std::min<int64_t>(kPanel, model_.vocab_size - first), first, own_best + row, own_ids + row);
    });
#pragma omp for schedule(static)
    for (int row = 0; row < num_rows_; ++row) {
      best[row] = scratch_.best[row];
      ids[row] = scratch_.best_ids[row];
      for (int64_t thread = 1; thread < num_threads; ++thread) {
        const float other = scratch_.best[thread * num_rows_ + row];
        const int64_t id = scratch_.best_ids[thread * num_rows_ + row];
        if (std::isnan(best[row]) || other < best[row] || (other == best[row] && id > ids[row])) continue;
        best[row] = other;
        ids[row] = id;
      }
    }
  }

 private:
  static void look(const float* values, int count, int64_t first, float* best, int64_t* id) {
    __m512 largest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __mmask16 broken = 0;
    for (int at = 0; at < count; at += kLanes) {
      const __mmask16 there = count - at >= kLanes ? 0xffff : (1u << (count - at)) - 1;
      const __m512 x = _mm512_mask_loadu_ps(largest, there, values + at);
      broken |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      largest = _mm512_max_ps(x, largest);
    }
    const float top = broken ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(largest);
    if (top <= *best || std::isnan(*best)) return;
    *best = top;
    *id = first + (std::find(values, values + count, top) - values);
  }

  Rows input() {
    const int size = model_.hidden_size;
    const bool narrow = model_.head.format == Format::bfloat16;
#pragma omp for schedule(static)
    for (int64_t s = 0; s < num_rows_; ++s) {
      normalise_row(residual_ + s * size, model_.norm, size, model_.eps, scratch_.normed + s * size);
      if (!narrow)
        to_bytes(scratch_.normed + s * size, size, group_size(Format::int8), scratch_.bytes + s * size,
                 scratch_.scales + s * num_groups(size, Format::int8));
    }
    return narrow ? Rows{scratch_.normed, nullptr} : Rows{scratch_.bytes, scratch_.scales};
  }

  const HeadraceDecoder& model_;
  const float* residual_;
  int num_rows_;
  Scratch scratch_;
};

}  // namespace

extern "C" {

// Bytes of scratch memory for a batch of so many tokens, or so many rows of the head.
int64_t headrace_decoder_scratch_bytes(const HeadraceDecoder* model, int64_t num_rows) {
  return Scratch(*model, num_rows, nullptr).size;
}

// The residual stream [S, D] of the sampled rows behind the last layer.
void headrace_decoder_run(const HeadraceDecoder* model, const HeadraceStep* step, void* scratch, float* out, Times* times) {
  Batch batch(*model, *step, scratch, *times);
#pragma omp parallel
  batch.run(out);
}

// Logits [S, V] of rows of the residual stream.
void headrace_decoder_logits(const HeadraceDecoder* model, const float* residual, int32_t num_rows, void* scratch, float* out) {
  Head head(*model, residual, num_rows, scratch);
#pragma omp parallel
  head.logits(out);
}

// The likeliest token of each row [S] and its logit, without writing the logits.
void headrace_decoder_likeliest(const HeadraceDecoder* model, const float* residual, int32_t num_rows, void* scratch, int64_t* ids,
                                float* best) {
  Head head(*model, residual, num_rows, scratch);
#pragma omp parallel
  head.likeliest(ids, best);
}

}  // extern "C"

#endif

// Whether this processor has what the decoder is written for.
extern "C" int headrace_has_decoder() { return HEADRACE_HAS_BF16; }
