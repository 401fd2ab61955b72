#include "weft/pp/pipeline.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <set>

#include "pp/pipe_net.hpp"
#include "pp/random_schedule.hpp"
#include "support/errors.hpp"

namespace weft::pipeline_test {
namespace {

using test::error_of;
using test::error_text;
using test::PipeData;
using test::PipeOutcome;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr PipelineKind kTraining[] = {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                      PipelineKind::interleaved, PipelineKind::zero_bubble};

int per_rank(PipelineKind kind) { return kind == PipelineKind::interleaved ? 2 : 1; }

// 1 to 4 ranks, 1 to 8 micro-batches (fewer than stages, too, and an uneven last one), all schedules.
TEST(Pipeline, HasTheBitsOfOneRank) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      for (int micro_batches = 1; micro_batches <= 8; ++micro_batches) {
        const PipeOutcome serial = test::serial_outcome(rank.context, micro_batches);
        for (const PipelineKind kind : kTraining) {
          SCOPED_TRACE(fmt::format("{}, {} ranks, {} micro-batches", name(kind), rank.size, micro_batches));
          const PipelineSchedule s = make_pipeline_schedule(kind, rank.size, micro_batches, per_rank(kind));
          test::expect_serial(test::pipeline_outcome(rank, s), serial, rank.size);
        }
      }
    });
}

TEST(Pipeline, RunsAThousandRandomSchedules) {
  std::vector<PipelineSchedule> all;
  std::mt19937 random(4);
  const auto range = test::RandomScheduleRange{.ranks = 4, .stages_per_rank = 2, .micro_batches = 5};
  for (int i = 0; i < 1000; ++i) all.push_back(test::random_schedule(random, range));
  for (int ranks = 1; ranks <= 4; ++ranks)
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      std::map<int, PipeOutcome> serial;
      for (int m = 1; m <= range.micro_batches; ++m) serial[m] = test::serial_outcome(rank.context, m);
      for (const PipelineSchedule& s : all) {
        if (s.ranks != rank.size) continue;
        SCOPED_TRACE(to_string(s));
        test::expect_serial(test::pipeline_outcome(rank, s), serial[s.micro_batches], rank.size);
        if (testing::Test::HasFailure()) return;
      }
    });
}

// Forward passes alone: losses where there is a loss, outputs on the last rank where there is none.
TEST(Pipeline, EvaluatesWithoutBackwardPasses) {
  for (const bool scored : {true, false})
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      Compute compute(rank.context);
      const auto net = test::pipe_net(), whole = test::pipe_net();
      MeanSquaredError loss;
      const PipelineSchedule s = make_pipeline_schedule(PipelineKind::forward_only, 3, 4, 2);
      Pipeline pipeline(*net, scored ? &loss : nullptr, rank.group(), compute, test::pipe_options(*net, s));
      pipeline.materialise(7);
      materialise(*whole, compute);
      initialise(*whole, 7);
      const PipeData data(rank.context, 4);
      const PipelineResult result = pipeline.run(data.batches(), {});
      EXPECT_EQ(result.losses.size(), scored ? 4u : 0u);
      EXPECT_EQ(result.outputs.size(), rank.rank == 2 ? 4u : 0u);
      for (std::size_t m = 0; m < 4; ++m) {
        Frame frame = Frame::inference(compute);
        const PipelineMicroBatch& b = data.batches()[m];
        const Tensor y = whole->forward(b.inputs, frame)[0];
        if (scored) {
          EXPECT_EQ(result.losses[m],
                    loss.forward({y, b.targets[0], b.targets[1]}, frame)[0].as<double>()[0]);
        }
        if (rank.rank == 2) {
          EXPECT_THAT(result.outputs[m][0].f32(), ::testing::ElementsAreArray(y.f32()));
        }
      }
      for (const Parameter* p : pipeline.parameters()) EXPECT_FALSE(p->has_gradient());
    });
}

// A rank has memory for its own stages alone; names and values are those of the whole model.
TEST(Pipeline, ARankHoldsItsOwnStages) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    MeanSquaredError loss;
    const PipelineSchedule s = make_pipeline_schedule(PipelineKind::interleaved, 2, 2, 2);
    Pipeline pipeline(*net, &loss, rank.group(), compute, test::pipe_options(*net, s));
    EXPECT_THAT(pipeline.stages(), ElementsAre(rank.rank, rank.rank + 2));
    pipeline.materialise(7);
    std::set<std::string> own;
    for (const Parameter* p : pipeline.parameters()) own.insert(p->path());
    for (const Parameter* p : net->parameters())
      EXPECT_EQ(p->materialised(), own.contains(p->path())) << p->path();
    EXPECT_EQ(own.contains("0.weight"), rank.rank == 0);
    EXPECT_EQ(own.contains("7.weight"), rank.rank == 1);
    pipeline.run(PipeData(rank.context, 2).batches(), {.seed = 1, .step = 0});
    ASSERT_EQ(pipeline.spans().size(), 8u);
    for (const PipelineTimeline::Span& span : pipeline.spans()) EXPECT_LE(span.begin, span.end);
  });
}

