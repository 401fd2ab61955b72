// Attention whose space is cut on some axes and whose heads are cut on others, compared with one rank.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/window_attention.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::domain_heads_test {
namespace {

using test::difference;
using test::random_map;
using test::Rank;

constexpr double kTolerance = 3e-6;

// Heads are cut on other axes, and ranks of `rep` share key/value heads: their gradients are sums over them.
TEST(DomainHeads, KeyValueHeadsThatRanksShare) {
  struct {
    std::int64_t kv_heads;
    int kv, rep, sp;
  } const cases[] = {{2, 2, 2, 2}, {1, 1, 2, 3}, {2, 2, 1, 2}, {1, 1, 4, 2}};
  for (const auto& c : cases)
    test::run_ranks(test::Ranks::threads, c.kv * c.rep * c.sp, [&](Rank& rank) {
      SCOPED_TRACE(testing::Message()
                   << c.kv_heads << " kv heads, " << c.kv << " x " << c.rep << " x " << c.sp);
      Compute compute(rank.context, 1);
      const DeviceMesh mesh = DeviceMesh(rank.group(), {{"sp", c.sp}, {"tp", c.kv * c.rep}})
                                  .unflatten("tp", {{"kv", c.kv}, {"rep", c.rep}});
      const auto cut = [&](Module& model) {
        parallelize(model, mesh["tp"],
                    {{"", Style::enter}, {"q_proj", Style::column}, {"o_proj", Style::row}});
        const Style fed{.name = "fed", .split = Split::column};
        parallelize(model, mesh["kv"], {{"k_proj", fed}, {"v_proj", fed}});
        const DomainManager manager = apply_domain_parallel(model, mesh["sp"], {.dims = {1}});
        replicate(model, mesh);
        test::set_up(model, compute);
        return manager;
      };
      const auto expect_as = [&](const Module& got, const Module& want) {
        for (Parameter* p : const_cast<Module&>(want).parameters())
          EXPECT_LE(
              difference(full(const_cast<Module&>(got).parameter(p->path())->gradient()), p->gradient()),
              kTolerance)
              << p->path();
      };
      {
        const test::MakeModule make = [&] {
          return std::make_unique<Attention>(
              AttentionConfig{.dim = 12, .heads = 4, .kv_heads = c.kv_heads, .head_dim = 6},
              RopeTables::make(64, 6, 10000.0));
        };
        const test::Serial serial = test::run_serial(make, {2, 11, 12}, compute);
        const std::unique_ptr<Module> split = make();
        const DomainManager manager = cut(*split);
        Frame frame(compute);
        const Tensor y = split->forward(shard_spatial(serial.x, manager), frame)[0];
        EXPECT_LE(difference(full(y), serial.y), kTolerance);
        const Tensor dx = split->backward(distribute(serial.dy, y.layout()), frame)[0];
        EXPECT_LE(difference(full(dx), serial.dx), kTolerance);
        expect_as(*split, *serial.model);
      }
      const CrossAttentionConfig config{.dim = 12, .heads = 4, .head_dim = 6, .kv_heads = c.kv_heads};
      CrossAttention serial(config), split(config);
      test::set_up(serial, compute);
      const Tensor x = random_map(rank.context, {2, 7, 12}, "x"),
                   context = random_map(rank.context, {2, 9, 12}, "context"),
                   dy = random_map(rank.context, {2, 7, 12}, "dy");
      Frame frame(compute);
      const Tensor want = serial.forward({x, context}, frame)[0];
      const Tensors want_d = serial.backward(dy, frame);
      const DomainManager manager = cut(split);
      const Tensor y = split.forward({shard_spatial(x, manager), shard_spatial(context, manager)}, frame)[0];
      EXPECT_LE(difference(full(y), want), kTolerance);
      const Tensors got_d = split.backward(distribute(dy, y.layout()), frame);
      for (std::size_t i = 0; i < 2; ++i) EXPECT_LE(difference(full(got_d[i]), want_d[i]), kTolerance) << i;
      expect_as(split, serial);
    });
}

// Dropout of the weights of attention drops the same ones wherever the maps are cut, in samples, space and
// heads.
TEST(DomainHeads, DropsTheSameWeightsWhereverMapsAreCut) {
  const Shape shape{2, 16, 8, 6};
  for (const MeshShape& mesh_shape : {MeshShape{{"dp", 1}, {"tp", 1}, {"h", 2}, {"w", 1}},
                                      MeshShape{{"dp", 1}, {"tp", 1}, {"h", 3}, {"w", 1}},
                                      MeshShape{{"dp", 1}, {"tp", 1}, {"h", 2}, {"w", 2}},
                                      MeshShape{{"dp", 2}, {"tp", 1}, {"h", 2}, {"w", 1}},
                                      MeshShape{{"dp", 1}, {"tp", 2}, {"h", 1}, {"w", 3}},
                                      MeshShape{{"dp", 1}, {"tp", 1}, {"h", 4}, {"w", 1}}})
    test::run_ranks(test::Ranks::threads, mesh_shape.size(), [&](test::Rank& rank) {
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), mesh_shape);
      for (const Windows windows : {Windows::neighbours, Windows::strided}) {
        SCOPED_TRACE(testing::Message() << to_string(mesh_shape) << " " << static_cast<int>(windows));
        const auto make = [&] {
          return std::make_unique<WindowAttention>(WindowAttentionConfig{
              .dim = 16, .heads = 2, .head_dim = 8, .window = 2, .windows = windows, .dropout = 0.4});
        };
        const Tensor x = test::random_map(rank.context, shape, "x"),
                     dy = test::random_map(rank.context, shape, "dy");
        const Pass pass{.seed = 9, .step = 3, .micro_batch = 1};
        const auto serial = make(), split = make();
        test::set_up(*serial, compute);
        Frame frame(compute, pass);
        const Tensor want = serial->forward(x, frame)[0], want_dx = serial->backward(dy, frame)[0];
        parallelize(*split, mesh["tp"]);
        DomainOptions options;
        options.data = mesh["dp"];
        const DomainManager manager = apply_domain_parallel(*split, mesh[{"h", "w"}], options);
        replicate(*split, mesh);
        test::set_up(*split, compute);
        Frame frame_of_split(compute, pass);
        const Tensor y = split->forward(distribute(x, manager.layout(shape)), frame_of_split)[0];
        EXPECT_LE(test::difference(full(y), want), 2e-6);
        const Tensor dx = split->backward(distribute(dy, y.layout()), frame_of_split)[0];
        EXPECT_LE(test::difference(full(dx), want_dx), 5e-6);
        EXPECT_TRUE(frame_of_split.empty());
        for (const char* name : {"to_q.weight", "to_k.weight", "to_v.weight", "to_out.weight", "to_out.bias"})
          EXPECT_LE(
              test::difference(full(split->parameter(name)->gradient()), serial->parameter(name)->gradient()),
              1e-5)
              << name;
      }
    });
}

}  // namespace
}  // namespace weft::domain_heads_test
