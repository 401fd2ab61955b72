// The parallel transformer against the numbers of another implementation, run there on two ranks or one:
// every file of a case's name that lies in the golden folder, every shape and constant from the file.
#include <gtest/gtest.h>

#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/build.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/gradients.hpp"

namespace weft::parallel_golden_test {
namespace {

using test::Golden;
using test::Rank;
using test::Ranks;

// The file's model over a mesh, with the file's parameters and rotary tables.
struct Parallel {
  Parallel(Rank& rank, const MeshShape& shape, Golden& golden_in, const TransformerPlanOptions& options = {})
      : Parallel(rank, shape, golden_in, {.tensor = options}, {}) {}
  Parallel(Rank& rank, const MeshShape& shape, Golden& golden_in, const BuildOptions& options, std::nullptr_t)
      : golden(golden_in),
        compute(rank.context),
        mesh(rank.group(), shape),
        built(build_parallel_model(golden.model(), mesh, compute, options)) {
    EXPECT_EQ(golden.names("param.").size(), built.parameters().size());
    for (Parameter* p : built.parameters())
      p->set_master(distribute(golden.tensor("param." + p->path()), p->layout()));
    const Tensor cosine = golden.tensor("aux.rope_cos"), sine = golden.tensor("aux.rope_sin");
    auto rope = std::make_shared<RopeTables>();
    rope->cos.assign(cosine.f32().begin(), cosine.f32().end());
    rope->sin.assign(sine.f32().begin(), sine.f32().end());
    rope->positions = cosine.size(0), rope->half = cosine.size(1);
    transformer_of(built).set_rope(rope);
    hidden_hook = transformer_of(built).norm.add_hook(Module::HookPoint::post_forward,
                                                      [this](Module&, Tensors& y, Frame&) { hidden = y[0]; });
  }

  /// Forward, backward, and every reduction. tokens, labels: (batch, sequence), whole.
  double pass(const Tensor& tokens, const Tensor& labels) {
    const LayoutRef rows = replicated_layout(built.mesh, tokens.shape())->with(built.data, Shard{0});
    logits = built.model->forward(distribute(tokens, rows), frame)[0];
    const Tensor loss = cross_entropy.forward(
        {logits, distribute(labels, rows), scalar(built.mesh, count_valid(labels))}, frame)[0];
    built.model->backward(cross_entropy.backward({}, frame), frame);
    EXPECT_TRUE(frame.empty());
    built.finish();
    sync_replicated_gradients(built.parameters(), built.tensor);
    return full(loss).as<double>()[0];
  }