// --- faults ---

// Eight modules of which one throws, stops or dies in a given forward pass.
class Trips : public Module {
 public:
  Trips(int at, std::function<void()> trip) : at_(at), trip_(std::move(trip)) {}

 private:
  Tensors do_forward(Inputs x, Frame&) override {
    if (count_++ == at_) trip_();
    return {x[0]};
  }
  Tensors do_backward(Inputs dy, Frame&) override {
    if (count_++ == at_) trip_();
    return {dy[0]};
  }
  int count_ = 0;
  const int at_;
  const std::function<void()> trip_;
};

// A pipeline of four ranks whose rank 2 trips in its pass number `at`.
Error error_of_run(Rank& rank, PipelineKind kind, int at, const std::function<void()>& trip) {
  Compute compute(rank.context);
  Sequential net;
  for (int i = 0; i < 4; ++i) {
    auto stage = std::make_unique<Sequential>();
    stage->append(std::make_unique<Linear>(test::kFeatures, test::kFeatures, true, Normal{0.4}));
    if (i == 2) stage->append(std::make_unique<Trips>(at, trip));
    net.append(std::move(stage));
  }
  MeanSquaredError loss;
  Pipeline pipeline(net, &loss, rank.group(), compute,
                    {make_pipeline_schedule(kind, 4, 5), {{"0"}, {"1"}, {"2"}, {"3"}}, test::pipe_border});
  pipeline.materialise(7);
  const PipeData data(rank.context, 5);
  return error_of([&] {
    for (int step = 0; step < 3; ++step) pipeline.run(data.batches(), {.seed = 5, .step = step});
  });
}

TEST(Pipeline, AnErrorOfAPassReachesAllRanks) {
  for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::zero_bubble})
    for (const int at : {0, 3, 7, 12})
      test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
        const Error e =
            error_of_run(rank, kind, at, [] { throw Error(ErrorCode::bad_argument, "a bad layer"); });
        EXPECT_EQ(e.code(), rank.rank == 2 ? ErrorCode::bad_argument : ErrorCode::aborted);
        EXPECT_THAT(e.what(), HasSubstr("a bad layer"));
        if (rank.rank != 2) {
          EXPECT_THAT(e.what(), HasSubstr("pipeline: rank 2, action"));
        }
      });
}

// The last backward pass of a step is one of stage 0, when all other ranks have no action left.
TEST(Pipeline, AnErrorOfTheLastPassReachesAllRanks) {
  for (const bool scored : {true, false})
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      Compute compute(rank.context);
      Sequential net;
      const int micro_batches = 4;
      for (int i = 0; i < 3; ++i) {
        auto stage = std::make_unique<Sequential>();
        stage->append(std::make_unique<Linear>(test::kFeatures, test::kFeatures, true, Normal{0.4}));
        if (i == 0)
          stage->append(std::make_unique<Trips>(scored ? 2 * micro_batches - 1 : micro_batches - 1,
                                                [] { throw Error(ErrorCode::bad_argument, "a bad layer"); }));
        net.append(std::move(stage));
      }
      MeanSquaredError loss;
      const PipelineKind kind = scored ? PipelineKind::one_f_one_b : PipelineKind::forward_only;
      Pipeline pipeline(
          net, scored ? &loss : nullptr, rank.group(), compute,
          {make_pipeline_schedule(kind, 3, micro_batches), {{"0"}, {"1"}, {"2"}}, test::pipe_border});
      pipeline.materialise(7);
      const PipeData data(rank.context, micro_batches);
      const Error e = error_of([&] { pipeline.run(data.batches(), {.seed = 5, .step = 0}); });
      EXPECT_THAT(e.what(), HasSubstr("a bad layer"));
    });
}

// A stage that hands on its input: the memory of the message is free for the next message, and the stage
// behind it, on the same rank, still reads.
TEST(Pipeline, AStageWithoutWorkHandsOnMemoryOfItsOwn) {
  const auto make_net = [] {
    auto net = std::make_unique<Sequential>();
    for (int i = 0; i < 4; ++i)
      if (i == 1 || i == 2)
        net->append(std::make_unique<Dropout>(0.0));
      else
        net->append(std::make_unique<Linear>(test::kFeatures, test::kFeatures, true, Normal{0.4}));
    return net;
  };
  std::mt19937 random(9);
  std::vector<PipelineSchedule> all;
  for (int i = 0; i < 200; ++i)
    all.push_back(test::random_schedule(random, {.ranks = 2, .stages_per_rank = 2, .micro_batches = 5}));
  for (const bool trains : {true, false})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      Compute compute(rank.context);
      MeanSquaredError loss;
      const auto whole = make_net();
      materialise(*whole, compute);
      initialise(*whole, 7);
      for (const PipelineSchedule& given : all) {
        if (given.ranks != 2 || given.stages() != 4) continue;
        const PipelineSchedule s =
            trains ? given : make_pipeline_schedule(PipelineKind::forward_only, 2, given.micro_batches, 2);
        const auto net = make_net();
        PipelineOptions options{s, {{"0"}, {"1"}, {"2"}, {"3"}}, test::pipe_border};
        Pipeline pipeline(*net, &loss, rank.group(), compute, options);
        pipeline.materialise(7);
        const PipeData data(rank.context, s.micro_batches);
        const PipelineResult result =
            pipeline.run(data.batches(), {.seed = 5, .step = 0, .training = trains});
        for (Parameter* p : whole->parameters()) p->zero_gradient();
        for (std::size_t m = 0; m < data.batches().size(); ++m) {
          const PipelineMicroBatch& b = data.batches()[m];
          Frame frame(compute, {.seed = 5, .step = 0});
          const Tensor y = whole->forward(b.inputs, frame)[0];
          ASSERT_EQ(result.losses[m], loss.forward({y, b.targets[0], b.targets[1]}, frame)[0].as<double>()[0])
              << to_string(s);
          whole->backward(loss.backward({}, frame), frame);
        }
        if (!trains) continue;
        test::Bits expected, found;
        for (const Parameter* p : whole->parameters()) test::add_bits(expected, *p);
        for (const Parameter* p : pipeline.parameters()) test::add_bits(found, *p);
        for (const auto& [name, values] : found) ASSERT_EQ(values, expected[name]) << name << to_string(s);
      }
    });
}

