// The errors of layers for wrong layouts of inputs, and the layouts of their outputs. No communication.
#include "weft/nn/layouts.hpp"

#include "nn/support.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::layouts_test {
namespace {

using test::error_text;
using ::testing::HasSubstr;

// dp=2 x tp=2 as rank 3 sees it.
struct OnMesh : ::testing::Test {
  test::Bench bench;
  DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, MeshShape{{"dp", 2}, {"tp", 2}}, 3);

  // This rank's part, zeros, of a tensor laid out so.
  Tensor zeros(const Placement& dp, const Placement& tp, const Shape& global, DType dtype = DType::f32) {
    const LayoutRef layout = make_layout(mesh, {dp, tp}, global);
    return Tensor::zeros(bench.context, layout->local_shape(), dtype).with_layout(layout);
  }
  void make(Module& module) {
    replicate(module, mesh);
    materialise(module, bench.compute);
    initialise(module, 1);
  }
  Frame frame{bench.compute};
};

const Placement kReplicate = Replicate{}, kPartial = Partial{};
Placement shard(int dim) { return Shard{dim}; }

TEST_F(OnMesh, LinearFollowsItsRule) {
  struct Case {
    Placement weight, x, y, dy, dx, dw;
  };
  for (const Case& c : {Case{kReplicate, kReplicate, kReplicate, kReplicate, kReplicate, kReplicate},
                        Case{kReplicate, shard(1), shard(1), shard(1), shard(1), kPartial},
                        Case{shard(0), kReplicate, shard(2), shard(2), kPartial, shard(0)},
                        Case{shard(1), shard(2), kPartial, kReplicate, shard(2), shard(1)}}) {
    Linear layer(8, 6);
    layer.weight->set_layout(make_layout(mesh, {kReplicate, c.weight}, {6, 8}));
    make(layer);
    const Tensor y = layer.forward(zeros(shard(0), c.x, {4, 6, 8}), frame)[0];
    EXPECT_EQ(y.layout(), make_layout(mesh, {shard(0), c.y}, {4, 6, 6})) << to_string(*y.layout());
    EXPECT_EQ(y.shape(), y.layout()->local_shape());
    const Tensor dx = layer.backward(zeros(shard(0), c.dy, {4, 6, 6}), frame)[0];
    EXPECT_EQ(dx.layout(), make_layout(mesh, {shard(0), c.dx}, {4, 6, 8})) << to_string(*dx.layout());
    EXPECT_EQ(dx.shape(), dx.layout()->local_shape());
    EXPECT_EQ(layer.weight->gradient_layout(), make_layout(mesh, {kPartial, c.dw}, {6, 8}));
  }
}

TEST_F(OnMesh, LinearRefusesWhatItsWeightCannotTake) {
  const auto text = [&](const Placement& weight, const Placement& x) {
    Linear layer(8, 6);
    layer.weight->set_layout(make_layout(mesh, {kReplicate, weight}, {6, 8}));
    make(layer);
    return error_text(ErrorCode::layout, [&] { layer.forward(zeros(shard(0), x, {4, 6, 8}), frame); });
  };
  EXPECT_EQ(text(shard(1), kReplicate),
            "\"\": x is Replicate on tp=2; expected Shard(2), since the weight is Shard(1)");
  EXPECT_EQ(text(shard(0), shard(2)),
            "\"\": x is Shard(2) on tp=2; expected Replicate, since the weight is Shard(0)");
  EXPECT_EQ(text(shard(0), shard(1)),
            "\"\": x is Shard(1) on tp=2; expected Replicate, since the weight is Shard(0)");
  EXPECT_EQ(text(kReplicate, kPartial),
            "\"\": x is Partial(sum) on tp=2; expected Replicate or a Shard other than (2), since the weight "
            "is Replicate");
}