  Golden& golden;
  Compute compute;
  DeviceMesh mesh;
  ParallelModel built;
  Frame frame{compute};
  CrossEntropy cross_entropy;
  Tensor logits, hidden;  // of the last pass; hidden: what the last norm gives
  HookHandle hidden_hook;
};

class GoldenFile : public ::testing::TestWithParam<std::filesystem::path> {};
using TensorParallel = GoldenFile;
using EverySplit = GoldenFile;
using ParallelTrajectory = GoldenFile;

bool split_there(const std::string& path) {
  for (const char* name :
       {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "output_head"})
    if (path.find(name) != std::string::npos) return true;
  return false;
}

// This rank's results on `shape` are those of the file: loss, logits, every gradient.
void expect_file(Parallel& parallel, Golden& golden) {
  const double loss = parallel.pass(golden.tensor("in.tokens"), golden.tensor("in.labels"));
  golden.within("out.loss", std::abs(loss - golden.values("out.loss")[0]));
  golden.compare("out.logits", full(parallel.logits).f32());
  for (const std::string& name : golden.names("out.")) {
    if (name == "out.loss" || name == "out.logits") continue;
    if (name == "out.hidden")
      golden.compare(name, full(parallel.hidden).f32());
    else if (name == "out.ce_loss")
      golden.within(name, std::abs(loss - golden.values(name)[0]));
    else
      ADD_FAILURE() << name << " is not compared";
  }
  EXPECT_EQ(golden.names("grad.param.").size(), parallel.built.parameters().size());
  for (const Parameter* p : parallel.built.parameters())
    golden.compare("grad.param." + p->path(), full(p->gradient()).f32());
}

// Split as there: along the sequence between the layers where the file says so.
TEST_P(TensorParallel, PlacementsLossLogitsAndGatheredGradients) {
  int ranks = 0;
  {
    Golden golden(GetParam());
    ranks = golden.config().at("tp");
  }
  test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
    Golden golden(GetParam());
    const bool sequence = golden.config().at("sequence_parallel");
    Parallel parallel(rank, {{"dp", 1}, {"tp", ranks}}, golden, {.sequence_parallel = sequence});
    const nlohmann::json& sharding = golden.info().at("sharding");
    EXPECT_EQ(sharding.size(), parallel.built.parameters().size());
    for (const Parameter* p : parallel.built.parameters()) {
      const nlohmann::json& there = sharding.at(p->path());
      const Placement& here = p->layout()->on("tp");
      if (split_there(p->path())) {
        EXPECT_EQ(to_string(here), there.at("placement").at(0)) << p->path();
      } else {
        EXPECT_EQ(to_string(here), "Replicate") << p->path();
      }
      const auto local =
          there.at("local_shapes").at(static_cast<std::size_t>(rank.rank)).get<std::vector<std::int64_t>>();
      EXPECT_EQ(p->local_shape(), Shape(std::span<const std::int64_t>(local))) << p->path();
    }
    // The result of each rank of a norm is a contribution if it has a part of the sequence.
    Parameter& norm = *transformer_of(parallel.built).norm.weight;
    std::vector<std::string> placements;
    const int listening =
        norm.listen([&](Parameter& p) { placements.push_back(to_string(p.gradient_layout()->on("tp"))); });
    expect_file(parallel, golden);
    norm.stop_listening(listening);
    EXPECT_EQ(placements, std::vector<std::string>{sequence ? "Partial(sum)" : "Replicate"});
    for (const Parameter* p : parallel.built.parameters())
      if (split_there(p->path())) {
        EXPECT_EQ(to_string(p->gradient_layout()->on("tp")),
                  sharding.at(p->path()).at("grad_placement").at(0));
      }
  });
}

// Every way to split: each is another sum of the same numbers.
void expect_every_split(Rank& rank, const MeshShape& shape, const std::filesystem::path& file) {
  for (const bool sequence : {false, true})
    for (const VocabSplit vocab : {VocabSplit::whole, VocabSplit::shard}) {
      SCOPED_TRACE(to_string(shape) + (sequence ? ", sequence parallel" : "") +
                   (vocab == VocabSplit::shard ? ", vocabulary split" : ""));
      Golden golden(file);
      Parallel parallel(rank, shape, golden, {.sequence_parallel = sequence, .vocab = vocab});
      expect_file(parallel, golden);
      const LayoutRef logits = parallel.logits.layout();
      if (shape.size("tp") > 1) {
        EXPECT_EQ(logits->on(parallel.built.tensor),
                  vocab == VocabSplit::shard ? Placement(Shard{2}) : Placement(Replicate{}));
      }
    }
}

TEST_P(EverySplit, OverRanksThatAreThreads) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}},
        MeshShape{{"dp", 1}, {"tp", 4}}})  // of 2 key/value heads: two ranks share one
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_every_split(rank, shape, GetParam()); });
}

TEST_P(EverySplit, OverRanksThatAreProcesses) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}})
    test::run_ranks(Ranks::processes, shape.size(),
                    [&](Rank& rank) { expect_every_split(rank, shape, GetParam()); });
}

