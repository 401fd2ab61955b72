// Recipes and options as JSON: the values that C++ gives, and errors that name the place.
#include "weft/models/from_json.hpp"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/residual.hpp"

namespace weft::from_json_test {
namespace {

using test::expect_error;
using test::Rank;
using test::Ranks;

constexpr const char* kClassifier = R"({
  "name": "classifier", "loss": "binary_cross_entropy", "blocks": ["stages.*"],
  "model": {"layer": "Sequential", "children": [
    ["embed", {"layer": "Conv2d", "in": 1, "out": 8, "kernel": [3, 3], "padding": 1, "init": 0.3}],
    ["act", {"layer": "GELU"}],
    ["pool", {"layer": "AdaptiveAvgPool2d", "out": 1}],
    ["stages", {"layer": "Sequential", "children": [
      ["0", {"layer": "Residual", "branch":
        {"layer": "ChannelFeedForward", "dim": 8, "hidden": 16, "init": 0.2, "down_init": 0.2}}]]}],
    ["head", {"layer": "Conv2d", "in": 8, "out": 1, "init": 0.3}]]}})";

Recipe by_hand() {
  Recipe recipe;
  recipe.name = "classifier";
  recipe.build = [] {
    auto model = std::make_unique<Sequential>();
    model->append("embed", std::make_unique<Conv2d>(Conv2dConfig{
                               .in = 1, .out = 8, .kernel = 3, .padding = 1, .init = Normal{0.3}}));
    model->append("act", std::make_unique<GELU>());
    model->append("pool", std::make_unique<AdaptiveAvgPool2d>(Extent2d(1)));
    auto stages = std::make_unique<Sequential>();
    stages->append("0", std::make_unique<Residual>(
                            std::make_unique<ChannelFeedForward>(8, 16, 0, Normal{0.2}, Normal{0.2})));
    model->append("stages", std::move(stages));
    model->append("head", std::make_unique<Conv2d>(Conv2dConfig{.in = 8, .out = 1, .init = Normal{0.3}}));
    return model;
  };
  recipe.blocks = {"stages.*"};
  recipe.loss = [] { return std::make_unique<BinaryCrossEntropy>(); };
  return recipe;
}

TEST(FromJson, ARecipeHasTheBitsOfTheSameInCpp) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 2}, {"tp", 2}});
    const BuildOptions options = build_options_from_json(R"({"data": "fsdp", "ac": "full", "seed": 3})");
    ParallelModel a = build_parallel_model(by_hand(), mesh, compute,
                                           {.data = DataForm::fsdp, .seed = 3, .ac = {.mode = AcMode::full}});
    ParallelModel b = build_parallel_model(recipe_from_json(kClassifier), mesh, compute, options);
    EXPECT_TRUE(b.model->get("stages.0").recompute());
    Trainer of_a(a, compute, {.seed = 1}),
        of_b(b, compute, trainer_options_from_json(R"({"optimizer": "adamw", "seed": 1})"));
    Tensor pictures(rank.context, {2, 1, 8, 8}), kinds(rank.context, {2, 1, 1, 1});
    RandomStream(5, std::to_string(a.data.rank())).normal(0, 128, pictures.f32().data());
    kinds.f32()[0] = 0, kinds.f32()[1] = 1;
    const Batch batch{.inputs = {pictures}, .targets = {kinds}};
    double first = 0, last = 0;
    for (int i = 0; i < 6; ++i) {
      const double loss = of_a.step({&batch, 1}, 0.02).loss;
      EXPECT_EQ(of_b.step({&batch, 1}, 0.02).loss, loss) << i;
      (i == 0 ? first : last) = loss;
    }
    EXPECT_LT(last, first);
  });
}

