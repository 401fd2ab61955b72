// The state of a KernelContext of the CPU. Private to cpu_*.cpp and to tests.
#pragma once

#include <dnnl.hpp>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "nn/kernels/bf16/packed_weights.hpp"
#include "nn/kernels/gemm/gemm.hpp"
#include "nn/kernels/scratch.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels {

/// The library of matrix products: oneDNN, or the functions of gemm/gemm.hpp.
enum class Products : unsigned char { onednn, own };

/// The sizes for which the matrix library prepares a bf16 product.
struct ProductKey {
  std::int64_t m, n, k, lda, ldb, ldc;
  bool a_transposed, b_transposed, accumulate, bias;
  bool b_packed;  // then its stride does not matter
  auto operator<=>(const ProductKey&) const = default;
};

/// A prepared bf16 product: the library's code and the descriptions of its operands.
struct PreparedProduct {
  dnnl::matmul product;
  dnnl::memory::desc a, b, c, bias, scratch;
  bool usable = true;          // false: the library would pack b another way
  std::uint64_t last_use = 0;  // by State::prepared_uses
};
/// This many prepared products are kept; a new one replaces the one that was not used for longest.
inline constexpr std::size_t kMostPrepared = 256;

struct KernelContext::State {
  /// `context` may be null; otherwise it must outlive this object.
  State(int thread_count, Context* context);

  /// Scratch memory for the whole call; valid until the next request. Its contents are undefined.
  float* scratch(std::int64_t floats);
  double* scratch_f64(std::int64_t doubles);
  /// Scratch memory of one of the threads of a parallel_for. Call reserve_per_thread before it.
  void reserve_per_thread(std::int64_t floats);
  float* thread_scratch(int thread) { return per_thread[static_cast<std::size_t>(thread)].floats(); }

  /// Like reserve_per_thread(), for products of `own` that a thread computes, of up to n columns and up to
  /// this k.
  void reserve_products(std::int64_t n, std::int64_t k);
  float* product_scratch(int thread) { return per_product[static_cast<std::size_t>(thread)].floats(); }

  int threads;
  Context* context;
  const gemm::Kernel* own;  // the best that this CPU has, or null; tests choose another
  Products f32, bf16;       // what is best here; tests choose the other
  dnnl::engine engine;
  dnnl::stream stream;
  std::map<ProductKey, PreparedProduct> prepared;
  std::uint64_t prepared_uses = 0;
  PackedWeights packed;
  Scratch shared, shared_f64;
  std::vector<Scratch> per_thread, per_product;
};

}  // namespace weft::kernels
