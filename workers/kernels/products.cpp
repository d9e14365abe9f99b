// Packing of weights for products.h.

#include "processor.h"

#if HEADRACE_HAS_VNNI

#include <vector>

#include "products.h"
#include "rows.h"

using namespace headrace;

namespace {

// The inputs of a panel's output n to their places, a run after the other.
template <typename T>
void place(const T* inputs, int64_t num_inputs, int n, T* panel) {
  constexpr int kRun = 4 / sizeof(T);
  for (int64_t run = 0; run < num_inputs / kRun; ++run) std::memcpy(panel + (run * kPanel + n) * kRun, inputs + run * kRun, 4);
}

// The unit in which a weight of an output is told in int16.
float word_scale(const float* inputs, int64_t num_inputs) {
  float scale = 0;
  for (int64_t begin = 0; begin < num_inputs; begin += group_size(Format::int16)) {
    double squares = 0;
    for (int64_t k = begin; k < std::min(num_inputs, begin + group_size(Format::int16)); ++k) {
      squares += static_cast<double>(inputs[k]) * inputs[k];
      scale = std::max(scale, std::abs(inputs[k]) / kLargestWord);
    }
    scale = std::max(scale, static_cast<float>(std::sqrt(squares)) / kWeightsNorm);
  }
  return scale;
}

}  // namespace

extern "C" {

// Each packs outputs rows[n] of a weight [*, K]; rows[n] below 0 are zeros.
void headrace_pack_bfloat16(const bf16* weight, const int64_t* rows, int64_t num_outputs, int64_t num_inputs, bf16* packed) {
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_outputs / kPanel; ++panel) {
    const std::vector<bf16> zeros(num_inputs);
    for (int n = 0; n < kPanel; ++n) {
      const int64_t row = rows[panel * kPanel + n];
      place(row < 0 ? zeros.data() : weight + row * num_inputs, num_inputs, n, packed + panel * kPanel * num_inputs);
    }
  }
}

void headrace_pack_int8(const bf16* weight, const int64_t* rows, int64_t num_outputs, int64_t num_inputs, int8_t* packed, float* scale,
                        int32_t* correction) {
  constexpr int64_t kGroup = group_size(Format::int8);
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_outputs / kPanel; ++panel) {
    std::vector<int8_t> bytes(num_inputs);
    for (int n = 0; n < kPanel; ++n) {
      const int64_t output = panel * kPanel + n, row = rows[output];
      float largest = 0;
      for (int64_t k = 0; row >= 0 && k < num_inputs; ++k) largest = std::max(largest, std::abs(widen(weight[row * num_inputs + k])));
      scale[output] = largest / 127.0f;
      const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
      for (int64_t group = 0; group < num_groups(num_inputs, Format::int8); ++group) {
        int32_t sum = 0;
        for (int64_t k = group * kGroup; k < std::min(num_inputs, (group + 1) * kGroup); ++k) {
          bytes[k] = row < 0 ? 0 : static_cast<int8_t>(std::nearbyint(widen(weight[row * num_inputs + k]) * inverse));
          sum += bytes[k];
        }
        correction[group * num_outputs + output] = -128 * sum;
      }
      place(bytes.data(), num_inputs, n, packed + panel * kPanel * num_inputs);
    }
  }
}

void headrace_pack_int16(const float* weight, const int64_t* rows, int64_t num_outputs, int64_t num_inputs, int16_t* packed, float* scale) {
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < num_outputs / kPanel; ++panel) {
    std::vector<int16_t> words(num_inputs);
    for (int n = 0; n < kPanel; ++n) {
      const int64_t output = panel * kPanel + n, row = rows[output];
      const float* inputs = weight + std::max<int64_t>(row, 0) * num_inputs;
      scale[output] = row < 0 ? 0 : word_scale(inputs, num_inputs);
      for (int64_t k = 0; k < num_inputs; ++k)
        words[k] = scale[output] > 0 ? static_cast<int16_t>(std::nearbyint(inputs[k] / scale[output])) : 0;
      place(words.data(), num_inputs, n, packed + panel * kPanel * num_inputs);
    }
  }
}

// Inputs of an int8 group, which share a scale.
int32_t headrace_group_size() { return group_size(Format::int8); }

}  // extern "C"

#endif
