// Models in float8: the choice of layers, one rank and meshes, and what a training run sees of it.
#include "weft/train/float8.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "support/calls_made.hpp"
#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/train/activation_checkpointing.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradients.hpp"
#include "weft/train/loss_scaler.hpp"

namespace weft::float8_model_test {
namespace {

using test::error_text;
using test::random_tensor;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Float8Recipe kRecipes[] = {Float8Recipe::tensorwise, Float8Recipe::rowwise,
                                     Float8Recipe::rowwise_gw_hp};

// embed, layers.0 … (norm, up, act, down), head
std::unique_ptr<Sequential> float8_net(int layers = 2) {
  auto net = std::make_unique<Sequential>();
  const Init init = Normal{.std = 0.3};
  net->append("embed", std::make_unique<Linear>(16, 32, true, init));
  auto blocks = std::make_unique<Sequential>();
  for (int i = 0; i < layers; ++i) {
    auto block = std::make_unique<Sequential>();
    block->append("norm", std::make_unique<RMSNorm>(32));
    block->append("up", std::make_unique<Linear>(32, 48, true, init));
    block->append("act", std::make_unique<GELU>());
    block->append("down", std::make_unique<Linear>(48, 32, true, init));
    blocks->append(std::move(block));
  }
  net->append("layers", std::move(blocks));
  net->append("head", std::make_unique<Linear>(32, 16, true, init));
  return net;
}

Plan plan_of_net() { return {{"layers.*.up", Style::column}, {"layers.*.down", Style::row}}; }

std::vector<std::string> paths_of(const Float8Model& model) {
  std::vector<std::string> paths;
  for (const Linear* layer : model.linears()->layers()) paths.push_back(layer->path());
  return paths;
}

TEST(ApplyFloat8, ReportsWhatItDid) {
  const auto net = float8_net(1);
  net->append("odd", std::make_unique<Linear>(16, 24));
  {
    const auto model = apply_float8(*net, Float8Recipe::rowwise);
    EXPECT_THAT(paths_of(*model), ElementsAre("embed", "layers.0.up", "layers.0.down"));
    EXPECT_EQ(model->report().converted(), 3);
    EXPECT_EQ(model->report().text(),
              "float8 rowwise: 3 of 5 linear layers\n"
              "  \"head\" (16, 32) stays: \"head\" is left out unless `only` names the layer\n"
              "  \"odd\" (24, 16) stays: its sizes are not multiples of 16");
  }
  EXPECT_EQ(net->get("embed").passes(), nullptr);  // the model is as before
}

TEST(ApplyFloat8, Filters) {
  const auto net = float8_net();
  const auto converted = [&](const Float8Filter& filter) {
    return paths_of(*apply_float8(*net, Float8Recipe::tensorwise, {.filter = filter}));
  };
  EXPECT_THAT(converted({.only = {"layers.1"}}), ElementsAre("layers.1.up", "layers.1.down"));
  EXPECT_THAT(converted({.only = {"layers.*.up", "head"}}),
              ElementsAre("layers.0.up", "layers.1.up", "head"));
  EXPECT_THAT(converted({.except = {"layers.0", "embed"}}), ElementsAre("layers.1.up", "layers.1.down"));
  EXPECT_THAT(converted({.except = {"layers"}, .left_out = {}}), ElementsAre("embed", "head"));
  EXPECT_THAT(converted({.least_elements = 1000}),
              ElementsAre("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"));
  // A pattern for modules above a layer that is left out by name does not ask for that layer.
  const auto parent = std::make_unique<Sequential>();
  auto moe = std::make_unique<Sequential>();
  moe->append("router", std::make_unique<Linear>(16, 16));
  moe->append("gate", std::make_unique<Linear>(16, 16));
  parent->append("moe", std::move(moe));
  EXPECT_THAT(paths_of(*apply_float8(*parent, Float8Recipe::tensorwise, {.filter = {.only = {"moe"}}})),
              ElementsAre("moe.gate"));
  EXPECT_THAT(
      paths_of(*apply_float8(*parent, Float8Recipe::tensorwise, {.filter = {.only = {"moe", "moe.router"}}})),
      ElementsAre("moe.router", "moe.gate"));
}

TEST(ApplyFloat8, WhatIsRefused) {
  const auto net = float8_net(1);
  const auto text = [&](const Float8Filter& filter) {
    return error_text(ErrorCode::bad_argument,
                      [&] { apply_float8(*net, Float8Recipe::rowwise, {.filter = filter}); });
  };
  EXPECT_EQ(text({.only = {"layers.*.q_proj"}}),
            "apply_float8: filter.only: \"layers.*.q_proj\" matches no module");
  EXPECT_EQ(text({.except = {"blocks"}}), "apply_float8: filter.except: \"blocks\" matches no module");
  EXPECT_EQ(text({.only = {"layers.0.norm"}}),
            "apply_float8: float8 rowwise: 0 of 4 linear layers\n"
            "  \"embed\" (32, 16) stays: no pattern of `only` matches it\n"
            "  \"layers.0.up\" (48, 32) stays: no pattern of `only` matches it\n"
            "  \"layers.0.down\" (32, 48) stays: no pattern of `only` matches it\n"
            "  \"head\" (16, 32) stays: no pattern of `only` matches it\n"
            "float8: nothing to convert; expected at least one linear layer; the reason of 4 of 4: no "
            "pattern of `only` "
            "matches it");
  EXPECT_THAT(text({.only = {"layers", "head"}, .least_elements = 1537}),
              ::testing::EndsWith(
                  "\nfloat8: nothing to convert; expected at least one linear layer; the reason of 2 of 4: "
                  "it has 1536 elements; least_elements is 1537"));
  const auto model = apply_float8(*net, Float8Recipe::rowwise);
  EXPECT_THAT(text({.only = {"embed"}}), HasSubstr("\"embed\" (32, 16) stays: has other passes already"));
}

// The ranks compare what they were given, where the layouts say which ranks there are.
TEST(ApplyFloat8, RanksMustHaveTheSameOptions) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const bool other = rank.rank == 1;
    const auto text = [&](ErrorCode code, Float8Recipe recipe, const Float8Options& options) {
      const auto net = float8_net();
      replicate(*net, mesh);
      const std::string told = error_text(code, [&] { apply_float8(*net, recipe, options); });
      EXPECT_EQ(net->get("embed").passes(), nullptr);  // nothing has changed
      return told;
    };
    EXPECT_EQ(text(ErrorCode::mismatch, other ? Float8Recipe::tensorwise : Float8Recipe::rowwise, {}),
              "apply_float8: the recipe is rowwise on dp rank 0, but tensorwise on dp rank 1");
    EXPECT_EQ(text(ErrorCode::mismatch, Float8Recipe::rowwise,
                   {.scales = other ? Float8Scales::whole : Float8Scales::own}),
              "apply_float8: options.scales is own on dp rank 0, but whole on dp rank 1");
    std::vector<std::string> left_out;
    if (other) left_out = {"head"};
    EXPECT_EQ(text(ErrorCode::mismatch, Float8Recipe::rowwise, {.filter = {.left_out = left_out}}),
              "apply_float8: options.filter.left_out is empty on dp rank 0, but \"head\" on dp rank 1");
    // All ranks get the mistake of one rank.
    std::vector<std::string> except;
    if (other) except = {"blocks"};
    EXPECT_EQ(text(ErrorCode::bad_argument, Float8Recipe::rowwise, {.filter = {.except = except}}),
              other ? "apply_float8: filter.except: \"blocks\" matches no module"
                    : "apply_float8: dp rank 1 failed: apply_float8: filter.except: \"blocks\" matches no "
                      "module");
  });
}

