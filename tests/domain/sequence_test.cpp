// Attention over a sequence that is cut over ranks, causal and full, against one rank; also with heads that
// are cut on another axis.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain_sequence_test {
namespace {

using test::difference;
using test::random_map;
using test::Rank;

// The tolerances of gradients of weights, which are sums over ranks. With bf16 weights, products sum up to
// 1024 positions one after the other, in f32: a few ulps of the sum.
constexpr double kWeights = 1e-6, kBf16Weights = 4e-6;

std::unique_ptr<Module> causal(DType dtype) {
  auto model = std::make_unique<Sequential>();
  model->append("norm", std::make_unique<RMSNorm>(24));
  model->append("attention", std::make_unique<Attention>(
                                 AttentionConfig{.dim = 24, .heads = 4, .kv_heads = 2, .head_dim = 6},
                                 RopeTables::make(1200, 6, 10000.0)));
  for (Parameter* p : model->parameters())
    if (p->path().ends_with("proj.weight")) p->set_dtype(dtype);
  return model;
}

void expect_gradients(const Module& got, const Module& want) {
  auto &a = const_cast<Module&>(got), &b = const_cast<Module&>(want);
  for (Parameter* p : a.parameters()) {
    if (p->path() == "k_proj.bias") continue;  // it adds a constant to each query's scores: 0 up to rounding
    EXPECT_LE(difference(p->gradient(), b.parameter(p->path())->gradient()),
              p->dtype() == DType::bf16 ? kBf16Weights : kWeights)
        << p->path();
  }
}

void expect_same_bits(const char* what, const Tensor& got, const Tensor& whole) {
  const Tensor want = distribute(whole, got.layout());
  EXPECT_TRUE(test::same_bits(got, want)) << what << " differs by " << difference(got, want);
}

// Even and uneven parts, one position on each rank, ranks without any, and sequences of several pieces. None
// is a multiple of a block of keys.
void expect_causal(DType dtype) {
  for (const int n : {1, 2, 3, 4})
    test::run_ranks(test::Ranks::threads, n, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      for (const std::int64_t length : {12, 17, 33, 4, 2, 300, 1151}) {
        SCOPED_TRACE(testing::Message() << length << " positions on " << n);
        const auto make = [&] { return causal(dtype); };
        const test::Serial serial = test::run_serial(make, {2, length, 24}, compute);
        const std::unique_ptr<Module> model = make();
        const DomainManager manager = apply_domain_parallel(*model, mesh, {.dims = {1}});
        replicate(*model, mesh);
        test::set_up(*model, compute);
        for (int pass = 0; pass < 2; ++pass) {  // the second one has its plans
          for (Parameter* p : model->parameters()) p->zero_gradient();
          const Tensor x = distribute(serial.x, manager.layout(serial.x.shape()));
          Frame frame(compute);
          const Tensor y = model->forward(x, frame)[0];
          ASSERT_EQ(y.layout(), x.layout());
          expect_same_bits("y", y, serial.y);
          const Tensor dx = model->backward(distribute(serial.dy, y.layout()), frame)[0];
          expect_same_bits("dx", dx, serial.dx);
          ASSERT_TRUE(frame.empty());
          if (pass > 0) continue;
          sync_domain_gradients(*model, manager);
          expect_gradients(*model, *serial.model);
        }
      }
    });
}

TEST(DomainSequence, CausalAttentionHasTheBitsOfOneRank) { expect_causal(DType::f32); }
TEST(DomainSequence, SoItHasWithBf16Weights) { expect_causal(DType::bf16); }