// Tensors whose elements are in another order differ, even if shapes and placements agree.
TEST_F(OnMesh, LinearKnowsNestingSegmentsAndMesh) {
  const LayoutRef rows = make_layout(mesh, {shard(0), shard(0)}, {8, 4}),
                  y = make_layout(mesh, {shard(1), shard(1)}, {3, 8});
  const auto backward_text = [&](const LayoutRef& weight, const LayoutRef& dy) {
    Linear layer(4, 8);
    layer.weight->set_layout(weight);
    make(layer);
    layer.forward(zeros(kReplicate, kReplicate, {3, 4}), frame);
    return error_text([&] { layer.backward(Tensor::zeros(bench.context, {3, 2}).with_layout(dy), frame); });
  };
  EXPECT_EQ(backward_text(rows, y), "no error");
  EXPECT_EQ(backward_text(rows->nested({"tp", "dp"}), y->nested({"tp", "dp"})), "no error");
  EXPECT_EQ(
      backward_text(rows->nested({"tp", "dp"}), y),
      "layout: \"\": dy is (3, 8) as [dp: Shard(1), tp: Shard(1)]; expected (3, 8) as [dp: Shard(1), tp: "
      "Shard(1)] nested tp, dp (as y)");
  EXPECT_EQ(
      backward_text(rows->segmented(0, {4, 4}), y),
      "layout: \"\": dy is (3, 8) as [dp: Shard(1), tp: Shard(1)]; expected (3, 8) as [dp: Shard(1), tp: "
      "Shard(1)] in segments 4, 4 of dimension 1 (as y)");
  const DeviceMesh other = DeviceMesh::arithmetic(bench.context, mesh.shape(), 3);
  EXPECT_EQ(backward_text(rows, make_layout(other, {shard(1), shard(1)}, {3, 8})),
            "layout: \"\": dy lies over dp=2 x tp=2; expected another mesh, dp=2 x tp=2 (as y)");

  const LayoutRef columns = make_layout(mesh, {shard(1), shard(1)}, {4, 8});
  const auto forward_text = [&](const LayoutRef& weight, const LayoutRef& x) {
    Linear layer(8, 4);
    layer.weight->set_layout(weight);
    make(layer);
    return error_text([&] { layer.forward(Tensor::zeros(bench.context, {3, 2}).with_layout(x), frame); });
  };
  EXPECT_EQ(forward_text(columns, y), "no error");
  EXPECT_EQ(
      forward_text(columns->nested({"tp", "dp"}), y),
      "layout: \"\": x is (3, 8) as [dp: Shard(1), tp: Shard(1)], the weight (4, 8) as [dp: Shard(1), tp: "
      "Shard(1)] nested tp, dp; expected features nested in the same order");
}

TEST_F(OnMesh, SegmentsOfWhatIsWholeDoNotCount) {
  const LayoutRef plain = make_layout(mesh, {shard(0), kReplicate}, {4, 6});
  EXPECT_TRUE(layouts::same(plain->segmented(1, {2, 4}), plain));
  EXPECT_FALSE(layouts::same(plain->segmented(0, {2, 2}), plain));
}

TEST_F(OnMesh, ABiasIsCutAsTheFeatures) {
  const auto text = [&](const LayoutRef& weight, const LayoutRef& bias) {
    Linear layer(4, 8, true);
    layer.weight->set_layout(weight);
    layer.bias->set_layout(bias);
    materialise(layer, bench.compute);
    initialise(layer, 1);
    return error_text([&] { layer.forward(zeros(shard(0), kReplicate, {4, 4}), frame); });
  };
  const LayoutRef weight = make_layout(mesh, {kReplicate, shard(0)}, {8, 4}),
                  bias = make_layout(mesh, {kReplicate, shard(0)}, {8});
  EXPECT_EQ(text(weight, bias), "no error");
  EXPECT_EQ(text(weight->segmented(0, {4, 4}), bias->segmented(0, {4, 4})), "no error");
  EXPECT_EQ(text(weight->segmented(0, {4, 4}), bias),
            "layout: \"\": y is (4, 8) as [dp: Shard(0), tp: Shard(1)] in segments 4, 4 of dimension 1, the "
            "bias (8) "
            "as [dp: Replicate, tp: Shard(0)]; expected its features cut as the bias is");
  const LayoutRef whole = make_layout(mesh, {kReplicate, kReplicate}, {8, 4});
  EXPECT_EQ(text(whole, nullptr),
            "layout: \"\": y: the bias is a plain tensor; on dp=2 x tp=2 it needs a layout, which "
            "says what part of the whole it is");
}