// --- scales of cut weights ---

void expect_equal(const Float8Linears& got, const Float8Linears& expected) {
  ASSERT_EQ(got.layers().size(), expected.layers().size());
  for (std::size_t i = 0; i < got.layers().size(); ++i) {
    EXPECT_EQ(got.scales(i).rows, expected.scales(i).rows) << got.layers()[i]->path();
    EXPECT_EQ(got.scales(i).columns, expected.scales(i).columns) << got.layers()[i]->path();
    EXPECT_EQ(got.scales(i).tensor, expected.scales(i).tensor) << got.layers()[i]->path();
  }
}

// This rank's part of the codes of each weight: the bytes that the codes of the model on one rank have there.
void expect_equal_codes(Float8Linears& got, Float8Linears& expected) {
  using Use = Float8Linears::WeightUse;
  for (std::size_t i = 0; i < got.layers().size(); ++i)
    for (const Use use : {Use::forward, Use::backward}) {
      const Tensor own = got.weight_codes(i, use), whole = expected.weight_codes(i, use);
      const Tensor part = own.layout() != nullptr ? distribute(whole, own.layout()) : whole;
      const auto bytes = [](const Tensor& t) {
        const auto* const data = reinterpret_cast<const std::uint8_t*>(t.view().data);
        return std::vector<std::uint8_t>(data, data + t.count());
      };
      EXPECT_EQ(bytes(own), bytes(part)) << got.layers()[i]->path();
    }
}

// The scales of a model over a mesh are those of the model on one rank, after one all-reduce for all weights.
void expect_scales_of_one_rank(Rank& rank, const MeshShape& shape, Float8Recipe recipe, DType dtype) {
  SCOPED_TRACE(to_string(shape) + " " + std::string(name(recipe)));
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  const auto serial = float8_net(), net = float8_net();
  for (Sequential* n : {serial.get(), net.get()})
    for (Parameter* p : n->parameters()) p->set_dtype(dtype);
  const Float8Options all{.filter = {.left_out = {}}};
  parallelize(*net, mesh["tp"], plan_of_net());
  replicate(*net, mesh);
  const auto one = apply_float8(*serial, recipe, all), model = apply_float8(*net, recipe, all);
  const auto sharded = fully_shard(*net, mesh["dp"], {.blocks = {"layers.*"}, .precision = {.param = dtype}});
  for (Sequential* n : {serial.get(), net.get()}) {
    materialise(*n, compute);
    initialise(*n, 9);
  }
  one->update_scales();
  model->update_scales();
  expect_equal(*model->linears(), *one->linears());
  expect_equal_codes(*model->linears(), *one->linears());

  const DeviceMesh cut = mesh.size() == 1         ? mesh
                         : mesh["dp"].size() == 1 ? mesh["tp"]
                         : mesh["tp"].size() == 1 ? mesh["dp"]
                                                  : mesh[{"dp", "tp"}];
  const std::size_t before = test::calls_made(cut.group());
  model->update_scales();  // nothing changed
  EXPECT_EQ(test::calls_made(cut.group()), before);
  for (Sequential* n : {serial.get(), net.get()})
    for (Parameter* p : n->parameters())
      for (float& w : p->write_master().f32()) w = w * 3 + 0.25F;
  one->update_scales();
  model->update_scales();
  EXPECT_EQ(test::calls_made(cut.group()), before + (mesh.size() == 1 ? 0 : 1));
  expect_equal(*model->linears(), *one->linears());
}