// Layers of the widths that models have: their projections are products of many features, which are made in
// pieces.
TEST(DomainSequence, WideAttentionHasTheBitsOfOneRank) {
  struct {
    std::int64_t heads, kv_heads, head_dim, length;
  } const cases[] = {{8, 2, 32, 1100}, {12, 12, 64, 300}, {16, 4, 64, 7}};
  for (const int n : {2, 3})
    test::run_ranks(test::Ranks::threads, n, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      for (const auto& c : cases)
        for (const DType dtype : {DType::f32, DType::bf16}) {
          SCOPED_TRACE(testing::Message() << c.heads << " heads of " << c.head_dim << ", " << c.length
                                          << " positions of " << name(dtype) << " on " << n);
          const std::int64_t dim = c.heads * c.head_dim;
          const auto make = [&] {
            auto attention = std::make_unique<Attention>(
                AttentionConfig{.dim = dim, .heads = c.heads, .kv_heads = c.kv_heads, .head_dim = c.head_dim},
                RopeTables::make(c.length, c.head_dim, 10000.0));
            for (Parameter* p : attention->parameters()) p->set_dtype(dtype);
            return attention;
          };
          const test::Serial serial = test::run_serial(make, {1, c.length, dim}, compute);
          const std::unique_ptr<Module> model = make();
          const DomainManager manager = apply_domain_parallel(*model, mesh, {.dims = {1}});
          replicate(*model, mesh);
          test::set_up(*model, compute);
          Frame frame(compute);
          const Tensor y = model->forward(distribute(serial.x, manager.layout(serial.x.shape())), frame)[0];
          expect_same_bits("y", y, serial.y);
          expect_same_bits("dx", model->backward(distribute(serial.dy, y.layout()), frame)[0], serial.dx);
          sync_domain_gradients(*model, manager);
          if (dtype == DType::f32) expect_gradients(*model, *serial.model);
        }
    });
}

TEST(DomainSequence, FullAttentionHasTheBitsOfOneRank) {
  for (const int n : {2, 3, 4})
    test::run_ranks(test::Ranks::threads, n, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      for (const DType dtype : {DType::f32, DType::bf16})
        for (const auto& [queries, keys] :
             {std::pair{8, 8}, {13, 7}, {5, 2}, {2, 5}, {0, 4}, {4, 0}, {600, 300}, {70, 1151}}) {
          SCOPED_TRACE(testing::Message() << queries << " queries, " << keys << " keys on " << n);
          const CrossAttentionConfig config{
              .dim = 12, .heads = 4, .head_dim = 6, .context_dim = 8, .kv_heads = 2, .bias = true};
          CrossAttention serial(config), split(config);
          for (CrossAttention* of : {&serial, &split})
            for (Linear* linear : {&of->q_proj, &of->k_proj, &of->v_proj, &of->o_proj})
              linear->weight->set_dtype(dtype);
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
          const Tensor y = split.forward({distribute(x, manager.layout(x.shape())),
                                          distribute(context, manager.layout(context.shape()))},
                                         frame)[0];
          expect_same_bits("y", y, want);
          const Tensors got_d = split.backward(distribute(dy, y.layout()), frame);
          expect_same_bits("dx", got_d[0], want_d[0]);
          expect_same_bits("d(context)", got_d[1], want_d[1]);
          sync_domain_gradients(split, manager);
          expect_gradients(split, serial);
        }
    });
}

// A mask (samples, rows, keys) that hides each third key, all keys of the first piece from some queries, and
// every key from query 4 of the last sample.
Tensor mask_of(Context& context, std::int64_t samples, std::int64_t rows, std::int64_t keys) {
  const Tensor mask = random_map(context, {samples, rows, keys}, "mask");
  for (std::int64_t b = 0; b < samples; ++b)
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t key = 0; key < keys; ++key)
        if ((key + b) % 3 == 1 || (row % 5 == 2 && key < 260) || (b == samples - 1 && row == 4))
          mask.f32()[static_cast<std::size_t>((b * rows + row) * keys + key)] =
              -std::numeric_limits<float>::infinity();
  return mask;
}

