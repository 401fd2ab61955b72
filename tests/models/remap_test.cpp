// Weights of other programs under their names, brought to this library's: what is renamed, split and refused,
// and the numbers of a stage whose weights were stored with convolutions.
#include "weft/models/remap.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>

#include "support/errors.hpp"
#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/random.hpp"
#include "weft/checkpoint/convert.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/spectral_norm.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::remap_test {
namespace {

using test::error_text;
using test::Golden;

NamedTensors with_prefix(Golden& golden, const std::string& prefix) {
  NamedTensors all;
  for (const std::string& name : golden.names(prefix))
    all.emplace(name.substr(prefix.size()), golden.tensor(name));
  return all;
}

void expect_equal(const NamedTensors& got, const NamedTensors& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    const auto found = got.find(name);
    ASSERT_NE(found, got.end()) << name;
    EXPECT_EQ(found->second.shape(), tensor.shape()) << name;
    EXPECT_TRUE(std::ranges::equal(found->second.f32(), tensor.f32())) << name;
  }
}

struct Remap : ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(Remap, GivesTheNewNamesAndShapes) {
  Golden golden(GetParam());
  const NamedTensors old = with_prefix(golden, "old."), expected = with_prefix(golden, "new.");
  ASSERT_FALSE(old.empty());
  const NamedTensors remapped = remap_conv_weights(golden.context, old);
  expect_equal(remapped, expected);
  expect_equal(remap_conv_weights(golden.context, remapped), expected);  // again: nothing changes
}

// The stage loads the weights, including buffers of spectral norms, and gives the output of the file if the
// file has one.
TEST_P(Remap, AStageTakesThem) {
  Golden golden(GetParam());
  const nlohmann::json& c = golden.config();
  WeatherStageConfig s;
  s.dim = c.at("dim"), s.depth = c.at("depth"), s.head_dim = c.at("dim_head");
  s.local_window = c.at("local_window_size"), s.global_window = c.at("global_window_size");
  WeatherStage stage(s);
  if (c.at("spectral_norm").get<bool>()) add_spectral_norm(stage);
  materialise(stage, golden.compute);
  const std::string prefix = c.at("stage_prefix");
  const NamedTensors remapped = remap_conv_weights(golden.context, with_prefix(golden, "old." + prefix));
  ASSERT_EQ(remapped.size(), stage.parameters().size() + stage.buffers().size());
  for (Parameter* p : stage.parameters()) p->set_master(remapped.at(p->path()));
  for (ModuleBuffer* b : stage.buffers()) {
    const Tensor& from = remapped.at(b->path());
    ASSERT_EQ(from.shape(), b->global_shape()) << b->path();
    std::ranges::copy(from.f32(), b->tensor().f32().begin());
  }
  if (golden.names("out.").empty()) return;
  Frame frame = Frame::inference(golden.compute);
  const Tensor y = stage.forward(golden.tensor("in.x"), frame)[0];
  const std::vector<double> reference = golden.values("out.y");
  double largest = 0;
  for (const double value : reference) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < reference.size(); ++i) ASSERT_NEAR(y.f32()[i], reference[i], 4e-6 * largest);
}