TEST_F(OnMesh, PlainAndLaidOutDoNotMix) {
  Linear layer(8, 6);
  make(layer);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         layer.forward(Tensor::zeros(bench.context, {2, 8}), frame);
                       }),
            "\"\": x is a plain tensor; on dp=2 x tp=2 it needs a layout, which "
            "says what part of the whole it is");
  RMSNorm norm(8);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         materialise(norm, bench.compute);
                         initialise(norm, 1);
                         norm.forward(zeros(kReplicate, kReplicate, {2, 8}), frame);
                       }),
            "\"\": x lies over dp=2 x tp=2, but \"weight\" is plain; replicate() or parallelize() the model "
            "over that mesh first");
  const DeviceMesh other = DeviceMesh::arithmetic(bench.context, MeshShape{{"dp", 4}}, 0);
  const Tensor elsewhere = Tensor::zeros(bench.context, {2, 8}).with_layout(replicated_layout(other, {2, 8}));
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { layer.forward(elsewhere, frame); }),
            "\"\": x lies over dp=4, \"weight\" over dp=2 x tp=2: not the same DeviceMesh; use one for both");
  // Over a mesh of one rank a plain tensor counts as replicated.
  const DeviceMesh one = DeviceMesh::arithmetic(bench.context, MeshShape{{"dp", 1}, {"tp", 1}}, 0);
  Linear alone(8, 6);
  replicate(alone, one);
  materialise(alone, bench.compute);
  initialise(alone, 1);
  Frame kept(bench.compute);
  EXPECT_EQ(alone.forward(Tensor::zeros(bench.context, {2, 8}), kept)[0].layout(),
            replicated_layout(one, {2, 6}));
}

TEST_F(OnMesh, ValuesAreNotContributions) {
  RMSNorm norm(8);
  make(norm);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         norm.forward(zeros(shard(0), kPartial, {4, 8}), frame);
                       }),
            "\"\": x is Partial(sum) on tp=2; a norm needs values, not contributions to them: a boundary "
            "must reduce it first");
  EXPECT_EQ(
      error_text(ErrorCode::layout,
                 [&] {
                   norm.forward(zeros(shard(0), shard(1), {4, 8}), frame);
                 }),
      "\"\": x is Shard(1) on tp=2; a norm needs its last dimension whole: a boundary must gather it first");
  // Sequence parallel: the norm's weight then has a Partial gradient on both axes.
  const Tensor x = zeros(shard(0), shard(1), {4, 6, 8});
  EXPECT_EQ(norm.forward(x, frame)[0].layout(), x.layout());
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         norm.backward(zeros(shard(0), kReplicate, {4, 6, 8}), frame);
                       }),
            "\"\": dy is Replicate on tp=2; expected Shard(1) (as y)");
  norm.forward(x, frame);
  norm.backward(x, frame);
  EXPECT_EQ(norm.weight->gradient_layout(), make_layout(mesh, {kPartial, kPartial}, {8}));

  CrossEntropy loss;
  const Tensor labels = zeros(shard(0), kReplicate, {4, 6}, DType::i64);
  const Tensor valid = scalar(mesh, 24);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         loss.forward({zeros(shard(0), kPartial, {4, 6, 8}), labels, valid}, frame);
                       }),
            "cross entropy: logits is Partial(sum) on tp=2; a loss needs values, not contributions to them: "
            "a boundary must "
            "reduce it first");
  // Classes may be split, but not the labels of the ranks that share them.
  EXPECT_EQ(
      error_text(ErrorCode::layout,
                 [&] {
                   loss.forward({zeros(shard(0), shard(2), {4, 6, 8}),
                                 zeros(kReplicate, shard(0), {4, 6}, DType::i64), valid},
                                frame);
                 }),
      "cross entropy: labels is Replicate on dp=2; expected Shard(0) (as logits; all ranks that share the "
      "classes of a token)");
  const Tensor logits = zeros(shard(0), kReplicate, {4, 6, 8});
  EXPECT_THAT(
      error_text(ErrorCode::bad_argument,
                 [&] {
                   loss.forward({logits, zeros(shard(1), kReplicate, {4, 6}, DType::i64), valid}, frame);
                 }),
      HasSubstr("labels are (4, 3); expected (2, 6)"));
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         loss.forward({logits, labels.with_layout(nullptr), valid}, frame);
                       }),
            "cross entropy: labels is a plain tensor; on dp=2 x tp=2 it needs a layout, which "
            "says what part of the whole it is");
  // A count of this rank only would scale the loss by the number of ranks.
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         loss.forward({logits, labels, scalar(bench.context, 24)}, frame);
                       }),
            "cross entropy: valid is a plain tensor; where logits are (4, 6, 8) as [dp: Shard(0), tp: "
            "Replicate] it "
            "must be stated as the number of all ranks: global_valid(context, labels), or scalar(mesh, n)");
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         loss.forward({logits, labels, zeros(kPartial, kReplicate, {1}, DType::i64)}, frame);
                       }),
            "cross entropy: valid is (1) as [dp: Partial(sum), tp: Replicate]; it is the number of valid "
            "tokens of all ranks");
  const Tensor value = loss.forward({logits, labels, valid}, frame)[0];
  EXPECT_EQ(value.layout(), make_layout(mesh, {kPartial, kReplicate}, {1}));
  EXPECT_EQ(loss.backward({}, frame)[0].layout(), logits.layout());
}

