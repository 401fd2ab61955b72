#include "weft/dp/sampler.hpp"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <numeric>
#include <utility>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"

namespace weft {
namespace {

constexpr int kRounds = 6;               // of the network; four give a permutation that looks random
constexpr std::int64_t kDrawnMost = 64;  // samples whose order is drawn

}  // namespace

Sampler::Sampler(const DeviceMesh& axis, std::int64_t population, std::int64_t global_batch,
                 std::uint64_t seed)
    : Sampler(given_mesh("sampler", axis, "axis").size(), given_mesh("sampler", axis, "axis").rank(),
              population, global_batch, seed) {
  part_ = {0, global_batch};  // in the order of Shard: several axes one after the other
  for (const DeviceMesh& each : axis.each_axis()) {
    const Chunk inside = chunk_of(part_.size, each.size(), each.rank());
    part_ = {part_.offset + inside.offset, inside.size};
  }
}

Sampler::Sampler(int parts, int index, std::int64_t population, std::int64_t global_batch, std::uint64_t seed)
    : population_(population), global_batch_(global_batch), seed_(seed) {
  for (const auto& [name, size] : {std::pair{"population", population}, {"global batch", global_batch}})
    if (size < 1)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("sampler: the {} is {}; expected at least 1", name, size));
  if (parts < 1) throw Error(ErrorCode::bad_argument, fmt::format("sampler: part {} of {}", index, parts));
  if (index < 0 || index >= parts)
    throw Error(ErrorCode::bad_argument,
                fmt::format("sampler: part {} of {}; expected 0 to {}", index, parts, parts - 1));
  if (global_batch < parts)
    throw Error(ErrorCode::bad_argument,
                fmt::format("sampler: a global batch of {} leaves some of {} data ranks without a sample",
                            global_batch, parts));
  part_ = chunk_of(global_batch, parts, index);
  const auto bits = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(population - 1)));
  half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
}

std::vector<std::int64_t> Sampler::global_batch(std::int64_t step) const {
  return batch(step, {0, global_batch_});
}
std::vector<std::int64_t> Sampler::local_batch(std::int64_t step) const { return batch(step, part_); }

std::vector<std::int64_t> Sampler::batch(std::int64_t step, Chunk of) const {
  if (step < 0)
    throw Error(ErrorCode::bad_argument, fmt::format("sampler: step {}; expected 0 or more", step));
  std::int64_t begin = 0, end = 0;  // of the global batch, so that all ranks throw
  if (__builtin_mul_overflow(step, global_batch_, &begin) ||
      __builtin_add_overflow(begin, global_batch_, &end))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("sampler: step {} of {} samples each is beyond sample 2^63", step, global_batch_));
  std::vector<std::int64_t> samples, order;
  std::int64_t round = -1;  // whose order it is
  for (std::int64_t i = 0; i < of.size; ++i) {
    const std::int64_t position = begin + of.offset + i;
    if (population_ > kDrawnMost) {
      samples.push_back(sample(position));
      continue;
    }
    if (position / population_ != round) {
      round = position / population_;
      order = shuffled(static_cast<std::uint64_t>(round));
    }
    samples.push_back(order[static_cast<std::size_t>(position % population_)]);
  }
  return samples;
}

// All samples in the order of a round. Each place, from the last to the first, gets a sample that is not yet
// placed.
std::vector<std::int64_t> Sampler::shuffled(std::uint64_t round) const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(population_));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t left = order.size(); left > 1; --left) {
    const auto random = philox({static_cast<std::uint32_t>(left), kRounds, static_cast<std::uint32_t>(round),
                                static_cast<std::uint32_t>(round >> 32)},
                               {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
    // A number below `left`, made of 64 random bits. One number is more likely than another by 2^-54.
    const std::uint64_t high = std::uint64_t{random[0]} * left, low = std::uint64_t{random[1]} * left;
    std::swap(order[(high + (low >> 32)) >> 32], order[left - 1]);
  }
  return order;
}

// The walk is an endless sequence of rounds, each a permutation of all samples. Position p is number p mod
// population of round p / population. The network splits a number into two halves. Round by round, it adds a
// function of the right half to the left half and swaps them. This is a permutation of all numbers of 2 ·
// half_bits bits, whatever the function. A result outside the population goes through the network again until
// it lies inside. Since the network permutes, the result is again a permutation. A network is an even
// permutation, and its restriction to a population of 4^k is even, too. For such a population the first two
// numbers change places in every second round, at random.
std::int64_t Sampler::sample(std::int64_t position) const {
  const auto round_of_walk = static_cast<std::uint64_t>(position / population_);
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  const std::array<std::uint32_t, 2> key{static_cast<std::uint32_t>(seed_),
                                         static_cast<std::uint32_t>(seed_ >> 32)};
  const auto drawn = [&](std::uint64_t of, std::uint32_t round) {
    return philox({static_cast<std::uint32_t>(of), round, static_cast<std::uint32_t>(round_of_walk),
                   static_cast<std::uint32_t>(round_of_walk >> 32)},
                  key)[0];
  };
  auto number = static_cast<std::uint64_t>(position % population_);
  if (number < 2 && static_cast<std::uint64_t>(population_) == std::uint64_t{1} << 2 * half_bits_)
    number ^= drawn(0, kRounds) & 1;
  do {
    std::uint64_t left = number >> half_bits_, right = number & mask;
    for (std::uint32_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = (left ^ drawn(right, round)) & mask;
      left = right;
      right = mixed;
    }
    number = left << half_bits_ | right;
  } while (number >= static_cast<std::uint64_t>(population_));
  return static_cast<std::int64_t>(number);
}

}  // namespace weft