// A checkpoint with old names is loaded on one rank and on two, where the projections are cut; a line of the
// log reports it. After conversion it has the current names, and no line is logged.
TEST_P(Remap, ACheckpointWithOldNamesIsLoaded) {
  const test::TemporaryFolder folder;
  {
    const Golden golden(GetParam());
    const std::string prefix = std::string("old.") + golden.config().at("stage_prefix").get<std::string>();
    ConvertOptions options;
    options.rename = [&](std::string_view name) {
      if (!name.starts_with(prefix)) return std::string();
      const bool buffer = name.ends_with(".weight_u") || name.ends_with(".weight_v");
      return (buffer ? "buffer." : "param.") + std::string(name.substr(prefix.size()));
    };
    convert_checkpoint(GetParam(), folder / "old", options);
    convert_checkpoint(folder / "old", folder / "new", {.remap = remap_old_names});
  }
  for (const int ranks : {1, 2})
    for (const char* run : {"old", "new"}) {
      SCOPED_TRACE(fmt::format("{} on {}", run, ranks));
      std::mutex mutex;
      std::vector<std::string> lines;
      test::RankOptions options;
      options.context.log_sink = [&](LogLevel, std::string_view line) {
        const std::lock_guard lock(mutex);
        if (line.find("load_checkpoint") != line.npos) lines.emplace_back(line);
      };
      test::run_ranks(
          test::Ranks::threads, ranks,
          [&](test::Rank& rank) {
            Golden golden(GetParam());
            const nlohmann::json& c = golden.config();
            WeatherStageConfig s;
            s.dim = c.at("dim"), s.depth = c.at("depth"), s.head_dim = c.at("dim_head");
            s.local_window = c.at("local_window_size"), s.global_window = c.at("global_window_size");
            WeatherStage stage(s);
            if (c.at("spectral_norm").get<bool>()) add_spectral_norm(stage);
            const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", ranks}});
            Compute compute(rank.context, 1);
            parallelize(stage, mesh["tp"], OwnPlanOptions{.under_spectral_norm = WholeByDefault::split});
            replicate(stage, mesh);
            materialise(stage, compute);
            const CheckpointInfo info = load_checkpoint(folder / run, mesh, stage, nullptr);
            EXPECT_EQ(info.remapped.empty(), std::string_view(run) == "new");
            const std::string prefix = std::string("new.") + c.at("stage_prefix").get<std::string>();
            for (Parameter* p : stage.parameters())
              EXPECT_TRUE(
                  std::ranges::equal(full(p->master()).f32(), golden.tensor(prefix + p->path()).f32()))
                  << p->path();
            for (ModuleBuffer* b : stage.buffers())
              EXPECT_TRUE(
                  std::ranges::equal(full(b->tensor()).f32(), golden.tensor(prefix + b->path()).f32()))
                  << b->path();
          },
          options);
      ASSERT_EQ(lines.size(), std::string_view(run) == "old" ? 1u : 0u);
      if (!lines.empty()) {
        EXPECT_THAT(lines[0], ::testing::HasSubstr("tensors were stored under older names or shapes: "));
      }
    }
}

// ---- Spectral norms in torch's other form, loaded and then split ----

// A state dict of this library's form as torch.nn.utils.parametrizations.spectral_norm stores it.
NamedTensors in_other_form(const NamedTensors& state) {
  NamedTensors other;
  for (const auto& [name, tensor] : state) {
    std::string to = name;
    for (const auto& [ours, torchs] : {std::pair{"weight_orig", "parametrizations.weight.original"},
                                       {"weight_u", "parametrizations.weight.0._u"},
                                       {"weight_v", "parametrizations.weight.0._v"}})
      if (name.ends_with(std::string(".") + ours))
        to = name.substr(0, name.size() - std::string_view(ours).size()) + torchs;
    other.emplace(to, tensor);
  }
  return other;
}

// Without the norms of the last two of a stage's four modules with a plan.
NamedTensors with_half_of_the_norms(const NamedTensors& state) {
  NamedTensors some;
  for (const auto& [name, tensor] : state) {
    const bool plain = name.starts_with("layers.0.2.") || name.starts_with("layers.0.3.");
    if (plain && name.ends_with(".weight_orig"))
      some.emplace(name.substr(0, name.size() - std::string_view("_orig").size()), tensor);
    else if (!plain || !(name.ends_with(".weight_u") || name.ends_with(".weight_v")))
      some.emplace(name, tensor);
  }
  return some;
}