// A layer that is not linear in its input would give another result for contributions than for their sum.
TEST_F(OnMesh, NonlinearitiesAndAttentionNeedValues) {
  const std::string wants =
      "is Partial(sum) on tp=2; a nonlinearity needs values, not contributions to them: a boundary must "
      "reduce it first";
  const Tensor contribution = zeros(shard(0), kPartial, {4, 6, 8});
  GELU gelu, tanh(kernels::GeluForm::tanh);
  ReLU relu;
  for (Module* m : std::initializer_list<Module*>{&gelu, &tanh, &relu})
    EXPECT_EQ(error_text(ErrorCode::layout, [&] { m->forward(contribution, frame); }), "\"\": x " + wants);
  const auto cut = [&](Linear& layer, int dim) {
    layer.weight->set_layout(make_layout(mesh, {kReplicate, shard(dim)}, layer.weight->global_shape()));
  };
  // x is cut in its features, so that each product gives contributions.
  const Tensor x = zeros(shard(0), shard(2), {4, 6, 8});
  SwiGLU mlp(8, 12);
  cut(mlp.gate_proj, 1), cut(mlp.up_proj, 1), cut(mlp.down_proj, 1);
  make(mlp);
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { mlp.forward(x, frame); }), "\"\": gate " + wants);
  Attention attention({8, 4, 4, 4}, RopeTables::make(8, 4, 10000.0));
  for (Linear* l : {&attention.q_proj, &attention.k_proj, &attention.v_proj, &attention.o_proj}) cut(*l, 1);
  make(attention);
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { attention.forward(x, frame); }),
            "\"\": q is Partial(sum) on tp=2; attention needs values, not contributions to them: a boundary "
            "must reduce it "
            "first");
}

TEST_F(OnMesh, ResidualsAreOfOnePlacement) {
  const Tensor x = zeros(shard(0), kReplicate, {4, 8});
  EXPECT_EQ(
      error_text(ErrorCode::layout,
                 [&] {
                   add_tensors(x, zeros(shard(0), kPartial, {4, 8}), bench.compute, "layers.0: x + mlp");
                 }),
      "layers.0: x + mlp: the second term is Partial(sum) on tp=2; expected Replicate (as the first)");
  const Tensor partial = zeros(shard(0), kPartial, {4, 8});
  EXPECT_EQ(add_tensors(partial, partial, bench.compute, "dx").layout(), partial.layout());
}

