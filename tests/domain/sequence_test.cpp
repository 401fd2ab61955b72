// Attention over a sequence that is cut over ranks, causal and full, against one rank; also with heads that are cut on another axis.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain_sequence_test {
namespace {

using test::difference;
using test::random_map;
using test::Rank;

constexpr double kTolerance = 3e-6;

std::unique_ptr<Module> causal() {
  auto model = std::make_unique<Sequential>();
  model->append("norm", std::make_unique<RMSNorm>(24));
  model->append("attention", std::make_unique<Attention>(
                                 AttentionConfig{.dim = 24, .heads = 4, .kv_heads = 2, .head_dim = 6},
                                 RopeTables::make(64, 6, 10000.0)));
  return model;
}

void expect_gradients(const Module& got, const Module& want) {
  auto &a = const_cast<Module&>(got), &b = const_cast<Module&>(want);
  for (Parameter* p : a.parameters()) {
    if (p->path() == "k_proj.bias")
      continue;  // it adds a constant to each query's scores: 0 but for rounding
    EXPECT_LE(difference(p->gradient(), b.parameter(p->path())->gradient()), kTolerance) << p->path();
  }
}

// Even and uneven parts, and one position on each rank.
TEST(DomainSequence, CausalAttentionInARing) {
  for (const int n : {1, 2, 3, 4})
    test::run_ranks(test::Ranks::threads, n, [](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      for (const std::int64_t length : {12, 17, 33, 4}) {
        SCOPED_TRACE(length);
        const test::Serial serial = test::run_serial(causal, {2, length, 24}, compute);
        const std::unique_ptr<Module> model = causal();
        const DomainManager manager = apply_domain_parallel(*model, mesh, {.dims = {1}});
        replicate(*model, mesh);
        test::set_up(*model, compute);
        const Tensor x = shard_spatial(serial.x, manager);
        Frame frame(compute);
        const Tensor y = model->forward(x, frame)[0];
        ASSERT_EQ(y.layout(), x.layout());
        EXPECT_LE(difference(y, distribute(serial.y, y.layout())), kTolerance);
        const Tensor dx = model->backward(distribute(serial.dy, y.layout()), frame)[0];
        EXPECT_LE(difference(dx, distribute(serial.dx, dx.layout())), kTolerance);
        ASSERT_TRUE(frame.empty());
        sync_domain_gradients(*model, manager);
        expect_gradients(*model, *serial.model);
      }
    });
}

TEST(DomainSequence, FullAttentionInARing) {
  for (const int n : {2, 3, 4})
    test::run_ranks(test::Ranks::threads, n, [](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      const CrossAttentionConfig config{.dim = 12, .heads = 2, .head_dim = 6, .context_dim = 8, .bias = true};
      for (const auto& [queries, keys] : {std::pair{8, 8}, {13, 7}, {5, 2}}) {
        SCOPED_TRACE(testing::Message() << queries << " queries, " << keys << " keys");
        CrossAttention serial(config), split(config);
        test::set_up(serial, compute);
        const Tensor x = random_map(rank.context, {2, queries, 12}, "x"),
                     context = random_map(rank.context, {2, keys, 8}, "context"),
                     dy = random_map(rank.context, {2, queries, 12}, "dy");
        Frame frame(compute);
        const Tensor want = serial.forward({x, context}, frame)[0];
        const Tensors want_d = serial.backward(dy, frame);
        const DomainManager manager = apply_domain_parallel(split, mesh, {.dims = {1}});
        replicate(split, mesh);
        test::set_up(split, compute);
        const Tensor y = split.forward(
            {distribute(x, manager.layout(x.shape())), distribute(context, manager.layout(context.shape()))},
            frame)[0];
        EXPECT_LE(difference(y, distribute(want, y.layout())), kTolerance);
        const Tensors got_d = split.backward(distribute(dy, y.layout()), frame);
        for (std::size_t i = 0; i < 2; ++i)
          EXPECT_LE(difference(got_d[i], distribute(want_d[i], got_d[i].layout())), kTolerance) << i;
        sync_domain_gradients(split, manager);
        expect_gradients(split, serial);
      }
    });
}

TEST(DomainSequence, ContextOfAnotherBatchIsRefusedAsOnOneRank) {
  test::run_ranks(test::Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"sp", 2}});
    const CrossAttentionConfig config{.dim = 8, .heads = 2, .head_dim = 4};
    CrossAttention serial(config), split(config);
    test::set_up(serial, compute);
    const DomainManager manager = apply_domain_parallel(split, mesh["sp"], {.dims = {1}});
    replicate(split, mesh);
    test::set_up(split, compute);
    const Tensor x = random_map(rank.context, {2, 8, 8}, "x");
    Frame frame(compute);
    for (const std::int64_t batch : {1, 3}) {
      const Tensor context = random_map(rank.context, {batch, 6, 8}, "context");
      const std::string expected =
          fmt::format("bad_argument: \"\": context is ({}, 6, 8); expected a batch of 2, as x has", batch);
      EXPECT_EQ(test::error_text([&] { serial.forward({x, context}, frame); }), expected);
      EXPECT_EQ(test::error_text([&] {
                  split.forward({shard_spatial(x, manager), shard_spatial(context, manager)}, frame);
                }),
                expected);
    }
    // As many samples, of which a rank has others of x than of the context.
    const LayoutRef by_samples = manager.layout(x.shape())->with(mesh["d"], Shard{0});
    const Tensor context = random_map(rank.context, {2, 6, 8}, "context");
    EXPECT_EQ(test::error_text([&] {
                split.forward({distribute(x, by_samples), shard_spatial(context, manager)}, frame);
              }),
              "layout: \"\": context is (2, 6, 8) as [d: Replicate, sp: Shard(1)]; expected its samples cut "
              "as those "
              "of x, (2, 8, 8) as [d: Shard(0), sp: Shard(1)]");
  });
}

TEST(DomainSequence, TablesOfTooFewPositionsAreNamed) {
  test::run_ranks(test::Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"sp", 2}});
    const std::unique_ptr<Module> model = causal();
    const DomainManager manager = apply_domain_parallel(*model, mesh, {.dims = {1}});
    replicate(*model, mesh);
    test::set_up(*model, compute);
    Frame frame = Frame::inference(compute);
    EXPECT_EQ(test::error_text([&] {
                model->forward(shard_spatial(Tensor::zeros(rank.context, {1, 66, 24}), manager), frame);
              }),
              "bad_argument: \"attention\": sequence 66 of head_dim 6; the rotary tables are for 64 "
              "positions and head_dim 6");
    EXPECT_EQ(test::error_text([&] {
                model->get("attention")
                    .forward(shard_spatial(Tensor::zeros(rank.context, {1, 6, 20}), manager), frame);
              }),
              "bad_argument: \"attention\": x is (1, 3, 20); expected (batch, sequence, 24)");
  });
}

}  // namespace
}  // namespace weft::domain_sequence_test