// Every layer, with each of its keys: what its parameters are.
TEST(FromJson, EveryLayer) {
  const std::vector<std::pair<std::string, std::map<std::string, Shape>>> layers{
      {R"("Linear", "in": 3, "out": 4, "bias": true, "init": {"constant": 1})",
       {{"weight", {4, 3}}, {"bias", {4}}}},
      {R"("Linear", "in": 3, "out": 4)", {{"weight", {4, 3}}}},
      {R"("Conv2d", "in": 2, "out": 4, "kernel": [3, 5], "stride": 2, "padding": 1, "dilation": 1, "groups": 2,
          "padding_mode": "circular", "bias": false, "init": 0.1)",
       {{"weight", {4, 1, 3, 5}}}},
      {R"("ConvTranspose2d", "in": 2, "out": 4, "kernel": 3, "stride": 2, "output_padding": 1)",
       {{"weight", {2, 4, 3, 3}}, {"bias", {4}}}},
      {R"("Embedding", "count": 7, "dim": 3, "init": 1)", {{"weight", {7, 3}}}},
      {R"("RMSNorm", "dim": 3, "eps": 0.1)", {{"weight", {3}}}},
      {R"("LayerNorm", "dim": 3, "eps": 0.1)", {{"weight", {3}}, {"bias", {3}}}},
      {R"("LayerNorm", "dim": [3, 2])", {{"weight", {3, 2}}, {"bias", {3, 2}}}},
      {R"("ChannelNorm", "channels": 3)", {{"g", {1, 3, 1, 1}}, {"b", {1, 3, 1, 1}}}},
      {R"("GroupNorm", "groups": 2, "channels": 4)", {{"weight", {4}}, {"bias", {4}}}},
      {R"("BatchNorm", "channels": 4, "momentum": 0.2, "axes": ["dp"])", {{"weight", {4}}, {"bias", {4}}}},
      {R"("GELU", "form": "tanh")", {}},
      {R"("ReLU")", {}},
      {R"("Dropout", "p": 0.5)", {}},
      {R"("SwiGLU", "dim": 4, "hidden": 6, "init": 1, "down_init": 1)",
       {{"gate_proj.weight", {6, 4}}, {"up_proj.weight", {6, 4}}, {"down_proj.weight", {4, 6}}}},
      {R"("Residual", "branch": {"layer": "Linear", "in": 3, "out": 3})", {{"branch.weight", {3, 3}}}},
      {R"("Sequential", "children": [["a", {"layer": "RMSNorm", "dim": 2}]])", {{"a.weight", {2}}}},
      {R"("AvgPool2d", "kernel": 2, "stride": 1, "padding": 0, "count_padding": false)", {}},
      {R"("MaxPool2d", "kernel": 2, "dilation": 1)", {}},
      {R"("AdaptiveAvgPool2d", "out": [1, 2])", {}},
      {R"("Resize2d", "mode": "bilinear", "scale": 2, "align_corners": true)", {}},
      {R"("Pad2d", "top": 1, "bottom": 1, "left": 1, "right": 1, "rows": "reflect", "columns": "circular")",
       {}},
      {R"("PixelShuffle", "factor": 2)", {}}};
  for (const auto& [text, expected] : layers) {
    const Recipe recipe = recipe_from_json("{\"model\": {\"layer\": " + text + "}}");
    const std::unique_ptr<Module> model = recipe.build();
    std::map<std::string, Shape> found;
    for (const Parameter* p : model->parameters()) found[p->path()] = p->global_shape();
    EXPECT_EQ(found, expected) << text;
  }
  const auto shapes = [](const std::string& text) {
    const std::unique_ptr<Module> model = recipe_from_json(text).build();
    std::map<std::string, Shape> found;
    for (const Parameter* p : model->parameters()) found[p->path()] = p->global_shape();
    return found;
  };
  EXPECT_EQ(shapes(R"({"model": {"layer": "MoE", "dim": 4, "hidden": 6, "experts": 3, "kind": "relu",
      "shared_hidden": 5, "scale_outputs_by_load": true, "float8_dispatch": true, "init": 1, "down_init": 1,
      "router": {"top_k": 1, "bias": "weighs"}}})"),
            (std::map<std::string, Shape>{{"router.gate.weight", {3, 4}},
                                          {"router.expert_bias", {3}},
                                          {"experts.up_proj", {3, 6, 4}},
                                          {"experts.down_proj", {3, 4, 6}},
                                          {"shared_expert.gate_proj.weight", {5, 4}},
                                          {"shared_expert.up_proj.weight", {5, 4}},
                                          {"shared_expert.down_proj.weight", {4, 5}}}));
  EXPECT_EQ(shapes(R"({"model": {"layer": "MoE", "dim": 4, "experts": 3, "expert": {"layer": "Sequential",
      "children": [["up", {"layer": "Linear", "in": 4, "out": 6, "bias": true}], ["act", {"layer": "ReLU"}],
                   ["down", {"layer": "Linear", "in": 6, "out": 4}]]}}})"),
            (std::map<std::string, Shape>{{"router.gate.weight", {3, 4}},
                                          {"experts.up.weight", {3, 6, 4}},
                                          {"experts.up.bias", {3, 6}},
                                          {"experts.down.weight", {3, 4, 6}}}));
  const auto of_block = shapes(R"({"model": {"layer": "MoEBlock", "dim": 8, "heads": 2, "max_seq": 16,
      "experts": 3, "expert_hidden": 5}})");
  EXPECT_EQ(of_block.at("mlp.experts.gate_proj"), (Shape{3, 5, 8}));
  EXPECT_EQ(of_block.size(), 10U);
  const auto block = recipe_from_json(R"({"model": {"layer": "TransformerBlock", "dim": 8, "heads": 2,
      "kv_heads": 1, "max_seq": 16, "ffn_hidden": 12}})")
                         .build();
  EXPECT_EQ(block->parameters().size(), 9U);
  EXPECT_EQ(recipe_from_json(R"({"pipeline": ["a"], "model": {"layer": "ReLU"}})").pipeline,
            std::vector<std::string>{"a"});
  const Recipe cut = recipe_from_json(
      R"({"pipeline": ["*"], "border": ["input.0", "input.1", 5], "model": {"layer": "ReLU"}})");
  EXPECT_EQ(cut.border({2, 3, 4}), (Shape{2, 3, 5}));
  EXPECT_EQ(test::error_text([&] { cut.border({2}); }),
            "bad_argument: recipe: border: input.1 of an input of shape (2)");
  EXPECT_EQ(recipe_from_json(R"({"transformer": {"dim": 16, "heads": 4, "vocab": 32}})").tokens->vocab, 32);
  EXPECT_EQ(recipe_from_json(R"({"weather": {"dim": 8, "depth": 1, "head_dim": 4, "local_window": 2,
      "global_window": 2}})")
                .name,
            "weather stage");
}