TEST(Float8Scales, OfCutWeightsAreThoseOfTheWhole) {
  const MeshShape shapes[] = {{{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 1}}, {{"dp", 3}, {"tp", 1}},
                              {{"dp", 4}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 1}, {"tp", 4}},
                              {{"dp", 3}, {"tp", 2}}};
  for (const MeshShape& shape : shapes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      for (const Float8Recipe recipe : kRecipes) expect_scales_of_one_rank(rank, shape, recipe, DType::f32);
      expect_scales_of_one_rank(rank, shape, Float8Recipe::rowwise, DType::bf16);
    });
}

// Two rows over three ranks: one of them has nothing. Segments: each rank has rows of every segment.
TEST(Float8Scales, OfEmptyShardsAndSegments) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"tp", 3}});
    for (const Float8Recipe recipe : kRecipes)
      for (const bool segmented : {false, true}) {
        Linear one(16, segmented ? 21 : 2, true, Normal{1}), cut(16, segmented ? 21 : 2, true, Normal{1});
        LayoutRef layout = make_layout(mesh, {{"tp", Shard{0}}}, cut.weight->global_shape());
        if (segmented) layout = layout->segmented(0, {9, 12});
        cut.weight->set_layout(layout);
        replicate(cut, mesh);
        for (Linear* l : {&one, &cut}) {
          materialise(*l, compute);
          initialise(*l, 4);
        }
        const auto of_one = std::make_shared<Float8Linears>(Float8LinearOptions{recipe}),
                   of_cut = std::make_shared<Float8Linears>(Float8LinearOptions{recipe});
        Float8Linears::convert(of_one, one);
        Float8Linears::convert(of_cut, cut);
        of_one->update_scales();
        of_cut->update_scales();
        expect_equal(*of_cut, *of_one);
        expect_equal_codes(*of_cut, *of_one);
        of_one->restore();
        of_cut->restore();
      }
  });
}

// --- passes over meshes ---

// With scales of the whole, all codes are those of one rank; only the order of sums differs.
void expect_as_serial(Rank& rank, const MeshShape& shape, Float8Recipe recipe, bool sequence) {
  SCOPED_TRACE(to_string(shape) + " " + std::string(name(recipe)) + (sequence ? " sequence" : ""));
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  const auto pair = [] {
    auto net = std::make_unique<Sequential>();
    net->append("up", std::make_unique<Linear>(32, 48, true, Normal{0.4}));
    net->append("down", std::make_unique<Linear>(48, 16, true, Normal{0.4}));
    return net;
  };
  const auto serial = pair(), parallel = pair();
  const Plan whole{{"up", Style::column}, {"down", Style::row}},
      cut{{"up", Style::column.on_sequence()}, {"down", Style::row.on_sequence()}};
  parallelize(*parallel, mesh["tp"], sequence ? cut : whole);
  replicate(*parallel, mesh);
  const Float8Options options{.scales = Float8Scales::whole};
  const auto one = apply_float8(*serial, recipe, options), model = apply_float8(*parallel, recipe, options);
  for (Module* m : {static_cast<Module*>(serial.get()), static_cast<Module*>(parallel.get())}) {
    materialise(*m, compute);
    initialise(*m, 3);
  }
  const auto part = [&](const Tensor& t) {
    LayoutRef layout = make_layout(mesh, {{"dp", Shard{0}}}, t.shape());
    if (sequence) layout = layout->with(mesh["tp"], Shard{1});
    return distribute(t, layout);
  };
  const Tensor x = random_tensor(rank.context, {4, 8, 32}, "x"),
               dy = random_tensor(rank.context, {4, 8, 16}, "dy");
  Frame plain(compute), frame(compute);
  // Column layers sum as one rank does, so that the row layer's x, and its codes, have the bits of one rank.
  test::expect_near(full(parallel->forward(part(x), frame)[0]), serial->forward(x, plain)[0], "y");
  test::expect_near(full(parallel->backward(part(dy), frame)[0]), serial->backward(dy, plain)[0], "dx");
  for (Parameter* p : serial->parameters())
    test::expect_near(full(parallel->parameter(p->path())->gradient()), p->gradient(), p->path());
}

TEST(Float8OverRanks, ScalesOfTheWholeGiveTheCodesOfOneRank) {
  const MeshShape shapes[] = {
      {{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}};
  for (const MeshShape& shape : shapes)
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      for (const Float8Recipe recipe : kRecipes)
        for (const bool sequence : {false, true}) expect_as_serial(rank, shape, recipe, sequence);
    });
}