TEST(Pipeline, AKilledStageIsNamedByAllOthers) {
  std::mt19937 random(6);
  for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::zero_bubble})
    for (int i = 0; i < 3; ++i) {
      const int at = static_cast<int>(random() % 20);
      SCOPED_TRACE(fmt::format("{}, pass {}", name(kind), at));
      test::RankProcesses ranks(4, [&](Rank& rank) {
        const Error e = error_of_run(rank, kind, at, [] { ::kill(::getpid(), SIGKILL); });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(e.ranks(), ElementsAre(2)) << e.what();
      });
      ranks.finish({2});
    }
}

TEST(Pipeline, AStoppedStageIsNamedByAllOthers) {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(2);
  for (const int at : {1, 8}) {
    test::RankProcesses ranks(
        4,
        [&](Rank& rank) {
          const Error e =
              error_of_run(rank, PipelineKind::one_f_one_b, at, [] { ::kill(::getpid(), SIGSTOP); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.ranks(), ElementsAre(2)) << e.what();
        },
        options);
    ranks.finish({2});
  }
}

// A pipeline of four ranks of which one trips before its action number `at`, be that a pass or a message.
Error error_before_action(Rank& rank, const PipelineSchedule& s, int tripping, int at,
                          const std::function<void()>& trip) {
  Compute compute(rank.context);
  const auto net = test::pipe_net();
  MeanSquaredError loss;
  PipelineOptions options = test::pipe_options(*net, s);
  int next = 0;
  options.before_action = [&](const PipelineAction&) {
    if (rank.rank == tripping && next++ == at) trip();
  };
  Pipeline pipeline(*net, &loss, rank.group(), compute, options);
  pipeline.materialise(7);
  const PipeData data(rank.context, s.micro_batches);
  return error_of([&] {
    for (int step = 0; step < 2; ++step) pipeline.run(data.batches(), {.seed = 5, .step = step});
  });
}

// Random schedules, and random ranks that end or stop at random actions.
struct Fault {
  PipelineSchedule schedule;
  int rank, at;
};
std::vector<Fault> faults(unsigned seed, int count) {
  std::mt19937 random(seed);
  std::vector<Fault> all;
  while (static_cast<int>(all.size()) < count) {
    PipelineSchedule s =
        test::random_schedule(random, {.ranks = 4, .stages_per_rank = 2, .micro_batches = 5});
    const int rank = static_cast<int>(random() % 4);
    if (s.ranks != 4) continue;
    const auto actions = static_cast<unsigned>(2 * s.actions[static_cast<std::size_t>(rank)].size());
    all.push_back({std::move(s), rank, static_cast<int>(random() % actions)});
  }
  return all;
}

TEST(Pipeline, ARankThatIsKilledBeforeAnyActionIsNamedByAllOthers) {
  for (const Fault& fault : faults(11, 12)) {
    SCOPED_TRACE(fmt::format("rank {}, action {}\n{}", fault.rank, fault.at, to_string(fault.schedule)));
    test::RankProcesses ranks(4, [&](Rank& rank) {
      const Error e = error_before_action(rank, fault.schedule, fault.rank, fault.at,
                                          [] { ::kill(::getpid(), SIGKILL); });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
      EXPECT_THAT(e.ranks(), ElementsAre(fault.rank)) << e.what();
    });
    ranks.finish({fault.rank});
  }
}

TEST(Pipeline, ARankThatStopsBeforeAnyActionIsNamedByAllOthers) {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(2);
  for (const Fault& fault : faults(12, 4)) {
    SCOPED_TRACE(fmt::format("rank {}, action {}\n{}", fault.rank, fault.at, to_string(fault.schedule)));
    test::RankProcesses ranks(
        4,
        [&](Rank& rank) {
          const Error e = error_before_action(rank, fault.schedule, fault.rank, fault.at,
                                              [] { ::kill(::getpid(), SIGSTOP); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.ranks(), ElementsAre(fault.rank)) << e.what();
        },
        options);
    ranks.finish({fault.rank});
  }
}

TEST(Pipeline, AnErrorBeforeAnyActionReachesAllRanks) {
  for (const Fault& fault : faults(13, 40))
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const Error e = error_before_action(rank, fault.schedule, fault.rank, fault.at,
                                          [] { throw Error(ErrorCode::bad_argument, "no more"); });
      EXPECT_EQ(e.code(), rank.rank == fault.rank ? ErrorCode::bad_argument : ErrorCode::aborted);
      EXPECT_THAT(e.what(), HasSubstr("no more"));
    });
}