// Every key of a mixture of experts. The config of the model has what the text says.
TEST(FromJson, AMixtureOfExperts) {
  const Recipe recipe = recipe_from_json(R"({"moe": {"dim": 16, "layers": 4, "heads": 4, "kv_heads": 2,
      "ffn_hidden": 24, "vocab": 32, "max_seq": 8, "tied": true, "experts": 6, "expert_hidden": 12,
      "shared_hidden": 10, "kind": "gelu", "every": 2, "scale_outputs_by_load": true, "float8_dispatch": true,
      "router": {"top_k": 3, "scores": "sigmoid", "normalise": false, "bias": "selects", "noise": 0.5,
                 "capacity": "by_weight", "capacity_factor": 1.25, "balance": "sequence", "aux_loss": 0.1,
                 "z_loss": 0.2}}})");
  EXPECT_EQ(recipe.name, "mixture of experts");
  const std::unique_ptr<Module> model = recipe.build();
  const MoETransformerConfig& c = dynamic_cast<MoETransformer&>(*model).moe_config();
  EXPECT_TRUE(c.transformer.dim == 16 && c.transformer.kv_heads == 2 && c.transformer.tied);
  EXPECT_TRUE(c.experts == 6 && c.expert_hidden == 12 && c.shared_hidden == 10 && c.every == 2);
  EXPECT_TRUE(c.kind == ExpertKind::gelu && c.scale_outputs_by_load && c.float8_dispatch);
  const RouterOptions& r = c.router;
  EXPECT_TRUE(r.top_k == 3 && r.scores == RouterScores::sigmoid && !r.normalise && r.noise == 0.5);
  EXPECT_TRUE(r.bias == RouterBias::selects && r.capacity == Capacity::by_weight &&
              r.capacity_factor == 1.25);
  EXPECT_TRUE(r.balance == Balance::sequence && r.aux_loss == 0.1 && r.z_loss == 0.2);

  const BuildOptions options = build_options_from_json(R"({"expert_axis": "ep", "uneven_experts": true})");
  EXPECT_TRUE(options.expert_axis == "ep" && options.experts.uneven);
  for (
      const auto& [text, error] : std::vector<std::pair<std::string, std::string>>{
          {R"({"moe": {"expert": 8}})",
           "recipe: moe has no \"expert\" (a mixture of experts); is experts or expert_hidden meant?"},
          {R"({"moe": {"router": {"bias": "select"}}})",
           "recipe: moe.router.bias is \"select\"; expected none, selects, weighs; is selects meant?"},
          {R"({"moe": {"router": 2}})", "recipe: moe.router is 2; expected an object"},
          {R"({"moe": {"every": 0}})", "moe: every is 0; expected 1 to 4 (layers)"},
          {R"({"model": {"layer": "MoE", "dim": 4, "experts": 2, "hidden": 6, "expert": {"layer": "ReLU"}}})",
           "recipe: model.hidden is 6; expected none beside expert, whose layers know it"},
          {R"({"model": {"layer": "MoE", "dim": 4, "experts": 2, "expert": {"layer": "ReLU", "x": 1}}})",
           "recipe: model.expert has no \"x\" (ReLU)"},
          {R"({"model": {"layer": "MoE", "dim": 4, "hidden": 6}})",
           "recipe: model has no \"experts\"; expected one"}})
    expect_error(ErrorCode::bad_argument, error, [&, &of = text] { return recipe_from_json(of).name; });
}

