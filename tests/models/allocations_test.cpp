// After two training steps, a further step allocates no large block: it reuses the memory that the step
// before has freed. Counted in the C library's functions, which libweft and the compiler's runtime call.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/build.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/gradients.hpp"

namespace {

constexpr std::size_t kLarge = 4096;
std::atomic<bool> counting{false};
std::atomic<long> small_ones{0}, large_ones{0};
std::atomic<std::size_t> largest{0};

void note(std::size_t bytes) noexcept {
  if (!counting.load(std::memory_order_relaxed)) return;
  (bytes > kLarge ? large_ones : small_ones).fetch_add(1, std::memory_order_relaxed);
  if (bytes > largest.load(std::memory_order_relaxed)) largest.store(bytes, std::memory_order_relaxed);
}

}  // namespace

// The libraries use the program's definitions, too.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t n) noexcept {
  note(n);
  return __libc_malloc(n);
}
void* calloc(std::size_t n, std::size_t size) noexcept {
  note(n * size);
  return __libc_calloc(n, size);
}
void* realloc(void* p, std::size_t n) noexcept {
  note(n);
  return __libc_realloc(p, n);
}
void* aligned_alloc(std::size_t alignment, std::size_t n) noexcept {
  note(n);
  return __libc_memalign(alignment, n);
}
int posix_memalign(void** p, std::size_t alignment, std::size_t n) noexcept {
  note(n);
  *p = __libc_memalign(alignment, n);
  return *p == nullptr ? ENOMEM : 0;
}
void* mmap(void* at, std::size_t n, int protection, int flags, int file, off_t offset) noexcept {
  note(n);
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, n, protection, flags, file, offset));
}
}

namespace weft {
namespace {

TEST(Allocations, AreCounted) {
  counting = true;
  const std::vector<char> large(10000);
  counting = false;
  EXPECT_EQ(large_ones.exchange(0), 1);
  EXPECT_EQ(largest.exchange(0), 10000u);
}

TransformerConfig config() {
  TransformerConfig c;
  c.dim = 64, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 128, c.vocab = 96, c.max_seq = 32;
  return c;
}

// Forward, loss, backward, averaging, sync, clipping and AdamW over dp 2 x tp 2, and on one rank. Ranks are
// processes: threads share one cache, and how much of it is in use at once changes with their timing.
void expect_quiet_steps(const MeshShape& shape) {
  test::run_ranks(test::Ranks::processes, shape.size(), [&](test::Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), shape);
    const ParallelModel parts = build_parallel_model(config(), mesh, compute);
    AdamW optimizer(compute, parts.parameters(), {});
    CrossEntropy loss;
    const std::int64_t rows = 4, sequence = 32;
    Tensor tokens(rank.context, {rows / parts.data.size(), sequence}, DType::i64);
    for (std::int64_t& t : tokens.as<std::int64_t>()) t = (&t - tokens.as<std::int64_t>().data()) % 96;
    const Tensor x = parts.place(tokens, rows);
    for (std::int64_t step = 0; step < 5; ++step) {
      if (step == 2) counting = true;
      Frame frame(compute, {.seed = 1, .step = step});
      const Tensors logits = parts.model->forward(x, frame);
      const Tensors l = loss.forward({logits[0], x, scalar(parts.mesh, rows * sequence)}, frame);
      parts.model->backward(loss.backward({}, frame), frame);
      parts.reducer->finish();
      if (parts.tensor.size() > 1) sync_replicated_gradients(optimizer.parameters(), parts.tensor);
      clip_grad_norm(optimizer.parameters(), 1);
      optimizer.step(1e-3);
      optimizer.zero_gradients();
      full(l[0]);
    }
    counting = false;
    if (rank.rank == 0)
      std::printf("%s: %ld small allocations per rank and step\n", to_string(shape).c_str(), small_ones / 3);
    EXPECT_EQ(large_ones, 0) << "the largest has " << largest << " bytes";
  });
}

TEST(Allocations, AStepOnOneRankAllocatesNothingLarge) { expect_quiet_steps({{"dp", 1}, {"tp", 1}}); }
TEST(Allocations, AStepOnFourRanksAllocatesNothingLarge) { expect_quiet_steps({{"dp", 2}, {"tp", 2}}); }

}  // namespace
}  // namespace weft