// Adds the norms that are stored in the other form to their layers, and returns how many there are.
int add_stored_norms(WeatherStage& stage, const NamedTensors& stored) {
  constexpr std::string_view kOriginal = ".parametrizations.weight.original";
  int count = 0;
  for (const auto& [name, tensor] : stored)
    if (name.ends_with(kOriginal)) {
      Module& layer = stage.get(name.substr(0, name.size() - kOriginal.size()));
      dynamic_cast<WeightedLayer&>(layer).add_spectral_norm();
      ++count;
    }
  return count;
}

void load(WeatherStage& stage, const NamedTensors& state) {
  ASSERT_EQ(state.size(), stage.parameters().size() + stage.buffers().size());
  const auto own = [&](const std::string& path, const LayoutRef& layout) {
    const Tensor& whole = state.at(path);
    return layout ? distribute(whole, layout) : whole;
  };
  for (Parameter* p : stage.parameters()) p->set_master(own(p->path(), p->layout()));
  for (ModuleBuffer* b : stage.buffers()) {
    const Tensor from = own(b->path(), b->layout());
    ASSERT_EQ(from.shape(), b->tensor().shape()) << b->path();
    std::ranges::copy(from.f32(), b->tensor().f32().begin());
  }
}

// Sums in another order, of softmax scores and through two power iterations.
void expect_near(const Tensor& got, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(got.shape(), expected.shape()) << what;
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < expected.f32().size(); ++i) {
    const double value = expected.f32()[i];
    largest = std::max(largest, std::abs(value));
    worst = std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - value));
  }
  EXPECT_GT(largest, 0) << what;
  EXPECT_LE(worst, 1e-4 * largest) << what;
}

struct Expected {
  int norms, split, skipped;
  std::string log;  // the line about it, if there are several ranks
};

// The stage of `ours`, stored in the other form, over tp ranks, and the same as it is on one: two passes of a
// training, each with y, dx, all gradients, u and v.
void expect_as_serial(test::Rank& rank, const WeatherStageConfig& config, const NamedTensors& ours,
                      const Expected& expected) {
  const NamedTensors stored = in_other_form(ours);
  const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", rank.size}});
  Compute compute(rank.context);
  WeatherStage serial(config), parallel(config);
  for (WeatherStage* stage : {&serial, &parallel})
    EXPECT_EQ(add_stored_norms(*stage, stored), expected.norms);
  const OwnPlanCount count = parallelize(parallel, mesh["tp"]);
  EXPECT_EQ(count.split, expected.split);
  EXPECT_EQ(count.skipped, expected.skipped);
  int cut = 0;
  for (const Parameter* p : parallel.parameters())
    if (p->layout() != nullptr && !(p->local_shape() == p->global_shape())) {
      EXPECT_EQ(p->path().find("_orig"), std::string::npos) << p->path();
      ++cut;
    }
  EXPECT_EQ(cut > 0, expected.split > 0 && rank.size > 1);
  replicate(parallel, mesh);
  for (WeatherStage* stage : {&serial, &parallel}) materialise(*stage, compute);
  load(serial, ours);
  load(parallel, remap_spectral_norm_names(stored));
  for (int pass = 0; pass < 2; ++pass) {
    const auto random = [&](const char* name) {
      const Tensor t(rank.context, {2, config.dim, 4, 8});
      RandomStream(static_cast<std::uint64_t>(pass), name).normal(0, t.count(), t.f32().data());
      return t;
    };
    const auto stated = [&](const Tensor& t) { return t.with_layout(replicated_layout(mesh, t.shape())); };
    const Tensor x = random("x"), dy = random("dy");
    Frame plain(compute), frame(compute);
    expect_near(full(parallel.forward({stated(x)}, frame)[0]), serial.forward({x}, plain)[0], "y");
    expect_near(full(parallel.backward({stated(dy)}, frame)[0]), serial.backward({dy}, plain)[0], "dx");
    for (Parameter* p : serial.parameters()) {
      const ParameterRef other = parallel.parameter(p->path());
      ASSERT_TRUE(other->has_gradient()) << p->path();
      if (p->path().ends_with("dpb.layers.9.bias"))
        continue;  // added to all scores of a softmax: 0 up to rounding
      expect_near(full(other->gradient()), p->gradient(), p->path());
    }
    for (std::size_t i = 0; i < serial.buffers().size(); ++i)
      expect_near(full(parallel.buffers()[i]->tensor()), serial.buffers()[i]->tensor(),
                  serial.buffers()[i]->path());
  }
}

