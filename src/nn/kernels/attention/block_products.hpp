// The products of attention on any CPU: those of products.hpp, or strided_matmul() on plain floats. Private
// to the files in this folder.
#pragma once

#include <algorithm>

#include "nn/kernels/attention/products.hpp"
#include "nn/kernels/cpu_context.hpp"

namespace weft::kernels::cpu {

/// A thread's memory, handed out in parts that begin at a cache line. The object is made twice: without
/// memory it only counts.
class Parts {
 public:
  explicit Parts(float* memory = nullptr) : memory_(memory) {}
  float* next(std::int64_t floats) {
    float* const at = memory_ == nullptr ? nullptr : memory_ + size_;
    size_ += blocks::padded(floats);
    return at;
  }
  std::int64_t size() const { return size_; }

 private:
  float* memory_;
  std::int64_t size_ = 0;
};

/// Lays out and multiplies as products.hpp documents. For use by threads of one parallel_for.
class BlockProducts {
 public:
  /// Computes in bf16 if `bf16` is set and the CPU can do so. Products have up to n columns and up to this k.
  BlockProducts(KernelContext::State& state, bool bf16, std::int64_t n, std::int64_t k);

  /// How many units k floats form; and whether units are floats, so that a matrix in memory has the layout of
  /// along_rows and down_columns.
  std::int64_t units(std::int64_t k) const { return kernel_.units(k); }
  bool plain() const { return kernel_.steps == 1; }

  void along_rows(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
                  std::int64_t ld) const {
    kernel_.along_rows(from, stride, rows, columns, to, ld);
  }
  void down_columns(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                    float* to, std::int64_t ld) const {
    kernel_.down_columns(from, stride, rows, columns, to, ld);
  }
  void transposed(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
                  std::int64_t ld) const {
    kernel_.transposed(from, stride, rows, columns, to, ld);
  }
  void multiply(int thread, const blocks::Product& p) const;

 private:
  KernelContext::State& state_;
  blocks::Kernel kernel_;
};

}  // namespace weft::kernels::cpu