// The codes themselves: y and dx of a token are sums over all features in one order, so that they have the
// bits of one rank if all codes and scales have; and the kept codes of x are this rank's part of those of one
// rank. Three samples over four ranks leave one rank without any.
TEST(Float8OverRanks, ScalesOfTheWholeGiveTheBitsOfOneRank) {
  for (const auto& [ranks, samples] : {std::pair(1, 3), {2, 3}, {3, 7}, {4, 3}, {4, 8}})
    test::run_ranks(Ranks::threads, ranks, [&, n = ranks, rows = samples](Rank& rank) {
      for (const Float8Recipe recipe : kRecipes) {
        SCOPED_TRACE(fmt::format("{} {} over {}", name(recipe), rows, n));
        Compute compute(rank.context);
        const DeviceMesh mesh(rank.group(), {{"dp", n}});
        const auto layer_of = [&](bool over_ranks) {
          auto net = std::make_unique<Sequential>();
          net->append("up", std::make_unique<Linear>(32, 48, true, Normal{0.4}));
          if (over_ranks) replicate(*net, mesh);
          return net;
        };
        const auto serial = layer_of(false), parallel = layer_of(true);
        const Float8Options options{.scales = Float8Scales::whole};
        const auto one = apply_float8(*serial, recipe, options),
                   all = apply_float8(*parallel, recipe, options);
        for (Sequential* net : {serial.get(), parallel.get()}) {
          materialise(*net, compute);
          initialise(*net, 3);
        }
        const Tensor x = random_tensor(rank.context, {rows, 5, 32}, "x"),
                     dy = random_tensor(rank.context, {rows, 5, 48}, "dy");
        const auto part = [&](const Tensor& t) {
          return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
        };
        const auto bytes = [](const Tensor& t) {
          const auto* const data = reinterpret_cast<const std::uint8_t*>(t.view().data);
          return std::vector<std::uint8_t>(data, data + t.bytes());
        };
        Frame plain(compute), frame(compute);
        EXPECT_EQ(bytes(parallel->forward(part(x), frame)[0]), bytes(part(serial->forward(x, plain)[0])));
        const Tensors kept = frame.pop(parallel->get("up")), kept_whole = plain.pop(serial->get("up"));
        EXPECT_EQ(bytes(kept[0]), bytes(part(kept_whole[0])));
        if (kept.size() > 2) {
          EXPECT_EQ(bytes(kept[2]), bytes(kept_whole[2]));
        }
        frame.push(parallel->get("up"), kept);
        plain.push(serial->get("up"), kept_whole);
        EXPECT_EQ(bytes(parallel->backward(part(dy), frame)[0]), bytes(part(serial->backward(dy, plain)[0])));
      }
    });
}

// A run on a regression, whose batch is cut over dp.
struct Float8Run {
  Float8Run(Rank& rank, const MeshShape& shape, std::optional<Float8Recipe> recipe, bool fsdp,
            DType dtype = DType::f32, const Float8Options& options = {}, bool as_codes = false,
            ReshardAfterForward reshard = true, const AcPolicy& ac = {})
      : compute(rank.context), mesh(rank.group(), shape), net(float8_net()) {
    for (Parameter* p : net->parameters()) p->set_dtype(dtype);
    parallelize(*net, mesh["tp"], plan_of_net());
    replicate(*net, mesh);
    if (recipe) float8 = apply_float8(*net, *recipe, options);
    apply_ac(*net, ac);
    FullyShardOptions sharding{
        .blocks = {"layers.*"}, .precision = {.param = dtype}, .reshard_after_forward = reshard};
    if (as_codes) sharding.float8 = float8->linears();
    if (fsdp) sharded = fully_shard(*net, mesh["dp"], sharding);
    materialise(*net, compute);
    initialise(*net, 7);
    optimizer.emplace(compute, net->parameters(), AdamW::Options{});
  }
  double step(std::int64_t number) {
    Frame frame(compute);
    Tensor whole(compute.context(), {12, 16});
    RandomStream(static_cast<std::uint64_t>(number) + 3, "x").normal(0, whole.count(), whole.f32().data());
    const Tensor x = distribute(whole, make_layout(mesh, {{"dp", Shard{0}}}, whole.shape()));
    const Tensor y = net->forward(x, frame)[0];
    Tensor dy(compute.context(), y.shape());
    double loss = 0;
    for (std::size_t i = 0; i < y.f32().size(); ++i) {
      const float d = y.f32()[i] - std::tanh(x.f32()[i] * 2);
      dy.f32()[i] = d / 12;
      loss += 0.5 * static_cast<double>(d) * static_cast<double>(d) / 12;
    }
    net->backward(dy.with_layout(y.layout()), frame);
    if (!sharded) reduce_gradients(net->parameters(), mesh["dp"]);
    sync_replicated_gradients(net->parameters(), mesh["tp"]);
    optimizer->step(0.01);
    optimizer->zero_gradients();
    if (mesh["dp"].size() > 1) mesh["dp"].group().all_reduce(loss).wait();
    return loss;
  }
  Compute compute;
  DeviceMesh mesh;
  std::unique_ptr<Sequential> net;
  std::unique_ptr<Float8Model> float8;
  std::unique_ptr<FullySharded> sharded;
  std::optional<AdamW> optimizer;
};

