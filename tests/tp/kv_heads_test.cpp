// Grouped-query attention over more ranks than it has key/value heads, and fused projections, have the
// results of one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/segments.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::kv_heads_test {
namespace {

using test::expect_near;
using test::random_tensor;
using test::Rank;
using test::Ranks;

constexpr std::int64_t kDim = 16, kHeads = 8, kHeadDim = 4, kTokens = 3;

std::unique_ptr<Attention> attention(std::int64_t kv_heads) {
  return std::make_unique<Attention>(
      AttentionConfig{kDim, kHeads, kv_heads, kHeadDim, Normal{0.5}, Normal{0.5}},
      RopeTables::make(kTokens, kHeadDim, 10000.0));
}

struct Passes {
  Tensor y, dx;
};

// Both passes of a module over `mesh` (plain if the mesh is empty), with dp splitting samples.
Passes run(Module& module, Compute& compute, const DeviceMesh& mesh) {
  Context& context = compute.context();
  materialise(module, compute);
  initialise(module, 3);
  const auto part = [&](const char* name) {
    const Tensor t = random_tensor(context, {2, kTokens, kDim}, name);
    return mesh ? distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape())) : t;
  };
  Frame frame(compute);
  const Tensor y = module.forward(part("x"), frame)[0];
  return {full(y), full(module.backward(part("dy"), frame)[0])};
}

TEST(KeyValueHeads, FewerThanRanksAreSharedAndTheirGradientsSummed) {
  struct {
    std::int64_t kv_heads;
    MeshShape tp;
    int dp;
  } const cases[] = {{2, {{"kv", 2}, {"rep", 2}}, 1},
                     {1, {{"kv", 1}, {"rep", 4}}, 1},
                     {1, {{"kv", 1}, {"rep", 2}}, 2},
                     {4, {{"kv", 4}, {"rep", 1}}, 1}};
  for (const auto& c : cases)
    test::run_ranks(Ranks::threads, c.tp.size() * c.dp, [&](Rank& rank) {
      SCOPED_TRACE(std::to_string(c.kv_heads) + " kv heads, " + to_string(c.tp));
      Compute compute(rank.context);
      const auto serial = attention(c.kv_heads), parallel = attention(c.kv_heads);
      const Passes expected = run(*serial, compute, {});

      const DeviceMesh mesh =
          DeviceMesh(rank.group(), {{"dp", c.dp}, {"tp", c.tp.size()}}).unflatten("tp", c.tp);
      parallelize(*parallel, mesh["tp"],
                  {{"", Style::enter}, {"q_proj", Style::column}, {"o_proj", Style::row}});
      // It is split over kv alone. The boundary is that of q_proj, over all of tp.
      const Style fed{.name = "fed", .split = Split::column};
      parallelize(*parallel, mesh["kv"], {{"k_proj", fed}, {"v_proj", fed}});
      replicate(*parallel, mesh);
      const Passes got = run(*parallel, compute, mesh);
      expect_near(got.y, expected.y, "y");
      expect_near(got.dx, expected.dx, "dx");
      for (Parameter* p : serial->parameters()) {
        const ParameterRef other = parallel->parameter(p->path());
        expect_near(full(other->gradient()), p->gradient(), "gradient of " + p->path());
        const bool of_kv = p->path().starts_with("k_proj") || p->path().starts_with("v_proj");
        if (mesh.size("rep") > 1) {
          EXPECT_EQ(to_string(other->gradient_layout()->on("rep")),
                    of_kv ? "Partial(sum)" : to_string(other->layout()->on("rep")))
              << p->path();
          if (of_kv) {
            EXPECT_EQ(to_string(other->layout()->on("rep")), "Replicate") << p->path();
          }
        }
      }
    });
}

TEST(KeyValueHeads, AnotherOrderOfTheAxesIsALayoutError) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh =
        DeviceMesh(rank.group(), {{"dp", 1}, {"tp", 4}}).unflatten("tp", {{"rep", 2}, {"kv", 2}});
    const auto module = attention(2);
    parallelize(*module, mesh["tp"], {{"", Style::enter}, {"q_proj", Style::column}, {"o_proj", Style::row}});
    const Style fed{.name = "fed", .split = Split::column};
    parallelize(*module, mesh["kv"], {{"k_proj", fed}, {"v_proj", fed}});
    replicate(*module, mesh);
    Compute compute(rank.context);
    materialise(*module, compute);
    initialise(*module, 3);
    Frame frame(compute);
    const Tensor x = random_tensor(rank.context, {2, kTokens, kDim}, "x");
    const Error e =
        test::error_of([&] { module->forward(as_layout(x, replicated_layout(mesh, x.shape())), frame); });
    EXPECT_EQ(e.code(), ErrorCode::layout);
    EXPECT_STREQ(
        e.what(),
        "\"\": rank 1 of dp=1 x rep=2 x kv=2 has query heads 2 to 3 of 8 and key/value heads 1 to 1 of "
        "2; expected those that they need: k and v split over the outermost of the axes that split q, "
        "of as many ranks as there are key/value heads");
  });
}