TEST_F(OnMesh, EmbeddingFollowsItsTable) {
  Embedding whole(8, 4), cut(8, 4), columns(8, 4), fused(8, 4);
  make(whole);
  const Tensor tokens = zeros(shard(0), kReplicate, {4, 6}, DType::i64);
  EXPECT_EQ(whole.forward(tokens, frame)[0].layout(), make_layout(mesh, {shard(0), kReplicate}, {4, 6, 4}));
  whole.backward(zeros(shard(0), kReplicate, {4, 6, 4}), frame);
  EXPECT_EQ(whole.weight->gradient_layout(), make_layout(mesh, {kPartial, kReplicate}, {8, 4}));
  cut.weight->set_layout(make_layout(mesh, {kReplicate, shard(0)}, {8, 4}));
  make(cut);
  EXPECT_EQ(cut.forward(tokens, frame)[0].layout(), make_layout(mesh, {shard(0), kPartial}, {4, 6, 4}));
  cut.backward(zeros(shard(0), kReplicate, {4, 6, 4}), frame);
  EXPECT_EQ(cut.weight->gradient_layout(), make_layout(mesh, {kPartial, shard(0)}, {8, 4}));
  cut.forward(tokens, frame);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         cut.backward(zeros(shard(0), kPartial, {4, 6, 4}), frame);
                       }),
            "\"\": dy is Partial(sum) on tp=2; expected Replicate (as y)");
  columns.weight->set_layout(make_layout(mesh, {kReplicate, shard(1)}, {8, 4}));
  make(columns);
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { columns.forward(tokens, frame); }),
            "\"weight\" is Shard(1) on tp=2; expected Replicate, or Shard(0), the vocabulary");
  fused.weight->set_layout(make_layout(mesh, {kReplicate, shard(0)}, {8, 4})->segmented(0, {4, 4}));
  make(fused);
  EXPECT_EQ(
      error_text(ErrorCode::layout, [&] { fused.forward(tokens, frame); }),
      "\"weight\" is (8, 4) as [dp: Replicate, tp: Shard(0)] in segments 4, 4 of dimension 0; expected a "
      "vocabulary without segments");
}

// A boundary behind the embedding reduces y over the axes that split the table, and expects equal placements
// of y on all of them, also on an axis of one rank.
TEST_F(OnMesh, EmbeddingOverSeveralAxesOfWhichOneHasOneRank) {
  for (const auto& [kv, rep] : {std::pair{1, 2}, {2, 1}}) {
    const DeviceMesh axes =
        DeviceMesh::arithmetic(bench.context, MeshShape{{"dp", 2}, {"kv", kv}, {"rep", rep}}, 3);
    Embedding cut(8, 4);
    cut.weight->set_layout(replicated_layout(axes, {8, 4})->with(axes[{"kv", "rep"}], Shard{0}));
    materialise(cut, bench.compute);
    initialise(cut, 1);
    const auto on = [&](const Placement& of_dp, const Placement& of_kv, const Placement& of_rep, Shape global,
                        DType dtype) {
      const LayoutRef layout = make_layout(axes, {of_dp, of_kv, of_rep}, global);
      return Tensor::zeros(bench.context, layout->local_shape(), dtype).with_layout(layout);
    };
    const Tensor y = cut.forward(on(shard(0), kReplicate, kReplicate, {4, 6}, DType::i64), frame)[0];
    EXPECT_EQ(y.layout(), make_layout(axes, {shard(0), kPartial, kPartial}, {4, 6, 4}));
    cut.backward(on(shard(0), kReplicate, kReplicate, {4, 6, 4}, DType::f32), frame);
    EXPECT_EQ(cut.weight->gradient_layout(),
              cut.weight->layout()->with(Placements{kPartial, shard(0), shard(0)}));
    // The placement of tokens on an axis of one rank does not matter.
    const bool kv_is_one = kv == 1;
    const Tensor z = cut.forward(on(shard(0), kv_is_one ? shard(1) : kReplicate,
                                    kv_is_one ? kReplicate : shard(1), {4, 6}, DType::i64),
                                 frame)[0];
    EXPECT_EQ(to_string(z.layout()->on(kv_is_one ? "rep" : "kv")), "Partial(sum)");
  }
}