// The mean loss of the last steps is near that without float8, on each mesh, with and without sharding.
TEST(Float8OverRanks, TrainsAsWithoutFloat8) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const auto last_losses = [&](const MeshShape& shape, std::optional<Float8Recipe> recipe, bool fsdp) {
      Float8Run run(rank, shape, recipe, fsdp, DType::bf16);
      double sum = 0;
      for (int step = 0; step < 60; ++step)
        if (const double loss = run.step(step); step >= 40) sum += loss / 20;
      return sum;
    };
    const MeshShape dp{{"dp", 2}, {"tp", 1}}, tp{{"dp", 1}, {"tp", 2}};
    const double plain = last_losses(dp, {}, false);
    for (const Float8Recipe recipe : kRecipes)
      for (const auto& [shape, fsdp] : {std::pair(dp, true), std::pair(dp, false), std::pair(tp, false)})
        EXPECT_NEAR(last_losses(shape, recipe, fsdp), plain, 0.1 * plain)
            << name(recipe) << " " << to_string(shape) << " " << fsdp;
  });
}

// --- weights that are gathered as codes ---

std::vector<std::vector<float>> masters_of(const Module& module) {
  std::vector<std::vector<float>> all;
  for (const Parameter* p : const_cast<Module&>(module).parameters())
    all.emplace_back(p->master().f32().begin(), p->master().f32().end());
  return all;
}

// Runs its inner module again in backward, from the input, as activation checkpointing does.
class RunAgain : public Sequential {
  Tensors do_forward(Inputs x, Frame& frame) override {
    Frame scratch = Frame::inference(frame.compute());
    const Tensors y = Module::get("inner").forward(x, scratch);
    frame.push(*this, {x[0]});
    return y;
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    const Tensors x = frame.pop(*this);
    Frame again(frame.compute());
    Module::get("inner").forward(x, again);
    return Module::get("inner").backward(dy, again);
  }
};

TEST(Float8Gathers, OfCodesGiveTheSameBits) {
  const Float8Options all{.filter = {.left_out = {}}};
  for (const MeshShape& shape :
       {MeshShape{{"dp", 2}, {"tp", 1}}, MeshShape{{"dp", 3}, {"tp", 1}}, MeshShape{{"dp", 2}, {"tp", 2}}})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      for (const Float8Recipe recipe : kRecipes)
        for (const DType dtype : {DType::bf16, DType::f32})
          for (const ReshardAfterForward& reshard :
               {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(1)}) {
            Float8Run off(rank, shape, recipe, true, dtype, all, false, reshard),
                on(rank, shape, recipe, true, dtype, all, true, reshard);
            for (int step = 0; step < 50; ++step) ASSERT_EQ(on.step(step), off.step(step)) << step;
            EXPECT_EQ(masters_of(*on.net), masters_of(*off.net));
          }
    });
}

// Layers that run again have the scales and codes of their first run, whatever is gathered.
void expect_same_bits_with_checkpointing(Rank& rank, Float8Recipe recipe, DType dtype) {
  SCOPED_TRACE(std::string(name(recipe)) + " " + std::string(name(dtype)));
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  const Float8Options all{.filter = {.left_out = {}}};
  Float8Run plain(rank, shape, recipe, true, dtype, all);
  std::vector<double> losses;
  for (int step = 0; step < 50; ++step) losses.push_back(plain.step(step));
  for (const bool as_codes : {false, true})
    for (const char* modules : {"layers.*", "layers.*.up"}) {
      Float8Run again(rank, shape, recipe, true, dtype, all, as_codes, true,
                      {.mode = AcMode::full, .modules = {modules}});
      for (int step = 0; step < 50; ++step)
        ASSERT_EQ(again.step(step), losses[static_cast<std::size_t>(step)]) << modules << " " << step;
      EXPECT_EQ(masters_of(*again.net), masters_of(*plain.net)) << modules;
    }
}

TEST(Float8Gathers, WithActivationCheckpointingTheSameBits) {
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes)
      for (const DType dtype : {DType::bf16, DType::f32})
        expect_same_bits_with_checkpointing(rank, recipe, dtype);
  });
}

// With scales of the whole, an all-reduce finds each of them. A run that repeats a layer finds none again.
TEST(Float8Scales, OfALayerThatRunsAgainAreThoseOfItsFirstRun) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const auto calls_of_a_step = [&](const AcPolicy& ac) {
      Float8Run run(rank, {{"dp", 2}, {"tp", 1}}, Float8Recipe::tensorwise, false, DType::f32,
                    {.scales = Float8Scales::whole}, false, true, ac);
      run.step(0);  // compares layouts once
      const std::size_t before = test::calls_made(run.mesh.group());
      run.step(1);
      return test::calls_made(run.mesh.group()) - before;
    };
    const std::size_t calls = calls_of_a_step({});
    EXPECT_GE(calls, 10U);  // of x and of dy, in five layers
    EXPECT_EQ(calls_of_a_step({.mode = AcMode::full, .modules = {"layers.*"}}), calls);
  });
}

// Gradients of a block inside a module that runs it again in backward; `block`: that module, or the layer in
// it.
std::vector<float> gradient_of_rerun(Rank& rank, Float8Recipe recipe, const char* block, bool as_codes) {
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), {{"dp", 2}});
  Sequential net;
  auto again = std::make_unique<RunAgain>();
  again->append("inner", std::make_unique<Linear>(16, 32, true, Normal{0.3}));
  net.append("again", std::move(again));
  net.append("last", std::make_unique<Linear>(32, 16, true, Normal{0.3}));
  replicate(net, mesh);
  const auto model = apply_float8(net, recipe);
  FullyShardOptions sharding{.blocks = {block}};
  if (as_codes) sharding.float8 = model->linears();
  const auto sharded = fully_shard(net, mesh["dp"], sharding);
  materialise(net, compute);
  initialise(net, 4);
  const Tensor x = random_tensor(rank.context, {3, 16}, "x");
  const LayoutRef layout = make_layout(mesh, {{"dp", Shard{0}}}, {6, 16});
  Frame frame(compute);
  const Tensor y = net.forward(x.with_layout(layout), frame)[0];
  net.backward(y, frame);
  const Tensor gradient = full(net.parameter("again.inner.weight")->gradient());
  return {gradient.f32().begin(), gradient.f32().end()};
}

