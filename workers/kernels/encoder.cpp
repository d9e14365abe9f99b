// A BERT-like encoder on the CPU: one call runs a batch of texts through all layers, without padding.
//
// Legend: N texts, T tokens of all of them, D hidden size, I inner size, A heads, H head size, V vocabulary, P positions, M rows of a block.
//
// A thread takes some whole texts, a block, through all layers, while their rows stay in its cache; threads never wait for each other. The
// residual stream, norms, softmax and activation are float32; what goes into a product is int16 with a scale for each row's group, and
// in attention for each head of a text.

#include "processor.h"

#if HEADRACE_HAS_VNNI

#include <omp.h>

#include <vector>

#include "bidirectional.h"
#include "products.h"
#include "rows.h"
#include "scratch.h"

using namespace headrace;

extern "C" {

struct HeadraceEncoderLayer {
  Weight qkv, out, up, down;                               // int16
  const float *attention_norm, *attention_norm_bias;       // [D]
  const float *mlp_norm, *mlp_norm_bias;                   // [D]
};

struct HeadraceEncoder {
  const HeadraceEncoderLayer* layers;
  const float* words;             // [V, D]
  const float* positions;         // [P, D], what is added to all tokens included
  const float *norm, *norm_bias;  // [D]
  const float* activation;        // [kGeluTerms]
  int32_t num_layers, hidden_size, inner_size, num_heads, head_size;
  float eps;
};

struct HeadraceTexts {
  const int32_t* token_ids;  // [T]
  const int32_t* positions;  // [T]
  const int64_t* ends;       // [N], row behind each text
  int32_t num_texts;
};

}  // extern "C"

namespace {

constexpr int kBlockRows = 128;  // about: a text is never divided
constexpr int kInnerRows = 48;   // of the MLP between its two products

// Whole texts that go through all layers together.
struct Block {
  int32_t first_text, end_text;
};

// Scratch memory of a thread for blocks of at most so many rows, and texts of at most so many tokens.
struct Scratch : Cuts {
  Scratch(const HeadraceEncoder& model, int64_t num_rows, int64_t longest, void* piece) : Cuts(piece) {
    const int64_t hidden = model.hidden_size, inner = model.inner_size, pairs = (longest + 1) / 2;
    cut(&words, num_rows * hidden);
    cut(&scales, num_rows * num_groups(hidden, Format::int16));
    cut(&heads, num_rows * 3 * hidden);
    cut(&attended, num_rows * hidden);
    cut(&inner_rows, kInnerRows * inner);
    cut(&inner_words, kInnerRows * inner);
    cut(&inner_scales, kInnerRows * num_groups(inner, Format::int16));
    cut(&desk.queries, kLanes * model.head_size);
    cut(&desk.keys, longest * model.head_size);
    cut(&desk.values, 2 * pairs * model.head_size);
    cut(&desk.scores, longest * kLanes);
  }

  int16_t *words, *inner_words;
  float *scales, *heads, *attended, *inner_rows, *inner_scales;
  AttentionDesk desk;
};

// Blocks of about equal numbers of rows, as many as keep all threads busy until the end. A text belongs to the block in whose share of the
// rows it begins.
std::vector<Block> plan_blocks(const HeadraceTexts& texts, int num_threads) {
  const int64_t num_rows = texts.num_texts ? texts.ends[texts.num_texts - 1] : 0;
  if (!num_rows) return {};
  const int64_t rounds = (num_rows + num_threads * kBlockRows - 1) / (num_threads * kBlockRows), wanted = rounds * num_threads;
  std::vector<Block> blocks;
  for (int64_t text = 0, begin = 0, last = -1; text < texts.num_texts; begin = texts.ends[text++]) {
    const int64_t share = begin * wanted / num_rows;
    if (share != last) blocks.push_back({static_cast<int32_t>(text), 0});
    blocks.back().end_text = text + 1;
    last = share;
  }
  return blocks;
}

int64_t most_rows(int64_t longest) { return kBlockRows + longest; }

// A thread's work on its blocks.
class Worker {
 public:
  Worker(const HeadraceEncoder& model, const HeadraceTexts& texts, Scratch scratch, float* out, Times& times)
      : model_(model), texts_(texts), scratch_(scratch), out_(out), times_(times), parts_(3 * model.hidden_size / kDims) {}