// --- arguments ---

TEST(Pipeline, RanksCompareScheduleStagesAndShapes) {
  struct Case {
    std::string differs, text;
  };
  for (const Case& c : {Case{"schedule", "pipeline: rank 1 has another schedule than rank 0"},
                        Case{"stages", "pipeline: rank 1 has another list of stages than rank 0"},
                        Case{"step", "pipeline: rank 1 has another step than rank 0"},
                        Case{"seed", "pipeline: rank 1 has another seed than rank 0"},
                        Case{"loss", "pipeline: rank 1 has another loss than rank 0"},
                        Case{"shapes",
                             "pipeline: rank 1 has another list of shapes than rank 0; in front "
                             "of stage 1 this rank has"}})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      const bool other = rank.rank == 1;
      const auto differs = [&](const char* what) { return other && c.differs == what; };
      Compute compute(rank.context);
      const auto net = test::pipe_net();
      MeanSquaredError loss;
      PipelineOptions options = test::pipe_options(
          *net, make_pipeline_schedule(differs("schedule") ? PipelineKind::one_f_one_b : PipelineKind::gpipe,
                                       2, 2));
      if (differs("stages")) {
        options.stages[1].insert(options.stages[1].begin(), options.stages[0].back());
        options.stages[0].pop_back();
      }
      if (differs("shapes"))
        options.border = [](int, const Tensors& x) { return PipelineBorder{x[0].shape(), DType::bf16}; };
      if (c.differs == "loss") options.schedule = make_pipeline_schedule(PipelineKind::forward_only, 2, 2);
      Pipeline pipeline(*net, differs("loss") ? nullptr : &loss, rank.group(), compute, options);
      pipeline.materialise(7);
      const Error e = error_of([&] {
        pipeline.run(PipeData(rank.context, 2).batches(),
                     {.seed = differs("seed") ? 6U : 5U, .step = differs("step") ? 1 : 0});
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch);
      EXPECT_THAT(e.what(), HasSubstr(c.text));
      EXPECT_THAT(e.ranks(), ElementsAre(0, 1));
    });
}

TEST(Pipeline, MicroBatchesThatDoNotFitAreRefusedByAll) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    MeanSquaredError loss;
    Pipeline pipeline(*net, &loss, rank.group(), compute,
                      test::pipe_options(*net, make_pipeline_schedule(PipelineKind::gpipe, 2, 2)));
    pipeline.materialise(7);
    const auto text = [&](const std::vector<PipelineMicroBatch>& batches) {
      return error_text(ErrorCode::bad_argument, [&] { pipeline.run(batches, {.seed = 5, .step = 0}); });
    };
    const PipeData two(rank.context, 2), three(rank.context, 3);
    const std::string elsewhere = " was given micro-batches that do not fit; its own error says why";
    EXPECT_EQ(text(rank.rank == 0 ? three.batches() : two.batches()),
              rank.rank == 0 ? "pipeline: 3 micro-batches; schedule \"gpipe\" is for 2"
                             : "pipeline: rank 0" + elsewhere);
    std::vector<PipelineMicroBatch> batches = two.batches();
    batches[1].targets.clear();
    EXPECT_EQ(text(batches), rank.rank == 1 ? "pipeline: a micro-batch has no targets for the loss"
                                            : "pipeline: rank 1" + elsewhere);
    batches[0].inputs.clear();
    EXPECT_EQ(text(batches), "pipeline: a micro-batch has no inputs; all ranks need their shapes");
    // It goes on after that.
    pipeline.run(two.batches(), {.seed = 5, .step = 0});
  });
}

TEST(Pipeline, AStageThatGivesAnotherShapeIsAMismatch) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    Sequential net;
    net.append(std::make_unique<Linear>(test::kFeatures, 5, true, Normal{0.4}));
    net.append(std::make_unique<Linear>(5, test::kFeatures, true, Normal{0.4}));
    MeanSquaredError loss;
    Pipeline pipeline(net, &loss, rank.group(), compute,
                      {make_pipeline_schedule(PipelineKind::gpipe, 2, 1), {{"0"}, {"1"}}, test::pipe_border});
    pipeline.materialise(7);
    const Error e =
        error_of([&] { pipeline.run(PipeData(rank.context, 1).batches(), {.seed = 5, .step = 0}); });
    const std::string text =
        "pipeline: the output of stage 0 for micro-batch 0 is (3, 5) f32; the border in front of stage 1 is "
        "(3, 6) "
        "f32";
    EXPECT_EQ(e.code(), rank.rank == 0 ? ErrorCode::mismatch : ErrorCode::aborted);
    EXPECT_THAT(e.what(), HasSubstr(text));
  });
}