TEST(Float8Gathers, ABlockThatIsRunAgainHasTheCodesOfItsPass) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes) {
      const std::vector<float> expected = gradient_of_rerun(rank, recipe, "again", false);
      EXPECT_EQ(gradient_of_rerun(rank, recipe, "again.inner", true), expected) << name(recipe);
      // The layer is not a block by itself, so that its codes are those of the backward pass around it.
      if (recipe == Float8Recipe::tensorwise)
        EXPECT_EQ(gradient_of_rerun(rank, recipe, "again", true), expected);
      else
        EXPECT_EQ(error_text([&] { gradient_of_rerun(rank, recipe, "again", true); }),
                  "unsupported: float8: \"again.inner\": the codes of its weight were gathered for backward; "
                  "expected those for forward: a block that is run again in its backward pass must be run as "
                  "a block");
    }
  });
}

// The bytes that the all-gathers of a group have given, as its flight recorder has them.
std::int64_t gathered_bytes(const ProcessGroup& group) {
  const auto trace = nlohmann::json::parse(group.trace_json());
  std::int64_t bytes = 0;
  for (const auto& call : trace.at("calls"))
    if (call.at("op").get<std::string>().starts_with("all_gather"))
      bytes += call.at("count").get<std::int64_t>() *
               size_bytes(dtype_from_name(call.at("dtype").get<std::string>()));
  return bytes;
}

TEST(Float8Gathers, SendOneByteForEachElement) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    const Float8Options all{.filter = {.left_out = {}}};
    for (const Float8Recipe recipe : kRecipes) {
      Float8Run off(rank, shape, recipe, true, DType::bf16, all),
          on(rank, shape, recipe, true, DType::bf16, all, true);
      std::int64_t weights = 0, others = 0;  // elements; each rank receives half of them
      for (Parameter* p : on.net->parameters())
        (p->global_shape().rank() == 2 ? weights : others) += p->global_shape().count();
      EXPECT_EQ(off.sharded->gather_bytes(), weights + others);
      EXPECT_EQ(on.sharded->gather_bytes(), weights / 2 + others);
      EXPECT_LE(static_cast<double>(on.sharded->gather_bytes()),
                0.52 * static_cast<double>(off.sharded->gather_bytes()));
      const auto of_step = [](Float8Run& run) {
        const ProcessGroup& group = run.mesh["dp"].group();
        run.step(0);  // compares layouts and values once
        const std::int64_t before = gathered_bytes(group);
        run.step(1);
        return gathered_bytes(group) - before;
      };
      // The group receives twice what a rank does. A step gathers each block in forward and in backward; the
      // root is gathered twice only if backward needs other codes.
      const bool twice = recipe != Float8Recipe::tensorwise;
      const auto in_bf16 = static_cast<double>(twice ? 2 * 2 * off.sharded->gather_bytes() : of_step(off));
      EXPECT_LE(static_cast<double>(of_step(on)), 0.52 * in_bf16) << name(recipe);
    }
  });
}

// The Float8Model must live as long as codes are gathered.
TEST(Float8Gathers, WithoutTheFloat8ModelAreRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Float8Run run(rank, {{"dp", 2}, {"tp", 1}}, Float8Recipe::rowwise, true, DType::f32, {}, true);
    run.step(0);
    run.float8.reset();
    EXPECT_EQ(
        error_text([&] { run.step(1); }),
        "bad_argument: float8: the codes of a weight are requested, but its layer is no longer a float8 "
        "layer; expected the Float8Model to be destroyed after the FullySharded that gathers its codes");
  });
}

// A weight that another layer shares since the conversion is gathered as it is, with the same bits.
TEST(Float8Gathers, ATiedWeightIsGatheredAsItIs) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes) {
      const auto gradient = [&](bool as_codes) {
        Compute compute(rank.context);
        const DeviceMesh mesh(rank.group(), {{"dp", 2}});
        Sequential net;
        for (int i = 0; i < 3; ++i) net.append(std::make_unique<Linear>(32, 32, false, Normal{0.3}));
        replicate(net, mesh);
        const auto model = apply_float8(net, recipe, {.filter = {.except = {"1"}}});
        dynamic_cast<Linear&>(net.get("1")).tie_weight(dynamic_cast<Linear&>(net.get("0")).weight);
        FullyShardOptions sharding{.blocks = {"*"}};
        if (as_codes) sharding.float8 = model->linears();
        const auto sharded = fully_shard(net, mesh["dp"], sharding);
        materialise(net, compute);
        initialise(net, 4);
        const LayoutRef layout = make_layout(mesh, {{"dp", Shard{0}}}, {6, 32});
        const Tensor x = random_tensor(rank.context, {3, 32}, "x").with_layout(layout);
        Frame frame(compute);
        net.backward(net.forward(x, frame)[0], frame);
        const Tensor g = full(net.parameter("0.weight")->gradient());
        return std::vector<float>(g.f32().begin(), g.f32().end());
      };
      EXPECT_EQ(gradient(true), gradient(false)) << name(recipe);
    }
  });
}

