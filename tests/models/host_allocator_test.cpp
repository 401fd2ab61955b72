// A model is trained in memory of the program's allocator: the numbers are the same, and all memory is given
// back, even if the allocator fails at any point.
#include "weft/host/allocator.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "support/counting_allocator.hpp"
#include "support/run_ranks.hpp"
#include "weft/models/trainer.hpp"

namespace weft::host_allocator_test {
namespace {

using test::CountingAllocator;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kVocab = 32, kSequence = 8;

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 16, c.layers = 2, c.heads = 4, c.kv_heads = 2, c.ffn_hidden = 24, c.vocab = kVocab, c.max_seq = 8;
  c.init_std = 0.1;
  return c;
}

// Two steps with one row on each data rank; the losses.
std::vector<double> train(Context& context, ProcessGroup& group, const MeshShape& shape) {
  std::vector<std::int64_t> tokens, labels;
  for (std::int64_t i = 0; i < kSequence; ++i) {
    tokens.push_back(i * i % kVocab);
    labels.push_back((i + 1) * (i + 1) % kVocab);
  }
  const TokenBatch batch{tokens.data(), labels.data(), 1, kSequence, 0};
  Compute compute(context, 2);
  const DeviceMesh mesh(group, shape);
  ParallelModel model = build_parallel_model(small(), mesh, compute, {.seed = 3});
  Trainer trainer(model, compute, {});
  std::vector<double> losses;
  for (int step = 0; step < 2; ++step) losses.push_back(trainer.step({&batch, 1}, 0.01).loss);
  return losses;
}

TEST(HostAllocator, CarriesATrainingRun) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 2}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 1}}}) {
    std::vector<double> plain;
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      const std::vector<double> losses = train(rank.context, rank.group(), shape);
      if (rank.rank == 0) plain = losses;
    });
    CountingAllocator memory;
    test::RankOptions options;
    options.context.allocator = memory.functions();
    test::run_ranks(
        Ranks::threads, shape.size(),
        [&](Rank& rank) { EXPECT_EQ(train(rank.context, rank.group(), shape), plain) << to_string(shape); },
        options);
    EXPECT_GT(memory.asked(), 100) << "weights, optimizer states, activations";
    EXPECT_EQ(memory.blocks(), 0u) << to_string(shape);
  }
}

// Wherever memory runs out, the error says so, and all allocated memory is given back.
TEST(HostAllocator, GetsEverythingBackWhereverItEnds) {
  const MeshShape shape{{"dp", 1}, {"tp", 1}};
  bool whole = false;
  std::int64_t granted = 0;
  int failures = 0;
  for (; !whole; granted += 1 + granted / 8) {
    ASSERT_LT(granted, 100000) << "two steps need so many blocks";
    CountingAllocator memory;
    {
      ContextOptions options;
      options.allocator = memory.functions();
      Context context(options);
      ProcessGroup group = ProcessGroup::create(context, "shm", {});
      memory.fail_after(granted, granted % 2 == 0 ? CountingAllocator::Fault::gives_none
                                                  : CountingAllocator::Fault::throws);
      try {
        train(context, group, shape);
        whole = true;
      } catch (const Error& e) {
        ++failures;
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(e.what(), testing::HasSubstr(
                                  "bytes of local memory cannot be allocated: the host's allocator, asked "
                                  "for "));
      }
      EXPECT_EQ(memory.blocks(), 0u) << "after " << granted << " blocks";
    }
    EXPECT_EQ(memory.blocks(), 0u);
  }
  EXPECT_GT(failures, 20);
}

}  // namespace
}  // namespace weft::host_allocator_test
