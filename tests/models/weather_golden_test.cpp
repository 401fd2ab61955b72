// The layers of a weather model against the numbers of another implementation, on one rank and split over
// several: every file of a case's name that lies in the golden folder, every shape and constant from the
// file.
#include <gtest/gtest.h>

#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/weather.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/gradients.hpp"

namespace weft::weather_golden_test {
namespace {

using test::Golden;
using test::Rank;
using test::Ranks;

struct Case {
  std::unique_ptr<Module> module;
  std::int64_t heads;  // 0: none
};

Case case_of(const Golden& golden) {
  const nlohmann::json& c = golden.config();
  const auto number = [&](const char* name) { return c.at(name).get<std::int64_t>(); };
  if (c.contains("window_size")) {
    WindowAttentionConfig a;
    a.dim = number("dim"), a.heads = number("heads"), a.head_dim = number("dim_head"),
    a.window = number("window_size");
    a.windows = c.at("attn_type") == "short" ? Windows::neighbours : Windows::strided;
    EXPECT_EQ(number("inner_dim"), a.heads * a.head_dim);
    return {std::make_unique<WindowAttention>(a), a.heads};
  }
  if (c.contains("hidden")) return {std::make_unique<ChannelFeedForward>(number("dim"), number("hidden")), 0};
  WeatherStageConfig s;
  s.dim = number("dim"), s.depth = number("depth"), s.head_dim = number("dim_head");
  s.local_window = number("local_window_size"), s.global_window = number("global_window_size");
  return {std::make_unique<WeatherStage>(s), s.heads()};
}

bool of_position_bias(const std::string& path) { return path.find("dpb.") != std::string::npos; }

// Names what a parameter of the case is on the axis tp: by the last two steps of its path.
std::string expected_placement(const std::string& path) {
  for (const char* column : {"to_q.weight", "to_k.weight", "to_v.weight"})
    if (path.ends_with(column)) return "Shard(0)";
  if (path.ends_with("to_out.weight")) return "Shard(1)";
  if (of_position_bias(path)) return "Replicate";
  if (path.ends_with("layers.1.weight") || path.ends_with("layers.1.bias")) return "Shard(0)";
  if (path.ends_with("layers.4.weight")) return "Shard(1)";
  return "Replicate";
}

// Compares a gradient with the file's. The gradient of the last bias of a position bias is 0 up to rounding,
// since it is added to all logits of a softmax, and the file's own error may be 0, too: it gets the limit of
// the weight beside it, whose gradient is a sum of the same terms with factors of order one.
void compare_gradient(Golden& golden, const Parameter& p) {
  const std::string name = "grad.param." + p.path();
  const Tensor whole = full(p.gradient());
  if (!p.path().ends_with("dpb.layers.9.bias")) return golden.compare(name, whole.f32());
  std::string beside = name;
  beside.replace(beside.size() - 4, 4, "weight");
  ASSERT_EQ(whole.count(), 1);
  EXPECT_LE(std::abs(whole.f32()[0]), golden.limit(beside)) << name;
}

// The file's case over a mesh: outputs and all gradients. dp splits the batch, tp heads and hidden features.
void expect_the_files_numbers(Rank& rank, const MeshShape& shape, const std::filesystem::path& file) {
  SCOPED_TRACE(to_string(shape));
  Golden golden(file);
  const Case c = case_of(golden);
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  parallelize(*c.module, mesh["tp"]);
  replicate(*c.module, mesh);
  materialise(*c.module, compute);
  const std::vector<Parameter*> parameters = c.module->parameters();
  ASSERT_EQ(golden.names("param.").size(), parameters.size());
  for (Parameter* p : parameters) p->set_master(distribute(golden.tensor("param." + p->path()), p->layout()));

  const auto part = [&](const char* name) {
    const Tensor whole = golden.tensor(name);
    return distribute(whole, make_layout(mesh, {{"dp", Shard{0}}}, whole.shape()));
  };
  Frame frame(compute);
  const Tensor y = c.module->forward(part("in.x"), frame)[0];
  const Tensor dx = c.module->backward(part("in.cotangent"), frame)[0];
  EXPECT_TRUE(frame.empty());
  golden.compare("out.y", full(y).f32());
  golden.compare("grad.in.x", full(dx).f32());

  const bool split = mesh.size("tp") > 1;
  for (const Parameter* p : parameters) {
    EXPECT_EQ(to_string(p->layout()->on("tp")), split ? expected_placement(p->path()) : "Replicate")
        << p->path();
    if (!of_position_bias(p->path())) continue;
    EXPECT_EQ(to_string(p->gradient_layout()->on("tp")), split ? "Partial(sum)" : "Replicate") << p->path();
    // This rank's part of it is that of their rank, if they were as many.
    const std::string there = "aux.rank" + std::to_string(rank.rank) + ".grad.param." + p->path();
    if (mesh.size("dp") > 1 || golden.names(there).empty() || golden.config().at("tp") != mesh.size("tp"))
      continue;
    if (p->path().ends_with("layers.9.bias")) continue;  // 0 up to rounding
    const std::vector<double> theirs = golden.values(there);
    for (std::size_t i = 0; i < theirs.size(); ++i)
      ASSERT_NEAR(p->gradient().f32()[i], theirs[i], golden.limit("grad.param." + p->path())) << there;
  }
  sync_replicated_gradients(parameters, mesh);
  for (const Parameter* p : parameters) compare_gradient(golden, *p);
  std::printf("%s %s, rank %d: at most %.2f of the limit\n", file.stem().c_str(), to_string(shape).c_str(),
              rank.rank, golden.most_used());
}

class Weather : public ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(Weather, OutputsAndAllGradientsOnOneRank) {
  Golden golden(GetParam());
  const Case c = case_of(golden);
  materialise(*c.module, golden.compute);
  const std::vector<Parameter*> parameters = c.module->parameters();
  ASSERT_EQ(golden.names("param.").size(), parameters.size());
  for (Parameter* p : parameters) p->set_master(golden.tensor("param." + p->path()));
  Frame frame(golden.compute);
  golden.compare("out.y", c.module->forward(golden.tensor("in.x"), frame)[0].f32());
  golden.compare("grad.in.x", c.module->backward(golden.tensor("in.cotangent"), frame)[0].f32());
  EXPECT_TRUE(frame.empty());
  for (const Parameter* p : parameters) compare_gradient(golden, *p);
  RecordProperty("most_of_the_limit_used", std::to_string(golden.most_used()));
}

// Heads that do not divide into the ranks are left to weather_test.cpp.
bool divides(const std::filesystem::path& file, const MeshShape& shape) {
  const Golden golden(file);
  return case_of(golden).heads % shape.size("tp") == 0;
}

TEST_P(Weather, TheSameOverThreads) {
  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}},
                                 MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}}) {
    if (!divides(GetParam(), shape)) continue;
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_the_files_numbers(rank, shape, GetParam()); });
  }
}

TEST_P(Weather, TheSameOverProcesses) {
  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}})
    if (divides(GetParam(), shape))
      test::run_ranks(Ranks::processes, shape.size(),
                      [&](Rank& rank) { expect_the_files_numbers(rank, shape, GetParam()); });
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

const char* const kPrefixes[] = {"credit_attention", "credit_feedforward", "credit_transformer_stage",
                                 "tp_plan_credit"};

std::vector<std::filesystem::path> files() {
  std::vector<std::filesystem::path> all;
  for (const char* prefix : kPrefixes)
    for (auto& file : test::golden_files(prefix)) all.push_back(file);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Golden, Weather, ::testing::ValuesIn(files()), file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Weather);

TEST(WeatherGolden, FilesArePresent) { test::expect_golden({std::begin(kPrefixes), std::end(kPrefixes)}); }

}  // namespace
}  // namespace weft::weather_golden_test