// The mask is cut like the queries, like the keys, or not at all. It is for each sample and query, or for
// all.
TEST(DomainSequence, AMaskHasTheBitsOfOneRank) {
  for (const int n : {1, 2, 3, 4})
    test::run_ranks(test::Ranks::threads, n, [&](Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), {{"sp", -1}});
      for (const auto& [queries, keys] :
           {std::pair{8, 8}, {13, 7}, {5, 2}, {2, 5}, {1, 6}, {0, 4}, {4, 0}, {300, 270}, {70, 1151}}) {
        const CrossAttentionConfig config{
            .dim = 12, .heads = 4, .head_dim = 6, .context_dim = 8, .kv_heads = 2, .bias = true};
        CrossAttention serial(config), split(config);
        test::set_up(serial, compute);
        const DomainManager manager = apply_domain_parallel(split, mesh, {.dims = {1}});
        replicate(split, mesh);
        test::set_up(split, compute);
        const Tensor x = random_map(rank.context, {2, queries, 12}, "x"),
                     context = random_map(rank.context, {2, keys, 8}, "context"),
                     dy = random_map(rank.context, {2, queries, 12}, "dy");
        for (const auto& [samples, rows] :
             {std::pair<std::int64_t, std::int64_t>{2, queries}, {1, queries}, {2, 1}, {1, 1}}) {
          for (CrossAttention* of : {&serial, &split})
            for (Parameter* p : of->parameters()) p->zero_gradient();
          const Tensor mask = mask_of(rank.context, samples, rows, keys);
          Frame frame(compute);
          const Tensor want = serial.forward({x, context, mask}, frame)[0];
          const Tensors want_d = serial.backward(dy, frame);
          const LayoutRef whole = replicated_layout(mesh, mask.shape());
          for (const Tensor& given :
               {mask, distribute(mask, whole), distribute(mask, whole->with("sp", Shard{1})),
                distribute(mask, whole->with("sp", Shard{2}))}) {
            SCOPED_TRACE(testing::Message()
                         << queries << " queries, " << keys << " keys on " << n << ", mask "
                         << (given.layout() ? to_string(*given.layout()) : "plain"));
            for (Parameter* p : split.parameters()) p->zero_gradient();
            const Tensor sharded = distribute(x, manager.layout(x.shape())),
                         of_context = distribute(context, manager.layout(context.shape()));
            const Tensor y = split.forward({sharded, of_context, given}, frame)[0];
            expect_same_bits("y", y, want);
            const Tensors got_d = split.backward(distribute(dy, y.layout()), frame);
            ASSERT_EQ(got_d.size(), 2u);
            expect_same_bits("dx", got_d[0], want_d[0]);
            expect_same_bits("d(context)", got_d[1], want_d[1]);
            sync_domain_gradients(split, manager);
            expect_gradients(split, serial);
            Frame looks = Frame::inference(compute);
            expect_same_bits("y", split.forward({sharded, of_context, given}, looks)[0], want);
          }
        }
      }
    });
}

// The sequence and the samples are cut along separate axes. A mask is cut along both.
TEST(DomainSequence, AMaskOfSamplesThatAreCut) {
  test::run_ranks(test::Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"sp", 2}});
    const CrossAttentionConfig config{.dim = 8, .heads = 2, .head_dim = 4};
    CrossAttention serial(config), split(config);
    test::set_up(serial, compute);
    apply_domain_parallel(split, mesh["sp"], {.dims = {1}});
    replicate(split, mesh);
    test::set_up(split, compute);
    const auto cut = [&](const Tensor& t, const Placement& sequence, bool samples) {
      const LayoutRef layout = replicated_layout(mesh, t.shape())->with("sp", sequence);
      return distribute(t, samples ? layout->with("d", Shard{0}) : layout);
    };
    const Tensor x = random_map(rank.context, {3, 7, 8}, "x"),
                 context = random_map(rank.context, {3, 9, 8}, "context"),
                 dy = random_map(rank.context, {3, 7, 8}, "dy");
    for (const std::int64_t samples : {1, 3}) {
      const Tensor mask = mask_of(rank.context, samples, 7, 9);
      Frame frame(compute);
      const Tensor want = serial.forward({x, context, mask}, frame)[0];
      const Tensors want_d = serial.backward(dy, frame);
      for (const Placement& of : {Placement(Replicate{}), Placement(Shard{1}), Placement(Shard{2})}) {
        const Tensor y = split.forward(
            {cut(x, Shard{1}, true), cut(context, Shard{1}, true), cut(mask, of, samples == 3)}, frame)[0];
        expect_same_bits("y", y, want);
        const Tensors got = split.backward(distribute(dy, y.layout()), frame);
        expect_same_bits("dx", got[0], want_d[0]);
        expect_same_bits("d(context)", got[1], want_d[1]);
      }
    }
  });
}