TEST(Pipeline, OptionsAreChecked) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    MeanSquaredError loss;
    const auto text = [&](PipelineOptions options, Module* with) {
      return error_text(ErrorCode::bad_argument,
                        [&] { Pipeline(*net, with, rank.group(), compute, std::move(options)); });
    };
    const auto options = [&](int ranks) {
      return test::pipe_options(*net, make_pipeline_schedule(PipelineKind::gpipe, ranks, 2));
    };
    EXPECT_EQ(text(options(3), &loss), "pipeline: schedule \"gpipe\" is for 3 ranks; the group has 2");
    EXPECT_EQ(text(options(2), nullptr),
              "pipeline: schedule \"gpipe\" has backward passes, and there is no loss");
    PipelineOptions wrong = options(2);
    wrong.border = nullptr;
    EXPECT_EQ(text(wrong, &loss), "pipeline: border is empty; expected a function");
    wrong = options(2);
    wrong.stages.pop_back();
    EXPECT_EQ(text(wrong, &loss), "pipeline: schedule \"gpipe\" has 2 stages; 1 are given");
    wrong = options(2);
    wrong.stages[1].pop_back();
    EXPECT_EQ(text(wrong, &loss), "pipeline stages: parameter \"7.weight\" lies in no module of the stages");
    wrong = options(2);
    wrong.stages = {{"*"}, {"0"}};
    EXPECT_EQ(text(wrong, &loss), "pipeline stages: \"0\" is there twice");
  });
}

// --- more arguments ---

// Gives each tensor `outputs` times forward, and `gradients` times backward.
class Copies : public Module {
 public:
  Copies(std::size_t outputs, std::size_t gradients) : outputs_(outputs), gradients_(gradients) {}

 private:
  Tensors do_forward(Inputs x, Frame&) override { return Tensors(outputs_, x[0]); }
  Tensors do_backward(Inputs dy, Frame&) override { return Tensors(gradients_, dy[0]); }
  const std::size_t outputs_, gradients_;
};

TEST(Pipeline, OneTensorCrossesABorder) {
  for (const bool forward : {true, false})
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      Compute compute(rank.context);
      Sequential net;
      net.append(std::make_unique<Copies>(forward ? 2 : 1, 1));
      net.append(std::make_unique<Copies>(1, forward ? 1 : 2));
      MeanSquaredError loss;
      Pipeline pipeline(
          net, &loss, rank.group(), compute,
          {make_pipeline_schedule(PipelineKind::gpipe, 2, 1), {{"0"}, {"1"}}, test::pipe_border});
      const Error e =
          error_of([&] { pipeline.run(PipeData(rank.context, 1).batches(), {.seed = 5, .step = 0}); });
      EXPECT_EQ(e.code(), rank.rank == (forward ? 0 : 1) ? ErrorCode::mismatch : ErrorCode::aborted);
      EXPECT_THAT(e.what(), HasSubstr(forward ? "pipeline: stage 0 has 2 outputs; expected 1"
                                              : "pipeline: stage 1 gives 2 gradients of inputs; expected 1"));
    });
}

TEST(Pipeline, BordersThatDoNotFitAreRefusedByAll) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    MeanSquaredError loss;
    const DeviceMesh mesh(rank.group(), {{"pp", 2}});
    const PipeData data(rank.context, 2);
    const auto error = [&](const std::function<PipelineBorder(int, const Tensors&)>& border,
                           bool training = true) {
      PipelineOptions options = test::pipe_options(*net, make_pipeline_schedule(PipelineKind::gpipe, 2, 2));
      options.border = border;
      Pipeline pipeline(*net, &loss, rank.group(), compute, options);
      return error_of([&] { pipeline.run(data.batches(), {.seed = 5, .step = 0, .training = training}); });
    };
    const Error partial = error([&](int, const Tensors& x) {
      return PipelineBorder{x[0].shape(), DType::f32, make_layout(mesh, {Partial{}}, x[0].shape())};
    });
    EXPECT_EQ(std::string(partial.what()),
              "pipeline: the border in front of stage 1 is Partial; expected whole values");
    const Error thrown = error([&](int, const Tensors& x) -> PipelineBorder {
      if (rank.rank == 1) throw std::runtime_error("no idea");
      return {x[0].shape()};
    });
    EXPECT_EQ(thrown.code(), ErrorCode::bad_argument);
    EXPECT_EQ(std::string(thrown.what()),
              rank.rank == 1
                  ? "pipeline: border: no idea"
                  : "pipeline: rank 1 was given micro-batches that do not fit; its own error says why");
    const Error kind = error(test::pipe_border, rank.rank == 0);
    EXPECT_EQ(kind.code(), ErrorCode::mismatch);
    EXPECT_THAT(kind.what(), HasSubstr("pipeline: rank 1 has another kind of pass than rank 0"));
  });
}