  void run(const Block& block) {
    block_ = block;
    first_row_ = begin(block.first_text);
    num_rows_ = texts_.ends[block.end_text - 1] - first_row_;
    residual_ = out_ + first_row_ * model_.hidden_size;
    for (size_t part = 0; part < parts_.size(); ++part) {
      const int64_t dim = part * kDims, head = dim / model_.head_size;
      parts_[part] = (head * num_rows_ * model_.head_size) + dim % model_.head_size;
    }
    Stopwatch watch;
    embed();
    watch.lap(&times_.rows);
    for (int index = 0; index < model_.num_layers; ++index) {
      const HeadraceEncoderLayer& layer = model_.layers[index];
      project(layer);
      watch.lap(&times_.products);
      attend();
      watch.lap(&times_.attention);
      for (int row = 0; row < num_rows_; ++row) take_words(row, scratch_.attended + row * size());
      watch.lap(&times_.rows);
      add_product({scratch_.words, scratch_.scales}, num_rows_, layer.out, residual_);
      watch.lap(&times_.products);
      normalise(layer.attention_norm, layer.attention_norm_bias);
      watch.lap(&times_.rows);
      for (int row = 0; row < num_rows_; row += kInnerRows) expand(layer, row, std::min<int>(kInnerRows, num_rows_ - row), watch);
      normalise(layer.mlp_norm, layer.mlp_norm_bias);
      watch.lap(&times_.rows);
    }
  }

 private:
  int64_t size() const { return model_.hidden_size; }
  int64_t begin(int text) const { return text ? texts_.ends[text - 1] : 0; }

  void embed() {
    for (int row = 0; row < num_rows_; ++row) {
      const int64_t token = first_row_ + row;
      const float* word = model_.words + texts_.token_ids[token] * size();
      const float* position = model_.positions + texts_.positions[token] * size();
      float* to = residual_ + row * size();
      for (int d = 0; d < size(); d += kLanes) store16(to + d, _mm512_add_ps(load16(word + d), load16(position + d)));
    }
    normalise(model_.norm, model_.norm_bias);
  }

  // The residual stream is normalised itself, and is what the next product takes.
  void normalise(const float* weight, const float* bias) {
    for (int row = 0; row < num_rows_; ++row) {
      layer_norm_row(residual_ + row * size(), weight, bias, size(), model_.eps);
      take_words(row, residual_ + row * size());
    }
  }

  void take_words(int row, const float* values) {
    to_words(values, size(), group_size(Format::int16), scratch_.words + row * size(),
             scratch_.scales + row * num_groups(size(), Format::int16));
  }

  // Queries, keys and values, head by head: [3 A, M, H], so that a head of a text lies together.
  void project(const HeadraceEncoderLayer& layer) {
    multiply_alone({scratch_.words, scratch_.scales}, num_rows_, layer.qkv, [&](int row, int panel, const float* values) {
      const size_t first = panel * kPanel / kDims, count = std::min<size_t>(kPanel / kDims, parts_.size() - first);
      for (size_t i = 0; i < count; ++i) {
        float* to = scratch_.heads + parts_[first + i] + row * model_.head_size;
        for (int h = 0; h < kDims; h += kLanes) store16(to + h, load16(values + i * kDims + h));
      }
    });
  }