TEST(FromJson, ErrorsOfRecipesNameThePlace) {
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"{", "recipe is no JSON (byte 2 of its 1)"},
      {"[]", "recipe: it is []; expected an object"},
      {"{}", "recipe: it has no \"model\"; expected one"},
      {R"({"model": {"layer": "ReLU"}, "border": ["output.0"]})",
       "recipe: border is [\"output.0\"]; expected a list of extents, of 1 or more, or \"input.0\" to "
       "\"input.7\""},
      {R"({"model": {"layer": "ReLU"}, "border": [0]})",
       "recipe: border is [0]; expected a list of extents, of 1 or more, or \"input.0\" to \"input.7\""},
      {R"({"model": {"layer": "ReLU"}, "los": "cross_entropy"})",
       "recipe: it has no \"los\" (a recipe); is loss meant?"},
      {R"({"model": {"layer": "ReLU"}, "loss": "cros_entropy"})",
       "recipe: loss is \"cros_entropy\"; expected cross_entropy, mean_squared_error, binary_cross_entropy; "
       "is "
       "cross_entropy meant?"},
      {R"({"model": {"layer": "Conv2", "in": 1}})",
       "recipe: model.layer is \"Conv2\"; expected one of AdaptiveAvgPool2d, AvgPool2d, BatchNorm, "
       "ChannelFeedForward, ChannelNorm, Conv2d, ConvTranspose2d, Dropout, Embedding, GELU, GroupNorm, "
       "LayerNorm, Linear, MaxPool2d, MoE, MoEBlock, Pad2d, PixelShuffle, RMSNorm, ReLU, Residual, Resize2d, "
       "Sequential, "
       "SwiGLU, TransformerBlock; is Conv2d meant?"},
      {R"({"model": {"layer": "Sequential", "children": [["a", {"layer": "Conv2d", "in": 1, "out": 2, "kernal": 3}]]}})",
       "recipe: model.a has no \"kernal\" (Conv2d); is kernel meant?"},
      {R"({"model": {"layer": "Conv2d", "in": 1, "out": 2, "kernel": "3"}})",
       "recipe: model.kernel is \"3\"; expected a number, or [height, width]"},
      {R"({"model": {"layer": "Linear", "in": 1.5, "out": 2}})",
       "recipe: model.in is 1.5; expected an integer"},
      {R"({"model": {"layer": "Linear", "in": 1}})", "recipe: model has no \"out\"; expected one"},
      {R"({"model": {"layer": "Sequential", "children": [1]}})",
       "recipe: model.children has 1; expected [name, layer]"},
      {R"({"model": {"layer": "Linear", "in": 1, "out": 1, "init": "x"}})",
       "recipe: model.init is \"x\"; expected a standard deviation, or {\"constant\": c}"},
      {R"({"model": {"layer": "Sequential", "children": {}}})",
       "recipe: model.children is {}; expected a list of [name, layer]"},
      {R"({"model": {"layer": "LayerNorm", "dim": [1.5]}})",
       "recipe: model.dim is [1.5]; expected a number, or a list of sizes"},
      {R"({"transformer": {}, "transformers": 1})",
       "recipe: it has no \"transformers\" (a recipe of a transformer); is transformer meant?"},
      {R"({"weather": {}, "weathers": 1})",
       "recipe: it has no \"weathers\" (a recipe of a weather model); is weather meant?"},
      {R"({"moe": {}, "moes": 1})",
       "recipe: it has no \"moes\" (a recipe of a mixture of experts); is moe meant?"},
      {R"({"transformer": {"dims": 8}})",
       "recipe: transformer has no \"dims\" (a transformer); is dim meant?"},
      {R"({"weather": {"size": 8}})", "recipe: weather has no \"size\" (a weather model)"}};
  for (const auto& [text, error] : wrong)
    expect_error(ErrorCode::bad_argument, error, [&, &of = text] { return recipe_from_json(of).name; });
  const std::string of_layer =
      test::error_text([] { return recipe_from_json(R"({"model": {"layer": "Dropout", "p": 2}})").name; });
  EXPECT_TRUE(of_layer.starts_with("bad_argument: recipe: model: ")) << of_layer;
}