TEST(DomainSequence, AMaskThatDoesNotFitIsNamed) {
  test::run_ranks(test::Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"sp", 2}});
    CrossAttention split({.dim = 8, .heads = 2, .head_dim = 4});
    apply_domain_parallel(split, mesh["sp"], {.dims = {1}});
    replicate(split, mesh);
    test::set_up(split, compute);
    const LayoutRef of_x = replicated_layout(mesh, {2, 8, 8})->with("sp", Shard{1})->with("d", Shard{0});
    const Tensor x = distribute(random_map(rank.context, {2, 8, 8}, "x"), of_x),
                 context =
                     distribute(random_map(rank.context, {2, 6, 8}, "context"), of_x->with_global({2, 6, 8}));
    Frame frame(compute);
    const auto text = [&](const Tensor& mask) {
      return test::error_text([&] { split.forward({x, context, mask}, frame); });
    };
    const auto with = [&](const Shape& shape, const Placement& d, const Placement& sp) {
      return distribute(Tensor::zeros(rank.context, shape),
                        replicated_layout(mesh, shape)->with("d", d)->with("sp", sp));
    };
    for (const Shape& shape : {Shape{2, 8, 7}, Shape{3, 8, 6}, Shape{2, 2, 6}, Shape{2, 8}})
      EXPECT_EQ(
          text(Tensor::zeros(rank.context, shape)),
          fmt::format(
              "bad_argument: \"\": mask is {}; expected (2 or 1, 8 or 1, 6), of batch, queries and keys",
              to_string(shape)));
    EXPECT_EQ(text(Tensor::zeros(rank.context, {2, 8, 6})),
              "layout: \"\": mask is (2, 8, 6) as [d: Replicate, sp: Replicate]; expected its samples cut as "
              "those of x, (2, 8, 8) as "
              "[d: Shard(0), sp: Shard(1)]");
    const std::string one_of =
        "; expected (1, 8, 6) as [d: Replicate, sp: Shard(1)], its queries cut as those of x; or (1, 8, 6) "
        "as [d: "
        "Replicate, sp: Shard(2)], its keys cut as those of the context; or (1, 8, 6) as [d: Replicate, sp: "
        "Replicate]";
    EXPECT_EQ(text(with({1, 8, 6}, Shard{1}, Replicate{})),
              "layout: \"\": mask is (1, 8, 6) as [d: Shard(1), sp: Replicate]" + one_of);
    EXPECT_EQ(text(with({1, 8, 6}, Replicate{}, Partial{})),
              "layout: \"\": mask is (1, 8, 6) as [d: Replicate, sp: Partial(sum)]" + one_of);
    EXPECT_EQ(text(Tensor::zeros(rank.context, {1, 8, 6}, DType::bf16)),
              "bad_argument: \"\": mask is bf16; expected f32");
    EXPECT_TRUE(frame.empty());
  });
}

TEST(DomainSequence, ContextCutAlongAnotherAxisIsNamed) {
  test::run_ranks(test::Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"a", 2}, {"b", 2}});
    CrossAttention split({.dim = 8, .heads = 2, .head_dim = 4});
    apply_domain_parallel(split, mesh["a"], {.dims = {1}});
    replicate(split, mesh);
    test::set_up(split, compute);
    const Tensor x = random_map(rank.context, {1, 8, 8}, "x");
    Frame frame(compute);
    EXPECT_EQ(test::error_text([&] {
                split.forward({distribute(x, replicated_layout(mesh, x.shape())->with(mesh["a"], Shard{1})),
                               distribute(x, replicated_layout(mesh, x.shape())->with(mesh["b"], Shard{1}))},
                              frame);
              }),
              "layout: \"\": context is cut along b, x along a; expected the same axes");
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
    // x and the context have as many samples, but this rank has other samples of x than of the context.
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
    const std::unique_ptr<Module> model = causal(DType::f32);
    const DomainManager manager = apply_domain_parallel(*model, mesh, {.dims = {1}});
    replicate(*model, mesh);
    test::set_up(*model, compute);
    Frame frame = Frame::inference(compute);
    EXPECT_EQ(test::error_text([&] {
                model->forward(shard_spatial(Tensor::zeros(rank.context, {1, 1202, 24}), manager), frame);
              }),
              "bad_argument: \"attention\": sequence 1202 of head_dim 6; the rotary tables are for 1200 "
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