// Attention with one product for q, k and v, and a SwiGLU with one for gate and up: what Attention and SwiGLU
// compute.
class Fused : public Module {
 public:
  explicit Fused(std::int64_t kv_heads, std::int64_t hidden)
      : qkv(kDim, (kHeads + 2 * kv_heads) * kHeadDim),
        o_proj(kHeads * kHeadDim, kDim),
        gate_up(kDim, 2 * hidden),
        down_proj(hidden, kDim),
        heads_{kHeads * kHeadDim, kv_heads * kHeadDim, kv_heads * kHeadDim},
        hidden_{hidden, hidden} {
    qkv.set_segments(heads_);
    gate_up.set_segments(hidden_);
    add("qkv", qkv);
    add("o_proj", o_proj);
    add("gate_up", gate_up);
    add("down_proj", down_proj);
  }
  Linear qkv, o_proj, gate_up, down_proj;

 private:
  kernels::AttentionShape shape(const Tensors& parts) const {
    return {parts[0].size(0), parts[0].size(1), parts[0].size(2) / kHeadDim, parts[1].size(2) / kHeadDim,
            kHeadDim};
  }
  Tensors do_forward(Inputs x, Frame& f) override {
    Compute& c = f.compute();
    const Tensors p = split_features(qkv.forward(x, f)[0], heads_, c, {path(), "qkv"});
    const Tensor out = c.make(p[0].shape()).with_layout(p[0].layout());
    const kernels::AttentionShape s = shape(p);
    const Tensor softmax = c.make({s.batch, s.heads, s.seq, kernels::kSoftmaxTerms});
    kernels::attention_forward(f.kernels(), p[0].data_ptr<float>(), p[1].data_ptr<float>(),
                               p[2].data_ptr<float>(), out.data_ptr<float>(), softmax.data_ptr<float>(), s);
    f.push(*this, {p[0], p[1], p[2], out, softmax});
    const Tensors after = o_proj.forward(out, f);
    const Tensor both = gate_up.forward(after, f)[0];
    const Tensors g = split_features(both, hidden_, c, {path(), "gate_up"});
    const Tensor h = c.make(g[0].shape()).with_layout(g[0].layout());
    kernels::swiglu_forward(f.kernels(), g[0].data_ptr<float>(), g[1].data_ptr<float>(), h.data_ptr<float>(),
                            h.count());
    f.push(*this, {g[0], g[1], both});
    return down_proj.forward(h, f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    Compute& c = f.compute();
    const Tensor dh = down_proj.backward(dy, f)[0];
    const Tensors g = f.pop(*this);
    const Tensor dgate = c.make(g[0].shape()).with_layout(g[0].layout()),
                 dup = c.make(g[1].shape()).with_layout(g[1].layout());
    kernels::swiglu_backward(f.kernels(), dh.data_ptr<float>(), g[0].data_ptr<float>(),
                             g[1].data_ptr<float>(), dgate.data_ptr<float>(), dup.data_ptr<float>(),
                             dh.count());
    const Tensor dboth = join_features(Tensors{dgate, dup}, g[2].layout(), c, {path(), "d(gate_up)"});
    const Tensor dout = o_proj.backward(gate_up.backward(dboth, f), f)[0];
    const Tensors k = f.pop(*this);
    const Tensor dq = c.make(k[0].shape()).with_layout(k[0].layout()),
                 dk = c.make(k[1].shape()).with_layout(k[1].layout()),
                 dv = c.make(k[2].shape()).with_layout(k[2].layout());
    kernels::attention_backward(f.kernels(), dout.data_ptr<float>(), k[0].data_ptr<float>(),
                                k[1].data_ptr<float>(), k[2].data_ptr<float>(), k[3].data_ptr<float>(),
                                k[4].data_ptr<float>(), dq.data_ptr<float>(), dk.data_ptr<float>(),
                                dv.data_ptr<float>(), shape(k));
    const LayoutRef whole =
        k[0].layout() == nullptr
            ? nullptr
            : k[0].layout()->with_global(layouts_with_last(k[0].layout()->global))->segmented(2, heads_);
    return qkv.backward(join_features(Tensors{dq, dk, dv}, whole, c, {path(), "d(qkv)"}), f);
  }
  Shape layouts_with_last(Shape shape) const {
    shape[2] = heads_[0] + heads_[1] + heads_[2];
    return shape;
  }
  const std::vector<std::int64_t> heads_, hidden_;
};

TEST(Fused, QkvWithGqaAndGateUpAtTp2And4) {
  const Plan plan = {
      {"qkv", Style::column}, {"o_proj", Style::row}, {"gate_up", Style::column}, {"down_proj", Style::row}};
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute compute(rank.context);
      Fused serial(4, 12), parallel(4, 12);
      for (Module* m : {static_cast<Module*>(&serial), static_cast<Module*>(&parallel)})
        for (Parameter* p : m->parameters()) p->set_init(Normal{0.5});
      const Passes expected = run(serial, compute, {});
      const DeviceMesh mesh(rank.group(), shape);
      parallelize(parallel, mesh["tp"], plan);
      replicate(parallel, mesh);
      const Passes got = run(parallel, compute, mesh);
      expect_near(got.y, expected.y, "y");
      expect_near(got.dx, expected.dx, "dx");
      for (Parameter* p : serial.parameters())
        expect_near(full(parallel.parameter(p->path())->gradient()), p->gradient(),
                    "gradient of " + p->path());
      // Each rank has its heads of every segment: the first rows of its part are q's, then k's, then v's.
      const std::int64_t tp = mesh.size("tp"), t = mesh.coordinate("tp");
      const Tensor &whole = serial.qkv.weight->master(), &part = parallel.qkv.weight->master();
      std::int64_t row = 0, first = 0;
      for (const std::int64_t size : {kHeads * kHeadDim, 4 * kHeadDim, 4 * kHeadDim}) {
        for (std::int64_t r = 0; r < size / tp; ++r, ++row)
          ASSERT_EQ(part.f32()[static_cast<std::size_t>(row * kDim)],
                    whole.f32()[static_cast<std::size_t>((first + t * size / tp + r) * kDim)]);
        first += size;
      }
    });
}