TEST(FromJson, GroupsOfParametersHaveTheirKeys) {
  expect_error(
      ErrorCode::bad_argument, "options: groups[0] has no \"rat\" (a group of parameters); is rate meant?",
      [] { return trainer_options_from_json(R"({"groups": [{"patterns": ["a"], "rat": 1}]})").max_norm; });
}

TEST(FromJson, LayersOfTheProgramAndAPlan) {
  const OwnLayer twice{"Twice", [] { return std::make_unique<Linear>(2, 2, false, Constant{2}); }};
  const Recipe recipe = recipe_from_json(
      R"({"plan": {"a": "column", "b": "row"}, "model": {"layer": "Sequential",
          "children": [["a", {"layer": "Twice"}], ["b", {"layer": "Twice"}], ["c", {"layer": "ReLU"}]]}})",
      {twice});
  const std::unique_ptr<Module> model = recipe.build();
  EXPECT_EQ(std::get<Constant>(model->parameter("b.weight")->init()).value, 2);
  EXPECT_NE(model->parameter("a.weight"), model->parameter("b.weight"));
  EXPECT_EQ(model->own_plan().styles, (std::vector<OwnPlan::Entry>{{"a", "column"}, {"b", "row"}}));

  const std::string text = R"({"model": {"layer": "Twice"}})";
  const auto refused = [&](const OwnLayers& own, const std::string& error) {
    expect_error(ErrorCode::bad_argument, error, [&] { return recipe_from_json(text, own).name; });
  };
  const std::string taken = "\"; expected a name that no layer of the library and no other of these has";
  refused({twice, twice}, "recipe: a layer of the program is called \"Twice" + taken);
  refused({{"ReLU", twice.make}}, "recipe: a layer of the program is called \"ReLU" + taken);
  refused({{"", twice.make}}, "recipe: a layer of the program is called \"" + taken);
  refused({{"Twice", {}}}, "recipe: the layer \"Twice\" has no make; expected a function");
  for (const auto& [plan, error] : std::vector<std::pair<std::string, std::string>>{
           {"[1]", "recipe: plan is [1]; expected an object with styles by paths"},
           {R"({"a": 1})", "recipe: plan is {\"a\":1}; expected an object with styles by paths"},
           {R"({"a": "colum"})",
            "recipe: plan: \"a\": style \"colum\"; expected one of enter, column, column_gathered, row, "
            "vocabulary, "
            "sequence, cut_sequence, gather_sequence, feeds_columns, fed_column"}})
    expect_error(ErrorCode::bad_argument, error, [&, &of = plan] {
      return recipe_from_json(R"({"model": {"layer": "ReLU"}, "plan": )" + of + "}").name;
    });
}