// A layer that gives its output a layout which `border` does not name.
TEST(Pipeline, AnotherLayoutThanThatOfTheBorderIsAMismatch) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    MeanSquaredError loss;
    const DeviceMesh mesh(rank.group(), {{"pp", 2}});
    PipelineOptions options = test::pipe_options(*net, make_pipeline_schedule(PipelineKind::gpipe, 2, 1));
    options.border = [&](int, const Tensors& x) {
      return PipelineBorder{x[0].shape(), DType::f32, make_layout(mesh, {Replicate{}}, x[0].shape())};
    };
    Pipeline pipeline(*net, &loss, rank.group(), compute, options);
    pipeline.materialise(7);
    const Error e =
        error_of([&] { pipeline.run(PipeData(rank.context, 1).batches(), {.seed = 5, .step = 0}); });
    EXPECT_THAT(e.what(), HasSubstr("pipeline: the output of stage 0 for micro-batch 0 is (3, 6) f32; the "
                                    "border in front of stage 1 is (3, 6) f32 with a layout, another one"));
  });
}

// Each new shape of micro-batches takes memory, which the next run with other shapes gives back.
TEST(Pipeline, MemoryOfMessagesIsThatOfOneRun) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Compute compute(rank.context);
    Sequential net;
    for (int i = 0; i < 2; ++i) net.append(std::make_unique<Copies>(1, 1));
    MeanSquaredError loss;
    constexpr std::int64_t kRows = 1 << 16;
    Pipeline pipeline(net, &loss, rank.group(), compute,
                      {make_pipeline_schedule(PipelineKind::gpipe, 2, 1), {{"0"}, {"1"}}, test::pipe_border});
    std::int64_t after_first = 0;
    for (int run = 0; run < 20; ++run) {
      const Tensor x(rank.context, {kRows + run, 4}), y(rank.context, x.shape());
      pipeline.run(std::vector<PipelineMicroBatch>{{{x}, {y, scalar(rank.context, x.count())}}},
                   {.seed = 5, .step = run});
      if (run == 0) after_first = pipeline.message_bytes();
    }
    EXPECT_EQ(after_first, kRows * 16);  // an activation, or its gradient
    EXPECT_EQ(pipeline.message_bytes(), (kRows + 19) * 16);
  });
}

TEST(Pipeline, APathOfAStageIsOneModule) {
  test::run_ranks(Ranks::threads, 1, [&](Rank& rank) {
    Compute compute(rank.context);
    const auto net = test::pipe_net();
    EXPECT_EQ(error_text([&] {
                Pipeline(*net, nullptr, rank.group(), compute,
                         {make_pipeline_schedule(PipelineKind::forward_only, 1, 1), {{"*"}}, nullptr});
              }),
              "bad_argument: pipeline: a path of a stage matches several modules");
  });
}

// --- stages ---

TEST(PipelineStages, AreCutByWeight) {
  const std::vector<std::string> five{"a", "b", "c", "d", "e"};
  const auto sizes = [&](int stages, const std::vector<double>& weights) {
    std::vector<std::size_t> all;
    for (const auto& stage : split_stages(five, stages, weights)) all.push_back(stage.size());
    return all;
  };
  EXPECT_THAT(sizes(1, {}), ElementsAre(5));
  EXPECT_THAT(sizes(2, {}), ElementsAre(3, 2));
  EXPECT_THAT(sizes(3, {}), ElementsAre(2, 2, 1));
  EXPECT_THAT(sizes(5, {}), ElementsAre(1, 1, 1, 1, 1));
  EXPECT_THAT(sizes(2, {0, 1, 1, 1, 3}), ElementsAre(4, 1));
  EXPECT_THAT(sizes(3, {5, 1, 1, 1, 1}), ElementsAre(1, 2, 2));
  EXPECT_THAT(split_stages(five, 2)[1], ElementsAre("d", "e"));
  const auto expect = [&](int stages, const std::vector<double>& weights, const std::string& text) {
    EXPECT_EQ(error_text([&] { split_stages(five, stages, weights); }),
              "bad_argument: pipeline stages: " + text);
  };
  expect(0, {}, "0 stages of 5 modules; expected 1 to 5");
  expect(6, {}, "6 stages of 5 modules; expected 1 to 5");
  expect(2, {1}, "1 weights for 5 modules");
  expect(2, {1, 1, -1, 1, 1}, "the weight of \"c\" is -1; expected a finite number of 0 or more");
}

class Nested : public Module {
 public:
  Nested() {
    add("head", head);
    add("body", body);
    body.append(std::make_unique<Linear>(2, 2, false));
    body.append(std::make_unique<Linear>(2, 2, false));
    add("tail", tail);
  }
  Linear head{2, 2, false};
  Sequential body;
  Linear tail{2, 2, false};
  using Module::add;

 private:
  Tensors do_forward(Inputs x, Frame&) override { return {x[0]}; }
  Tensors do_backward(Inputs dy, Frame&) override { return {dy[0]}; }
};