void expect_trajectory(Rank& rank, const MeshShape& shape, const std::filesystem::path& file,
                       const BuildOptions& options = {}) {
  SCOPED_TRACE(to_string(shape));
  Golden golden(file);
  const nlohmann::json& config = golden.config();
  Parallel parallel(rank, shape, golden, options, nullptr);
  const std::vector<Parameter*> parameters = parallel.built.parameters();
  for (Parameter* p : parameters) p->set_decays(true);  // one group, as the reference trained
  AdamW adamw(parallel.compute, parameters,
              {.beta1 = config.at("betas").at(0),
               .beta2 = config.at("betas").at(1),
               .eps = config.at("adam_eps"),
               .weight_decay = config.at("weight_decay")});
  const std::int64_t steps = config.at("steps"), batch = config.at("B"), seq = config.at("S");
  const Tensor tokens = golden.tensor("in.tokens"), labels = golden.tensor("in.labels");
  const std::vector<double> ref_loss = golden.values("out.loss"), ref_norm = golden.values("out.grad_norm"),
                            ref_param_norm = golden.values("out.param_norm");
  ASSERT_EQ(ref_loss.size(), static_cast<std::size_t>(steps));
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    adamw.zero_gradients();
    const double loss = parallel.pass(tokens.slice_flat(step * batch * seq, {batch, seq}),
                                      labels.slice_flat(step * batch * seq, {batch, seq}));
    golden.within("out.loss", std::abs(loss - ref_loss[at]));
    const double norm = clip_grad_norm(parameters, config.at("max_grad_norm"));
    golden.within("out.grad_norm", std::abs(norm - ref_norm[at]));
    adamw.step(config.at("lr"));
    double squares = 0;
    for (const Parameter* p : parameters) {
      const Tensor whole = full(p->master());
      for (const float v : whole.f32()) squares += static_cast<double>(v) * static_cast<double>(v);
    }
    golden.within("out.param_norm", std::abs(std::sqrt(squares) - ref_param_norm[at]));
  }
  for (const Parameter* p : parameters) golden.compare("out.param." + p->path(), full(p->master()).f32());
  std::printf("%s, rank %d: at most %.2f of the limit\n", to_string(shape).c_str(), rank.rank,
              golden.most_used());
}

TEST_P(ParallelTrajectory, LossGradientNormAndParameterNormOfEveryStep) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 2}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}},
        MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}})
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_trajectory(rank, shape, GetParam()); });
}

// The parameters divided over the data ranks.
TEST_P(ParallelTrajectory, Sharded) {
  BuildOptions options;
  options.data = DataForm::fsdp;
  for (const MeshShape& shape : {MeshShape{{"dp", 2}, {"tp", 1}}, MeshShape{{"dp", 4}, {"tp", 1}},
                                 MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 4}}})
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_trajectory(rank, shape, GetParam(), options); });
  options.sharding.reshard_after_forward = 2;
  test::run_ranks(Ranks::processes, 4, [&](Rank& rank) {
    expect_trajectory(rank, {{"dp", 4}, {"tp", 1}}, GetParam(), options);
  });
  options.data_axis = "dp_shard";
  options.replicate_axis = "dp_replicate";
  options.sharding = {};
  for (const DataForm form : {DataForm::fsdp, DataForm::ddp}) {
    options.data = form;
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      expect_trajectory(rank, {{"dp_replicate", 2}, {"dp_shard", 2}, {"tp", 1}}, GetParam(), options);
    });
  }
}

TEST_P(ParallelTrajectory, OverRanksThatAreProcesses) {
  const MeshShape shape{{"dp", 2}, {"tp", 2}};
  test::run_ranks(Ranks::processes, shape.size(),
                  [&](Rank& rank) { expect_trajectory(rank, shape, GetParam()); });
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Golden, TensorParallel, ::testing::ValuesIn(test::golden_files("tp_plan_kf")),
                         file_name);
INSTANTIATE_TEST_SUITE_P(Golden, ParallelTrajectory,
                         ::testing::ValuesIn(test::golden_files("kf_train_trajectory")), file_name);
std::vector<std::filesystem::path> transformer_files() {
  std::vector<std::filesystem::path> files;
  for (const char* prefix : {"kf_transformer_tiny", "kf_transformer_tied", "tp_plan_kf"})
    for (auto& more : test::golden_files(prefix)) files.push_back(more);
  return files;
}
INSTANTIATE_TEST_SUITE_P(Golden, EverySplit, ::testing::ValuesIn(transformer_files()), file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TensorParallel);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EverySplit);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ParallelTrajectory);

TEST(ParallelGolden, FilesArePresent) {
  test::expect_golden({"tp_plan_kf", "kf_train_trajectory", "kf_transformer_tiny", "kf_transformer_tied"});
}

}  // namespace
}  // namespace weft::parallel_golden_test