TEST_F(OnMesh, AttentionFindsItsHeadsInTheShapes) {
  const auto rope = RopeTables::make(8, 4, 10000.0);
  const auto laid_out = [&](Attention& layer, const Placement& q, const Placement& k, const Placement& v) {
    for (const auto& [linear, how] : {std::pair{&layer.q_proj, q}, {&layer.k_proj, k}, {&layer.v_proj, v}})
      linear->weight->set_layout(make_layout(mesh, {kReplicate, how}, linear->weight->global_shape()));
    layer.o_proj.weight->set_layout(
        make_layout(mesh, {kReplicate, shard(1)}, layer.o_proj.weight->global_shape()));
    make(layer);
  };
  const Tensor x = zeros(shard(0), kReplicate, {4, 6, 8});
  {
    Attention layer({8, 4, 2, 4}, rope);
    laid_out(layer, shard(0), shard(0), shard(0));
    const Tensor y = layer.forward(x, frame)[0];
    EXPECT_EQ(y.layout(), make_layout(mesh, {shard(0), kPartial}, {4, 6, 8}));
    const Tensor dx = layer.backward(x, frame)[0];  // three Partial contributions, still Partial
    EXPECT_EQ(dx.layout(), make_layout(mesh, {shard(0), kPartial}, {4, 6, 8}));
    EXPECT_TRUE(frame.empty());
  }
  {
    Attention layer({8, 3, 3, 4}, rope);
    laid_out(layer, shard(0), shard(0), shard(0));
    EXPECT_EQ(
        error_text(ErrorCode::layout, [&] { layer.forward(x, frame); }),
        "\"\": q has 6 features on this rank, which is no multiple of head_dim 4: a head is cut in two");
  }
  {
    Attention layer({8, 4, 2, 4}, rope);
    laid_out(layer, shard(0), kReplicate, kReplicate);
    EXPECT_EQ(
        error_text(ErrorCode::layout, [&] { layer.forward(x, frame); }),
        "\"\": rank 0 of dp=2 x tp=2 has query heads 0 to 1 of 4 and key/value heads 0 to 1 of 2; expected "
        "those that they need: k and v split over the outermost of the axes that split q, of as many "
        "ranks as there are key/value heads");
  }
  {
    Attention layer({8, 4, 2, 4}, rope);
    make(layer);
    EXPECT_EQ(
        error_text(ErrorCode::layout,
                   [&] {
                     layer.forward(zeros(shard(0), shard(1), {4, 6, 8}), frame);
                   }),
        "\"\": q is Shard(1) on tp=2; attention needs the whole sequence: a boundary must gather it first");
  }
}

TEST_F(OnMesh, ABiasWaitsForTheSum) {
  Linear row(8, 6, true);
  row.weight->set_layout(make_layout(mesh, {kReplicate, shard(1)}, {6, 8}));
  make(row);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         row.forward(zeros(shard(0), shard(1), {4, 8}), frame);
                       }),
            "\"\": y is Partial(sum) on tp=2; a bias needs values, not contributions to them: a boundary "
            "must reduce it first");
  Linear column(8, 6, true);
  column.weight->set_layout(make_layout(mesh, {kReplicate, shard(0)}, {6, 8}));
  make(column);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         column.forward(zeros(shard(0), kReplicate, {4, 8}), frame);
                       }),
            "\"\": y has 3 features on this rank, the bias 6");
  Linear both(8, 6, true);
  both.weight->set_layout(make_layout(mesh, {kReplicate, shard(0)}, {6, 8}));
  both.bias->set_layout(make_layout(mesh, {kReplicate, shard(0)}, {6}));
  make(both);
  both.forward(zeros(shard(0), kReplicate, {4, 8}), frame);
  both.backward(zeros(shard(0), shard(1), {4, 6}), frame);
  EXPECT_EQ(both.bias->gradient_layout(), make_layout(mesh, {kPartial, shard(0)}, {6}));
}

// The gradient of a row layer's bias says what it is: each rank summed its own contributions to dy.
TEST_F(OnMesh, ARowLayersBiasOfAPartialGradientIsPartial) {
  Linear row(8, 6, true);
  row.weight->set_layout(make_layout(mesh, {kReplicate, shard(1)}, {6, 8}));
  row.add_after(boundary::leave(mesh["tp"]));
  make(row);
  Frame fresh(bench.compute);
  // An arithmetic mesh cannot reduce: backward gets as far as the bias and the boundary's adjoint.
  EXPECT_EQ(error_text(ErrorCode::unsupported,
                       [&] {
                         row.backward(zeros(shard(0), kPartial, {4, 6}), fresh);
                       })
                .substr(0, 6),
            "mesh: ");
  EXPECT_EQ(row.bias->gradient_layout(), make_layout(mesh, {kPartial, kPartial}, {6}));
  row.bias->zero_gradient();
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         row.backward(Tensor::zeros(bench.context, {2, 6}), fresh);
                       }),
            "\"\": dy is a plain tensor; on dp=2 x tp=2 it needs a layout, which "
            "says what part of the whole "
            "it is");
}