  void attend() {
    const int64_t head_size = model_.head_size, part = num_rows_ * size();  // of all heads
    for (int text = block_.first_text; text < block_.end_text; ++text) {
      const int64_t row = begin(text) - first_row_;
      const int num_tokens = texts_.ends[text] - begin(text);
      for (int head = 0; head < model_.num_heads; ++head) {
        const float* from = scratch_.heads + (head * num_rows_ + row) * head_size;
        float* to = scratch_.attended + row * size() + head * head_size;
        attend_text({from, from + part, from + 2 * part, to, size(), num_tokens, model_.head_size}, scratch_.desk);
      }
    }
  }

  // The MLP of some rows.
  void expand(const HeadraceEncoderLayer& layer, int first, int num_rows, Stopwatch& watch) {
    const int64_t inner = model_.inner_size;
    const int groups = num_groups(size(), Format::int16), inner_groups = num_groups(inner, Format::int16);
    const Rows rows{scratch_.words + first * size(), scratch_.scales + first * groups};
    multiply_alone(rows, num_rows, layer.up, [&](int row, int panel, const float* values) {
      float* to = scratch_.inner_rows + row * inner + panel * kPanel;
      const int count = std::min<int>(kPanel, inner - panel * kPanel);
      for (int i = 0; i < count; i += kLanes) store16(to + i, gelu16(load16(values + i), model_.activation));
    });
    watch.lap(&times_.products);
    for (int row = 0; row < num_rows; ++row)
      to_words(scratch_.inner_rows + row * inner, inner, group_size(Format::int16), scratch_.inner_words + row * inner,
               scratch_.inner_scales + row * inner_groups);
    watch.lap(&times_.rows);
    add_product({scratch_.inner_words, scratch_.inner_scales}, num_rows, layer.down, residual_ + first * size());
    watch.lap(&times_.products);
  }

  void add_product(const Rows& rows, int num_rows, const Weight& weight, float* residual) {
    multiply_alone(rows, num_rows, weight, [&](int row, int panel, const float* values) {
      float* to = residual + row * size() + panel * kPanel;
      const int count = std::min<int>(kPanel, size() - panel * kPanel);
      for (int d = 0; d < count; d += kLanes) store16(to + d, _mm512_add_ps(load16(to + d), load16(values + d)));
    });
  }

  const HeadraceEncoder& model_;
  const HeadraceTexts& texts_;
  const Scratch scratch_;
  float* out_;
  Times& times_;
  Block block_{};
  float* residual_ = nullptr;  // of the block, [M, D]
  int64_t first_row_ = 0;
  int64_t num_rows_ = 0;
  std::vector<int64_t> parts_;  // where 32 outputs of the first row's QKV projection lie in `heads`
};

int64_t longest_text(const HeadraceTexts& texts) {
  int64_t longest = 0;
  for (int64_t text = 0, begin = 0; text < texts.num_texts; begin = texts.ends[text++]) longest = std::max(longest, texts.ends[text] - begin);
  return longest;
}

}  // namespace

extern "C" {

// Bytes of scratch memory for any batch in which no text has more than so many tokens.
int64_t headrace_encoder_scratch_bytes(const HeadraceEncoder* model, int64_t longest) {
  return Scratch(*model, most_rows(longest), longest, nullptr).size * omp_get_max_threads();
}

// The last layer's output [T, D] of each token.
void headrace_encoder_run(const HeadraceEncoder* model, const HeadraceTexts* texts, void* scratch, float* out, Times* times) {
  const int64_t longest = longest_text(*texts), bytes = Scratch(*model, most_rows(longest), longest, nullptr).size;
  const std::vector<Block> blocks = plan_blocks(*texts, omp_get_max_threads());
#pragma omp parallel
  {
    void* piece = static_cast<char*>(scratch) + omp_get_thread_num() * bytes;
    Worker worker(*model, *texts, Scratch(*model, most_rows(longest), longest, piece), out, *times);
#pragma omp for schedule(dynamic, 1)
    for (size_t block = 0; block < blocks.size(); ++block) worker.run(blocks[block]);
  }
}

}  // extern "C"

#endif

// Whether this processor has what the encoder is written for.
extern "C" int headrace_has_encoder() { return HEADRACE_HAS_VNNI; }