TEST(PipelineStages, PathsCoverTheModel) {
  Nested net;
  const auto path = [&](const std::vector<std::string>& patterns) { return pipeline_path(net, patterns); };
  EXPECT_THAT(path({"head", "body.*", "tail"}), ElementsAre("head", "body.0", "body.1", "tail"));
  const auto expect = [&](const std::vector<std::string>& patterns, const std::string& text) {
    EXPECT_EQ(error_text([&] { path(patterns); }), "bad_argument: pipeline stages: " + text);
  };
  expect({"head", "bodies.*"}, "no module matches \"bodies.*\"");
  expect({"head", "body.*"}, "parameter \"tail.weight\" lies in no module of the stages");
  expect({"*", "tail"}, "\"tail\" is there twice");
  expect({"*", "body.0"}, "\"body.0\" lies inside of \"body\"; expected one of them");
  net.add("odd", std::make_shared<ModuleBuffer>(Shape{2}));
  expect({"head", "body.*", "tail"}, "buffer \"odd\" lies in no module of the stages");
}

TEST(PipelineStages, EachUseOfATiedWeightHasItsOwnParameter) {
  Nested net;
  net.tail.tie_weight(net.head.weight);
  net.tail.weight->set_trainable(false);
  const std::vector<TiedWeight> tied = untie(net);
  ASSERT_EQ(tied.size(), 1u);
  EXPECT_THAT(tied[0].modules, ElementsAre("head", "tail"));
  EXPECT_THAT(tied[0].uses, ElementsAre(net.head.weight, net.tail.weight));
  EXPECT_NE(net.head.weight, net.tail.weight);
  EXPECT_EQ(net.tail.weight->path(), "head.weight");
  EXPECT_EQ(net.tail.weight->global_shape(), net.head.weight->global_shape());
  EXPECT_FALSE(net.tail.weight->trainable());
  EXPECT_TRUE(untie(net).empty());
}

// A Linear whose gradient gets a layout, unlike that of other uses of its weight.
class WithLayout : public Linear {
 public:
  WithLayout(Context& context, DeviceMesh mesh)
      : Linear(2, 2, false), context_(context), mesh_(std::move(mesh)) {}

 private:
  Tensors do_forward(Inputs x, Frame&) override { return {x[0]}; }
  Tensors do_backward(Inputs dy, Frame&) override {
    const Tensor dw = Tensor(context_, {2, 2}).with_layout(replicated_layout(mesh_, {2, 2}));
    weight->set_master(dw);
    weight->accumulate(dw);
    return {dy[0]};
  }
  Context& context_;
  DeviceMesh mesh_;
};

// Two ranks, a tied weight with a use on each: what they must have alike.
TEST(PipelineStages, UsesOfATiedWeightOnOtherRanksAreCompared) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"a", 2}});
    const auto run_error = [&](const std::string& name, std::unique_ptr<Linear> second, int frozen_on) {
      Sequential net;
      net.append(std::make_unique<Linear>(2, 2, false));
      second->tie_weight(dynamic_cast<Linear&>(net.get("0")).weight);
      net.append(std::move(second));
      PipelineOptions options{
          make_pipeline_schedule(PipelineKind::gpipe, 2, 1), {{"0"}, {"1"}}, test::pipe_border, untie(net)};
      MeanSquaredError loss;
      ProcessGroup group = rank.group().subgroup(name, {0, 1});
      Pipeline pipeline(net, &loss, group, compute, options);
      pipeline.materialise(1);
      if (rank.rank == frozen_on)
        for (const ParameterRef& use : options.tied[0].uses) use->set_trainable(false);
      const Tensor x(rank.context, {2, 2});
      const std::vector<PipelineMicroBatch> batch{{{x}, {x, scalar(rank.context, 4)}}};
      return error_text([&] { pipeline.run(batch, {}); });
    };
    EXPECT_THAT(
        run_error("frozen", std::make_unique<Linear>(2, 2, false), 1),
        HasSubstr("mismatch: pipeline: the uses of \"0.weight\" are not frozen alike on ranks 0 and 1"));
    EXPECT_THAT(
        run_error("layouts", std::make_unique<WithLayout>(rank.context, mesh), -1),
        HasSubstr("pipeline: the gradient of \"0.weight\" has no layout in \"0\" and another layout in "
                  "\"1\"; expected one layout"));
    EXPECT_EQ(run_error("alike", std::make_unique<Linear>(2, 2, false), -1), "no error");
  });
}