// Both would gather no codes.
TEST(Float8Gathers, OfOtherModelsAndLateConversionsAreRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const auto net = float8_net(), other = float8_net();
    replicate(*net, mesh);
    replicate(*other, mesh);
    auto of_other = apply_float8(*other, Float8Recipe::rowwise);
    const std::shared_ptr<Float8Linears> linears = of_other->linears();
    const auto shard = [&] {
      return error_text([&] { fully_shard(*net, mesh, {.blocks = {"layers.*"}, .float8 = linears}); });
    };
    EXPECT_EQ(shard(),
              "bad_argument: fully_shard: options.float8: \"embed\" and its other layers are not of this "
              "model; expected Float8Model::linears() of the model that is sharded");
    of_other.reset();
    EXPECT_EQ(shard(),
              "bad_argument: fully_shard: options.float8 has no layers; expected a Float8Model that still "
              "exists");
    const auto sharded = fully_shard(*net, mesh, {.blocks = {"layers.*"}});
    EXPECT_EQ(error_text([&] { apply_float8(*net, Float8Recipe::rowwise); }),
              "bad_argument: apply_float8: the weight of \"embed\" was laid out by fully_shard already; "
              "expected apply_float8 before fully_shard, which may then gather codes");
    EXPECT_EQ(net->get("embed").passes(), nullptr);  // nothing has changed
  });
}

// A layer that is not converted refuses codes, whose scale it does not know.
TEST(Float8Gathers, OtherLayersRefuseCodes) {
  Context context;
  Compute compute(context);
  Linear layer(16, 16);
  materialise(layer, compute);
  initialise(layer, 1);
  layer.weight->place_weight(compute.zeros({16, 16}, DType::f8e4m3));
  Frame frame(compute);
  EXPECT_THAT(error_text([&] {
                layer.forward(compute.zeros({2, 16}), frame);
              }),
              HasSubstr("read as f32; expected f8e4m3"));
}

// --- values that are not finite ---

// Tensors of zeros, and a largest value that its scale brings just above the largest code: no error, and all
// results are finite.
TEST(Float8NotFinite, ZerosAndTheEdgeOfAScaleAreFinite) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes)
      for (const float edge : {0.0F, 0x1.c00002p-1F}) {
        Compute compute(rank.context);
        const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
        const auto net = float8_net();
        parallelize(*net, mesh["tp"], plan_of_net());
        replicate(*net, mesh);
        const auto model = apply_float8(*net, recipe);
        materialise(*net, compute);
        initialise(*net, 1);
        for (Linear* layer : model->linears()->layers())
          for (float& w : layer->weight->write_master().f32()) w = edge;
        Tensor x(rank.context, {2, 16}), dy(rank.context, {2, 16});
        for (const Tensor& t : {x, dy})
          for (float& value : t.f32()) value = edge;
        x = x.with_layout(make_layout(mesh, {{"dp", Shard{0}}}, {4, 16}));
        Frame frame(compute);
        const Tensor y = net->forward(x, frame)[0];
        const Tensor dx = net->backward(dy.with_layout(y.layout()), frame)[0];
        for (const Tensor& t : {y, dx})
          for (const float value : t.f32()) ASSERT_TRUE(std::isfinite(value)) << name(recipe) << " " << edge;
        for (Parameter* p : net->parameters())
          for (const float value : p->gradient().f32()) ASSERT_TRUE(std::isfinite(value)) << p->path();
      }
  });
}

TEST(Float8NotFinite, AllRanksNameTheTensor) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes) {
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      const auto net = float8_net();
      parallelize(*net, mesh["tp"], plan_of_net());
      replicate(*net, mesh);
      const auto model = apply_float8(*net, recipe);
      materialise(*net, compute);
      initialise(*net, 1);
      const Tensor x = distribute(random_tensor(rank.context, {4, 16}, "x"),
                                  make_layout(mesh, {{"dp", Shard{0}}}, {4, 16}));
      const Tensor good = x.clone(rank.context).with_layout(x.layout());
      if (mesh.coordinate("dp") == 1) x.f32()[3] = std::numeric_limits<float>::infinity();
      Frame frame(compute);
      EXPECT_EQ(error_text([&] { net->forward(x, frame); }),
                "bad_argument: float8: \"embed\": x has an element that is not finite");
      frame.clear();
      const Tensor y = net->forward(good, frame)[0];  // the model goes on
      const Tensor dy = random_tensor(rank.context, y.shape(), "dy").with_layout(y.layout());
      if (mesh.coordinate("dp") == 0) dy.f32()[0] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_EQ(error_text([&] { net->backward(dy, frame); }),
                "bad_argument: float8: \"layers.1.down\": dy has an element that is not finite");
      frame.clear();
      const ParameterRef up = net->parameter("layers.1.up.weight");
      if (mesh.coordinate("tp") == 1)
        up->write_master().f32()[2] = -std::numeric_limits<float>::infinity();
      else
        up->write_master();
      EXPECT_EQ(error_text([&] { net->forward(good, frame); }),
                "bad_argument: float8: the weight \"layers.1.up.weight\" has an element that is not finite");
    }
  });
}