// `state` makes the weights of a stage whose 20 layers all have norms, in this library's form; each rank
// calls it.
void expect_as_serial(const WeatherStageConfig& config, const std::function<NamedTensors(Compute&)>& state) {
  for (const int ranks : {1, 2, 4})
    for (const bool all : {true, false}) {
      SCOPED_TRACE(fmt::format("{} norms on {} ranks", all ? 20 : 10, ranks));
      const Expected expected =
          all ? Expected{20, 0, 4,
                         fmt::format("NOTHING is split over tp={}: each of the 4 modules with a plan has a "
                                     "layer with a spectral norm and stays whole, so every rank computes all "
                                     "of the model: \"layers.0.0\", \"layers.0.1\", \"layers.0.2\", "
                                     "\"layers.0.3\"",
                                     ranks)}
              : Expected{10, 2, 2,
                         fmt::format("2 of 4 modules with a plan are split over tp={}; 2 stay whole, since a "
                                     "layer has a spectral norm: \"layers.0.0\", \"layers.0.1\"",
                                     ranks)};
      std::mutex mutex;
      std::vector<std::string> lines;
      test::RankOptions options;
      options.context.log_sink = [&](LogLevel level, std::string_view line) {
        const std::lock_guard lock(mutex);
        if (line.find("parallelize: ") == line.npos) return;
        EXPECT_EQ(level, all ? LogLevel::error : LogLevel::warning);
        lines.emplace_back(line);
      };
      test::run_ranks(
          test::Ranks::threads, ranks,
          [&](test::Rank& rank) {
            Compute compute(rank.context);
            const NamedTensors ours = state(compute);
            expect_as_serial(rank, config, all ? ours : with_half_of_the_norms(ours), expected);
          },
          options);
      ASSERT_EQ(lines.size(), ranks > 1 ? 1u : 0u);  // once for all ranks
      if (!lines.empty()) {
        EXPECT_THAT(lines[0], ::testing::EndsWith("parallelize: " + expected.log));
      }
    }
}

TEST(SpectralNormInTheOtherForm, PairsAreSkippedAndAllIsAsOnOneRank) {
  WeatherStageConfig config;
  config.dim = 32, config.depth = 1, config.head_dim = 8, config.init_std = 0.5;
  config.local_window = config.global_window = 2;
  expect_as_serial(config, [&](Compute& compute) {
    WeatherStage stage(config);
    add_spectral_norm(stage);
    materialise(stage, compute);
    initialise(stage, 3);
    NamedTensors state;
    for (const Parameter* p : stage.parameters()) state.emplace(p->path(), p->master());
    for (const ModuleBuffer* b : stage.buffers()) state.emplace(b->path(), b->tensor());
    return state;
  });
}