// Before the first action a rank gives the uses of a tied weight that it holds one memory.
TEST(PipelineStages, AnErrorOfTiedWeightsAtTheStartReachesAllRanks) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    Sequential net;
    for (int i = 0; i < 4; ++i) net.append(std::make_unique<Linear>(2, 2, false));
    dynamic_cast<Linear&>(net.get("2")).tie_weight(dynamic_cast<Linear&>(net.get("0")).weight);
    MeanSquaredError loss;
    Pipeline pipeline(net, &loss, rank.group(), compute,
                      {make_pipeline_schedule(PipelineKind::interleaved, 2, 1, 2),
                       {{"0"}, {"1"}, {"2"}, {"3"}},
                       test::pipe_border,
                       untie(net)});
    if (rank.rank == 1) pipeline.materialise(1);  // rank 0 holds both uses, and has no values
    const Tensor x(rank.context, {2, 2});
    const std::vector<PipelineMicroBatch> batch{{{x}, {x, scalar(rank.context, 4)}}};
    const Error e = error_of([&] { pipeline.run(batch, {}); });
    EXPECT_THAT(e.what(), HasSubstr("0.weight"));
    EXPECT_EQ(e.code() == ErrorCode::aborted, rank.rank == 1);
    if (rank.rank == 1) {
      EXPECT_THAT(e.what(), HasSubstr("aborted by rank 0: pipeline: tied weights: "));
    }
  });
}

// Two modules of another kind share a weight.
class Scale : public Module {
 public:
  Scale() { weight = add("weight", std::make_shared<Parameter>(Shape{2, 2})); }
  void tie_weight(ParameterRef other) { weight = tie("weight", std::move(other)); }
  ParameterRef weight;

 private:
  Tensors do_forward(Inputs x, Frame&) override { return {x[0]}; }
  Tensors do_backward(Inputs dy, Frame&) override { return {dy[0]}; }
};

TEST(PipelineStages, WeightsThatCannotBeUntiedAreNamed) {
  test::run_ranks(Ranks::threads, 1, [](Rank& rank) {
    Compute compute(rank.context);
    const auto text = [](Module& net) { return error_text([&] { untie(net); }); };
    Nested net;
    net.tail.tie_weight(net.head.weight);
    EXPECT_EQ(error_text([&] {
                Pipeline(net, nullptr, rank.group(), compute,
                         {make_pipeline_schedule(PipelineKind::forward_only, 1, 1),
                          {{"head", "body", "tail"}},
                          nullptr});
              }),
              "bad_argument: pipeline: \"head\" and \"tail\" share the weight \"head.weight\"; expected "
              "untie() and its result in `tied`");
    EXPECT_EQ(error_text([&] {
                Pipeline(net, nullptr, rank.group(), compute,
                         {make_pipeline_schedule(PipelineKind::forward_only, 1, 1),
                          {{"head", "body", "tail"}},
                          {},
                          {{untie(net)[0].uses, {"head", "foot"}}}});
              }),
              "bad_argument: pipeline: tied: \"foot\" is in no stage");
    Nested taken;
    taken.tail.tie_weight(taken.head.weight);
    PipelineOptions options{make_pipeline_schedule(PipelineKind::forward_only, 1, 1),
                            {{"head", "body", "tail"}},
                            {},
                            untie(taken)};
    Pipeline frozen(taken, nullptr, rank.group(), compute, options);
    options.after_gradients = [](std::span<Parameter* const>, int) {};
    EXPECT_EQ(error_text([&] { Pipeline(taken, nullptr, rank.group(), compute, options); }),
              "bad_argument: pipeline: after_gradients with tied weights; expected one of them");
    taken.head.weight->set_trainable(false);
    const Tensor x(rank.context, {2, 2});
    EXPECT_EQ(error_text([&] {
                frozen.run(std::vector<PipelineMicroBatch>{{{x}, {}}}, {});
              }),
              "bad_argument: pipeline: the uses of \"head.weight\" are not frozen alike");
    Nested full;
    full.tail.tie_weight(full.head.weight);
    full.head.weight->materialise(compute);
    EXPECT_EQ(text(full),
              "bad_argument: pipeline stages: \"head.weight\" has memory; expected a tied weight without");
    Sequential scales;
    for (int i = 0; i < 2; ++i) scales.append(std::make_unique<Scale>());
    dynamic_cast<Scale&>(scales.get("1")).tie_weight(dynamic_cast<Scale&>(scales.get("0")).weight);
    EXPECT_EQ(text(scales),
              "bad_argument: pipeline stages: \"1\" shares the weight \"0.weight\" and is no "
              "Linear; expected a Linear");
  });
}

// A boundary that nothing crosses in a pipeline.
class Crossed : public Boundary {
 public:
  Transfer start_forward(const Tensor&, const TensorName&) const override { return {}; }
  Transfer start_backward(const Tensor&, const TensorName&) const override { return {}; }
  LayoutRef out_layout(const LayoutRef& in, const TensorName&) const override { return in; }
};

TEST(PipelineStages, BoundariesAroundStagesAreRefused) {
  for (const bool before : {true, false}) {
    Nested net;
    const auto boundary = std::make_shared<Crossed>();
    before ? net.body.add_before(boundary) : net.body.add_after(boundary);
    const std::vector<std::string> inside{"head", "body.*", "tail"}, around{"head", "body", "tail"};
    EXPECT_EQ(
        error_text([&] { pipeline_path(net, inside); }),
        "bad_argument: pipeline stages: \"body\" has boundaries of its own, which no stage would cross");
    EXPECT_EQ(pipeline_path(net, around), around);
  }
}

}  // namespace
}  // namespace weft::pipeline_test