// A weight that is not finite on one of the ranks that hold it, as after a fault of memory.
TEST(Float8NotFinite, AllRanksNameAWeightOfOneReplica) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    for (const bool fsdp : {false, true}) {
      const MeshShape shape = fsdp ? MeshShape{{"rep", 2}, {"dp", 2}} : MeshShape{{"dp", 4}};
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), shape);
      const auto net = float8_net();
      replicate(*net, mesh);
      const auto model = apply_float8(*net, Float8Recipe::rowwise);
      std::unique_ptr<FullySharded> sharded;
      if (fsdp)
        sharded = fully_shard(*net, ShardAxes(mesh["dp"], mesh["rep"]),
                              {.blocks = {"layers.*"}, .float8 = model->linears()});
      materialise(*net, compute);
      initialise(*net, 1);
      const Tensor x =
          distribute(random_tensor(rank.context, {4, 16}, "x"), replicated_layout(mesh, {4, 16}));
      Frame frame = Frame::inference(compute);
      net->forward(x, frame);
      const Tensor& master = net->parameter("layers.0.down.weight")->write_master();
      if (rank.rank == 1) master.f32()[3] = std::numeric_limits<float>::quiet_NaN();
      for (int pass = 0; pass < 2; ++pass)
        EXPECT_EQ(error_text([&] { net->forward(x, frame); }),
                  "bad_argument: float8: the weight \"layers.0.down.weight\" has an element that is not "
                  "finite");
    }
  });
}

// A pass that throws elsewhere does not reach the check; the next pass does not report what it found.
TEST(Float8NotFinite, APassForgetsWhatPassesBeforeHaveFound) {
  Context context;
  Compute compute(context);
  const auto net = float8_net();
  const auto model = apply_float8(*net, Float8Recipe::rowwise);
  materialise(*net, compute);
  initialise(*net, 1);
  const Tensor x = random_tensor(context, {4, 16}, "x"), dy = random_tensor(context, {4, 16}, "dy"),
               bad = random_tensor(context, {4, 16}, "x"), bad_dy = random_tensor(context, {4, 16}, "dy");
  bad.f32()[3] = bad_dy.f32()[3] = std::numeric_limits<float>::quiet_NaN();
  Frame frame(compute);
  {
    const HookHandle stop = net->get("head").add_hook(
        Module::HookPoint::pre_forward, [](Module&, Tensors&, Frame&) { throw std::runtime_error("stop"); });
    EXPECT_THROW(net->forward(bad, frame), std::runtime_error);
  }
  frame.clear();
  net->forward(x, frame);
  {
    const HookHandle stop = net->get("embed").add_hook(
        Module::HookPoint::pre_backward, [](Module&, Tensors&, Frame&) { throw std::runtime_error("stop"); });
    EXPECT_THROW(net->backward(bad_dy, frame), std::runtime_error);
  }
  frame.clear();
  net->forward(x, frame);
  net->backward(dy, frame);
}

// Without errors the gradients are not finite, and the loss scaler skips the step on all ranks.
TEST(Float8NotFinite, TheLossScalerSkipsTheStep) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    for (const Float8Recipe recipe : kRecipes) {
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}});
      const auto net = float8_net();
      replicate(*net, mesh);
      const auto model = apply_float8(*net, recipe, {.not_finite = Float8NotFinite::propagate});
      materialise(*net, compute);
      initialise(*net, 1);
      LossScaler scaler;
      for (const bool bad : {true, false}) {
        const Tensor x = distribute(random_tensor(rank.context, {4, 16}, "x"),
                                    make_layout(mesh, {{"dp", Shard{0}}}, {4, 16}));
        if (bad && rank.rank == 1) x.f32()[3] = std::numeric_limits<float>::infinity();
        Frame frame(compute);
        const Tensor y = net->forward(x, frame)[0];
        net->backward(y, frame);
        EXPECT_EQ(scaler.unscale(net->parameters(), mesh), !bad);
        scaler.update();
        for (Parameter* p : net->parameters()) p->zero_gradient();
      }
    }
  });
}

// --- checkpoints ---

TEST(Float8Checkpoint, DoesNotKnowOfFloat8) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const MeshShape shape{{"dp", 2}, {"tp", 1}};
    for (const bool with : {true, false}) {
      const auto recipe = [](bool on) {
        return on ? std::optional<Float8Recipe>(Float8Recipe::rowwise) : std::nullopt;
      };
      const std::string where = folder / (with ? "with" : "without");
      Float8Run saved(rank, shape, recipe(with), true);
      for (int step = 0; step < 3; ++step) saved.step(step);
      save_checkpoint(where, saved.mesh, 3, saved.net->parameters(), &*saved.optimizer);
      Float8Run same(rank, shape, recipe(with), true), other(rank, shape, recipe(!with), true);
      for (Float8Run* run : {&same, &other})
        EXPECT_EQ(load_checkpoint(where, run->mesh, run->net->parameters(), &*run->optimizer).step, 3);
      const double next = saved.step(3);
      EXPECT_EQ(same.step(3), next);
      const double others = other.step(3);
      EXPECT_NE(others, next);  // it computes otherwise, from the same weights
      EXPECT_NEAR(others, next, 0.1 * next);
    }
  });
}

}  // namespace
}  // namespace weft::float8_model_test