TEST_P(Remap, AStageWithNormsInTheOtherFormIsAsOnOneRank) {
  const Golden golden(GetParam());
  const nlohmann::json& c = golden.config();
  if (!c.at("spectral_norm").get<bool>()) return;  // the other file
  WeatherStageConfig config;
  config.dim = c.at("dim"), config.depth = c.at("depth"), config.head_dim = c.at("dim_head");
  config.local_window = c.at("local_window_size"), config.global_window = c.at("global_window_size");
  expect_as_serial(config, [&](Compute& compute) {
    Golden own(GetParam());
    const std::string prefix = "old." + c.at("stage_prefix").get<std::string>();
    NamedTensors state = remap_conv_weights(own.context, with_prefix(own, prefix));
    for (auto& [name, tensor] : state) tensor = tensor.clone(compute.context());  // the file's context goes
    return state;
  });
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(Golden, Remap, ::testing::ValuesIn(test::golden_files("credit_conv_remap")),
                         file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Remap);

TEST(RemapGolden, FilesArePresent) { test::expect_golden({"credit_conv_remap"}); }

struct RemapNames : ::testing::Test {
  Context context;
  Tensor zeros(const Shape& shape) { return Tensor::zeros(context, shape); }
  std::string refused(const NamedTensors& stored) {
    return error_text(ErrorCode::bad_argument, [&] { remap_conv_weights(context, stored); });
  }
};

TEST_F(RemapNames, OthersStay) {
  const NamedTensors stored{{"dpb.layers.1.weight", zeros({4, 4})},
                            {"into_qkv.weight", zeros({3, 2, 1, 1})},
                            {"layers.4.weight", zeros({4, 2, 3, 3})},
                            {"convs.layers.0.weight", zeros({4, 2, 1, 1})}};
  expect_equal(remap_conv_weights(context, stored), stored);
}

TEST_F(RemapNames, CopiesHaveTheirOwnMemory) {
  NamedTensors got = remap_conv_weights(context, {{"to_qkv.weight_v", zeros({2})}});
  got.at("to_k.weight_v").f32()[0] = 1;
  EXPECT_EQ(got.at("to_q.weight_v").f32()[0], 0);
  EXPECT_EQ(got.at("to_v.weight_v").f32()[0], 0);
}

TEST_F(RemapNames, RefusesWhatIsNoneOfThese) {
  EXPECT_EQ(
      refused({{"a.to_qkv.weight", zeros({4, 2, 1, 1})}}),
      "remap_conv_weights: \"a.to_qkv.weight\" is (4, 2, 1, 1); expected rows of q, k and v, as many of "
      "each");
  EXPECT_EQ(refused({{"to_qkv.weight", zeros({6, 2, 3, 3})}}),
            "remap_conv_weights: \"to_qkv.weight\" is (6, 2, 3, 3); expected (3 n, dim, 1, 1)");
  EXPECT_EQ(refused({{"to_qkv.weight_u", zeros({6, 1})}}),
            "remap_conv_weights: \"to_qkv.weight_u\" is (6, 1); expected (3 n)");
  EXPECT_EQ(refused({{"to_qkv.weight_v", zeros({6, 1})}}),
            "remap_conv_weights: \"to_qkv.weight_v\" is (6, 1); expected (dim)");
  EXPECT_EQ(refused({{"to_q.weight", zeros({1, 2})}, {"to_qkv.weight", zeros({3, 2, 1, 1})}}),
            "remap_conv_weights: \"to_qkv.weight\" becomes \"to_q.weight\", which is there already");
}

TEST_F(RemapNames, BothFormsOfASpectralNorm) {
  const NamedTensors stored{{"a.parametrizations.weight.original", zeros({2, 3})},
                            {"a.parametrizations.weight.0._u", zeros({2})},
                            {"a.parametrizations.weight.0._v", zeros({3})},
                            {"b.weight_orig", zeros({1, 1})},
                            {"parametrizations.weight.original", zeros({2, 2})}};
  const NamedTensors expected{{"a.weight_orig", zeros({2, 3})},
                              {"a.weight_u", zeros({2})},
                              {"a.weight_v", zeros({3})},
                              {"b.weight_orig", zeros({1, 1})},
                              {"weight_orig", zeros({2, 2})}};
  expect_equal(remap_spectral_norm_names(stored), expected);
  expect_equal(remap_spectral_norm_names(expected), expected);
  NamedTensors both = stored;
  both.emplace("a.weight_u", zeros({2}));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { remap_spectral_norm_names(both); }),
            "remap_spectral_norm_names: \"a.weight_u\" becomes \"a.weight_u\", which is there already");
}

}  // namespace
}  // namespace weft::remap_test