TEST(Fused, ASegmentThatDoesNotDivideIsNamed) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}, {"tp", 4}}, 0);
  Linear layer(4, 16);
  layer.set_segments({8, 6, 2});
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] {
                               parallelize(layer, mesh["tp"], Plan{{"", Style::column}});
                             }),
            "parallelize: \"\" has 6 features in a segment; they do not divide into tp=4 (6 = 4 x 1 + 2)");
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                             [&] {
                               layer.set_segments({8, 6});
                             }),
            "\"\": segments are 8 + 6 = 14; expected sizes of at least 1 that add up to 16 outputs");
}

TEST(Fused, PartsThatAreNotTheSegmentsAreRefused) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    const LayoutRef cut = make_layout(mesh, {{"tp", Shard{1}}}, {3, 12});
    const Tensor y = as_layout(Tensor::zeros(rank.context, cut->local_shape()), cut);
    const std::int64_t sizes[] = {8, 4}, others[] = {8, 5};
    EXPECT_EQ(test::error_text(ErrorCode::layout,
                               [&] {
                                 split_features(y, sizes, compute, {"m", "y"});
                               }),
              "\"m\": y is (3, 12) as [tp: Shard(1)]; expected its features in segments 8, 4");
    EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                               [&] {
                                 split_features(y, others, compute, {"m", "y"});
                               }),
              "\"m\": y is (3, 12); expected 8 + 5 = 13 features");
    const Tensor whole = as_layout(Tensor::zeros(rank.context, {3, 12}), replicated_layout(mesh, {3, 12}));
    const Tensors parts = split_features(whole, sizes, compute, {"m", "y"});
    EXPECT_EQ(parts[1].shape(), Shape({3, 4}));
    EXPECT_EQ(join_features(parts, whole.layout(), compute, {"m", "y"}).shape(), Shape({3, 12}));
    EXPECT_EQ(test::error_text(ErrorCode::layout,
                               [&] {
                                 join_features(parts, cut->segmented(1, {8, 4}), compute, {"m", "y"});
                               }),
              "\"m\": y: a part is Replicate on tp=2; expected Shard(1) (as the whole)");
    EXPECT_EQ(test::error_text(ErrorCode::bad_argument,
                               [&] {
                                 join_features({}, {}, compute, {"m", "y"});
                               }),
              "\"m\": y: there are no parts");
  });
}

}  // namespace
}  // namespace weft::kv_heads_test
