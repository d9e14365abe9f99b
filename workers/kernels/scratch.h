// Scratch memory and clocks of the kernels that run whole models.

#pragma once

#include <omp.h>

#include <chrono>
#include <cstdint>

namespace headrace {

// Cuts arrays from one piece of memory. Without a piece it only counts.
class Cuts {
 public:
  explicit Cuts(void* piece) : base_(static_cast<char*>(piece)) {}

  template <typename T>
  void cut(T** part, int64_t count) {
    *part = base_ ? reinterpret_cast<T*>(base_ + size) : nullptr;
    size += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }

  int64_t size = 0;

 private:
  char* base_;
};

// Seconds of the first thread, by kind of work.
struct Times {
  double products, attention, rows;
};

class Stopwatch {
 public:
  void lap(double* seconds) {
    const auto now = Clock::now();
    if (omp_get_thread_num() == 0) *seconds += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace headrace