TEST(FromJson, Options) {
  const BuildOptions build = build_options_from_json(
      R"({"data_axis": "d", "tensor_axis": "t", "replicate_axis": "r", "domain_axes": ["h"], "data": "fsdp",
          "reshard_after_forward": 2, "reduce": "bf16", "seed": 18446744073709551615, "dtype": "bf16",
          "activations": "bf16", "frozen": ["a"], "float8": "rowwise", "float8_scales": "whole", "ac": "selective", "ac_modules": ["m"],
          "ac_every": 2, "sequence_parallel": true, "split_vocab": true, "loss_chunk": 64, "exact": true, "compile_model": true, "pipeline_axis": "pp", "pipeline": "gpipe", "stages_per_rank": 2,
          "stage_weights": [1, 2.5], "keep_weights": false})");
  EXPECT_EQ(build.data_axis + build.tensor_axis + build.replicate_axis + build.domain_axes.at(0), "dtrh");
  EXPECT_EQ(build.data, DataForm::fsdp);
  EXPECT_EQ(build.sharding.precision.reduce, DType::bf16);
  EXPECT_EQ(build.seed, ~std::uint64_t{0});
  EXPECT_TRUE(build.dtype == DType::bf16 && build.activations == DType::bf16);
  EXPECT_EQ(build.frozen, std::vector<std::string>{"a"});
  EXPECT_EQ(build.float8, Float8Recipe::rowwise);
  EXPECT_EQ(build.float8_options.scales, Float8Scales::whole);
  EXPECT_TRUE(build.ac.mode == AcMode::selective && build.ac.every == 2 && build.ac.modules.size() == 1);
  EXPECT_TRUE(build.tensor.sequence_parallel && build.tensor.vocab == VocabSplit::shard);
  EXPECT_TRUE(build.exact == Exact::yes && build.compile_model && build.loss_chunk == 64);
  EXPECT_TRUE(build.pipeline_axis == "pp" && build.pipeline.kind == PipelineKind::gpipe &&
              build.pipeline.stages_per_rank == 2);
  EXPECT_EQ(build.pipeline.weights, (std::vector{1, 2.5}));
  EXPECT_FALSE(build.pipeline.keep_weights);

  const Trainer::Options trainer = trainer_options_from_json(
      R"({"optimizer": {"name": "muon", "momentum": 0.5, "scale": "original", "adamw_for": ["head"]},
          "groups": [{"patterns": ["a"], "rate": 0.5, "weight_decay": 0}], "max_norm": 2, "non_finite": "skip",
          "seed": 7, "loss_scale": 8, "label_smoothing": 0.1, "z_loss": 0.01, "freeze": "0:frozen:a",
          "ema": 0.9, "ema_warm_up": true})");
  const auto& muon = std::get<Muon::Options>(trainer.optimizer);
  EXPECT_TRUE(muon.momentum == 0.5 && muon.scale == Muon::Scale::original && muon.adamw_for.at(0) == "head");
  EXPECT_TRUE(trainer.groups.at(0).rate == 0.5 && trainer.groups.at(0).weight_decay == 0.0);
  EXPECT_TRUE(trainer.max_norm == 2 && trainer.non_finite == NonFinite::skip && trainer.seed == 7);
  EXPECT_TRUE(trainer.loss_scale->scale == 8 && trainer.label_smoothing == 0.1 && trainer.z_loss == 0.01);
  EXPECT_TRUE(trainer.ema->decay == 0.9 && trainer.ema->warm_up);
  const auto of = [](const char* name) {
    return trainer_options_from_json("{\"optimizer\": \"" + std::string(name) + "\"}").optimizer.index();
  };
  EXPECT_EQ((std::vector{of("adamw"), of("sgd"), of("lion"), of("schedule_free_adamw"), of("muon")}),
            (std::vector<std::size_t>{0, 1, 2, 3, 4}));
}