TEST_F(OnMesh, ParametersAndOptimizersCheckTheirs) {
  Parameter p({6, 8});
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         p.set_layout(replicated_layout(mesh, {8, 6}));
                       }),
            "parameter \"\" is (6, 8); its layout is for (8, 6)");
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         p.set_layout(make_layout(mesh, {kReplicate, kPartial}, {6, 8}));
                       }),
            "parameter \"\": its value cannot be (6, 8) as [dp: Replicate, tp: Partial(sum)]");

  Linear layer(8, 6);
  make(layer);
  SGD sgd(bench.compute, layer.parameters(), {});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { sgd.step(0.1); }),
            "optimizer: no gradient for weight; no backward pass has used it");
  layer.forward(zeros(shard(0), kReplicate, {4, 8}), frame);
  layer.backward(zeros(shard(0), kReplicate, {4, 6}), frame);
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { sgd.step(0.1); }),
            "optimizer: the gradient of \"weight\" is Partial(sum) on dp=2; expected Replicate (as the "
            "master; reduce it before "
            "the step)");
  layer.forward(zeros(kReplicate, kReplicate, {4, 8}), frame);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         layer.backward(zeros(kReplicate, kReplicate, {4, 6}), frame);
                       }),
            "parameter \"weight\": a gradient is Replicate on dp=2; expected Partial(sum) (as its uses "
            "before; after a gradient was reduced, zero it before the next backward pass)");
  layer.weight->set_gradient_layout(layer.weight->layout());
  sgd.step(0.1);
}

TEST_F(OnMesh, WeightsAreTheSameOnEveryMesh) {
  const auto value = [&](const DeviceMesh& on, Placements placements, const Shape& global) {
    Parameter p(global, Normal{0.5, 0.25});
    p.set_layout(make_layout(on, std::move(placements), global));
    p.materialise(bench.compute);
    initialise(p, 42);
    return p.master();
  };
  for (const Shape& global : {Shape{7, 5}, Shape{5, 3, 6}, Shape{11}, Shape{1, 2}}) {
    Parameter plain(global, Normal{0.5, 0.25});
    plain.materialise(bench.compute);
    initialise(plain, 42);
    const int dims = global.rank();
    for (int d0 = 0; d0 < dims; ++d0) {
      for (int d1 = 0; d1 < dims; ++d1) {
        for (int rank = 0; rank < 6; ++rank) {
          const DeviceMesh on = DeviceMesh::arithmetic(bench.context, MeshShape{{"a", 2}, {"b", 3}}, rank);
          const Tensor part = value(on, {shard(d0), shard(d1)}, global);
          const Dims offsets = part.layout()->parts().at(0).offset;
          for (std::int64_t i = 0; i < part.count(); ++i) {
            std::int64_t rest = i, index = 0, stride = 1;
            for (int d = dims - 1; d >= 0; --d) {
              index += (rest % part.shape()[d] + offsets[d]) * stride;
              rest /= part.shape()[d];
              stride *= global[d];
            }
            ASSERT_EQ(part.f32()[static_cast<std::size_t>(i)],
                      plain.master().f32()[static_cast<std::size_t>(index)])
                << to_string(*part.layout()) << " rank " << rank << " element " << i;
          }
        }
      }
    }
  }
}

TEST(CrossEntropyOverRanks, CountsTheValidTokensOfAll) {
  test::run_ranks(test::Ranks::threads, 4, [](test::Rank& r) {
    const DeviceMesh over(r.group(), {{"dp", 2}, {"sp", 2}});
    Tensor labels(r.context, {3, 5}, DType::i64);
    for (std::size_t i = 0; i < 15; ++i)
      labels.as<std::int64_t>()[i] = i % 4 == 0 ? CrossEntropy::kIgnore : 1;
    EXPECT_EQ(global_valid(r.context, labels).as<std::int64_t>()[0], 11);
    for (const Placements& p : {Placements{Shard{0}, Replicate{}}, Placements{Shard{0}, Shard{1}}}) {
      const Tensor valid = global_valid(r.context, distribute(labels, make_layout(over, p, {3, 5})));
      EXPECT_EQ(valid.as<std::int64_t>()[0], 11);
      EXPECT_EQ(valid.layout(), replicated_layout(over, {1}));
    }
  });
}

}  // namespace
}  // namespace weft::layouts_test
