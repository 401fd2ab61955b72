#include "host/strided/runs.hpp"

#include <array>
#include <cstring>
#include <utility>

#include "host/clones.hpp"

namespace weft {
namespace {

// Copies one run. If its length is no power of two, it is copied in two or more blocks whose length is a
// power of two; the last block ends at the end of the run and overlaps the block before it. All blocks are
// read before the first block is written, so the processor need not check whether source and target are the
// same memory.
template <std::size_t kBlock, std::size_t kBlocks>
struct Blocks {
  std::array<std::array<std::byte, kBlock>, kBlocks> bytes;
  void read(const std::byte* in, std::int64_t run) noexcept {
    for (std::size_t b = 0; b + 1 < kBlocks; ++b) std::memcpy(bytes[b].data(), in + b * kBlock, kBlock);
    std::memcpy(bytes[kBlocks - 1].data(), in + run - kBlock, kBlock);
  }
  void write(std::byte* out, std::int64_t run) const noexcept {
    for (std::size_t b = 0; b + 1 < kBlocks; ++b) std::memcpy(out + b * kBlock, bytes[b].data(), kBlock);
    std::memcpy(out + run - kBlock, bytes[kBlocks - 1].data(), kBlock);
  }
};

// `run` must be from kBlock * (kBlocks - 1) + 1 to kBlock * kBlocks bytes.
template <std::size_t kBlock, std::size_t kBlocks>
void copy_blocks(const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run) {
  // As many runs at a time as fit the processor's 16 vector registers.
  constexpr std::int64_t kAtOnce = kBlocks <= 2 ? 4 : kBlocks <= 4 ? 2 : 1;
  std::int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    std::array<Blocks<kBlock, kBlocks>, kAtOnce> blocks;
    for (auto& b : blocks) {
      b.read(in, run);
      in += in_step;
    }
    for (const auto& b : blocks) {
      b.write(out, run);
      out += out_step;
    }
  }
  for (; i < count; ++i, in += in_step, out += out_step) {
    Blocks<kBlock, kBlocks> block;
    block.read(in, run);
    block.write(out, run);
  }
}

// Copies runs of more than kMostVectors vectors, one cache line at a time, in order; the last line ends at
// the end of the run and overlaps the line before it. On Zen 5 glibc's memcpy takes a third longer for a run
// of 1 KiB, and nearly twice as long to read data that another chiplet has written.
WEFT_CPU_CLONES(void, copy_long,
                (const std::byte* in, std::byte* out, std::int64_t count, std::int64_t in_step,
                 std::int64_t out_step, std::int64_t run),
                (in, out, count, in_step, out_step, run)) {
  using Line = long long __attribute__((vector_size(64), aligned(1), may_alias));
  constexpr std::int64_t kLine = sizeof(Line);
  constexpr std::int64_t kLongest = 8 << 10;  // beyond this length memcpy is faster
  if (run >= kLongest) {
    for (std::int64_t i = 0; i < count; ++i, in += in_step, out += out_step)
      std::memcpy(out, in, static_cast<std::size_t>(run));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i, in += in_step, out += out_step) {
    const Line last = *reinterpret_cast<const Line*>(in + run - kLine);
    for (std::int64_t b = 0; b < run - kLine; b += kLine)
      *reinterpret_cast<Line*>(out + b) = *reinterpret_cast<const Line*>(in + b);
    *reinterpret_cast<Line*>(out + run - kLine) = last;
  }
}

constexpr std::size_t kVector = 16;
constexpr std::size_t kMostVectors = 7;  // beyond this number memcpy is as fast

template <std::size_t... kLess>
constexpr std::array<CopyRuns, sizeof...(kLess)> vectors(std::index_sequence<kLess...>) {
  return {copy_blocks<kVector, kLess + 1>...};
}
constexpr auto kVectors = vectors(std::make_index_sequence<kMostVectors>{});

}  // namespace

CopyRuns copy_runs_of(std::int64_t run) noexcept {
  const auto bytes = static_cast<std::size_t>(run);
  if (bytes > kVector * kMostVectors) return WEFT_CLONE_OF(copy_long);
  if (bytes >= kVector) return kVectors[(bytes + kVector - 1) / kVector - 1];
  if (bytes > 8) return copy_blocks<8, 2>;
  if (bytes == 8) return copy_blocks<8, 1>;
  if (bytes > 4) return copy_blocks<4, 2>;
  if (bytes == 4) return copy_blocks<4, 1>;
  if (bytes > 2) return copy_blocks<2, 2>;
  if (bytes == 2) return copy_blocks<2, 1>;
  return copy_blocks<1, 1>;
}

}  // namespace weft