TEST(FromJson, AWarmUpOfAveragesNeedsThem) {
  expect_error(ErrorCode::bad_argument, "options: ema_warm_up is true; expected a decay in ema",
               [] { return trainer_options_from_json(R"({"ema_warm_up": true})").seed; });
  EXPECT_FALSE(trainer_options_from_json(R"({"ema_warm_up": false})").ema);
}

TEST(FromJson, ErrorsOfOptions) {
  const auto build = [](const std::string& text, const std::string& error) {
    expect_error(ErrorCode::bad_argument, error, [&] { return build_options_from_json(text).seed; });
  };
  build(R"({"sed": 1})", "options: it has no \"sed\" (build options); is seed meant?");
  build(R"({"data": "zero"})", "options: data is \"zero\"; expected ddp, fsdp");
  build(R"({"seed": -1})", "options: seed is -1; expected an integer from 0 to 2^64 - 1");
  build(R"({"exact": 1})", "options: exact is 1; expected true or false");
  build(R"({"frozen": "a"})", "options: frozen is \"a\"; expected a list of texts");
  build(R"({"data_axis": 1})", "options: data_axis is 1; expected a text");
  build(R"({"float8": "mxfp8"})",
        "options: float8: float8: the recipe is \"mxfp8\"; expected tensorwise, rowwise or rowwise_gw_hp");
  build(R"({"float8": "rowwise", "float8_scales": "all"})",
        "options: float8_scales is \"all\"; expected own, whole");
  build(R"({"float8_scales": "whole"})", "options: float8_scales is \"whole\"; expected a recipe in float8");
  const auto trainer = [](const std::string& text, const std::string& error) {
    expect_error(ErrorCode::bad_argument, error, [&] { return trainer_options_from_json(text).seed; });
  };
  trainer(R"({"optimiser": "sgd"})",
          "options: it has no \"optimiser\" (options of a trainer); is optimizer meant?");
  trainer(
      R"({"optimizer": "adam"})",
      "options: optimizer.name is \"adam\"; expected adamw, sgd, lion, schedule_free_adamw, muon; is adamw "
      "meant?");
  trainer(R"({"optimizer": {"name": "sgd", "beta1": 0.9}})", "options: optimizer has no \"beta1\" (sgd)");
  trainer(R"({"groups": [{"rate": 1}]})", "options: groups[0] has no \"patterns\"; expected one");
  trainer(R"({"max_norm": "1"})", "options: max_norm is \"1\"; expected a number");
}

}  // namespace
}  // namespace weft::from_json_test
