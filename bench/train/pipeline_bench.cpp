// Pipelines: the bubble of each schedule, on ranks that sleep instead of computing, and the time of a message
// between stages.
//
//   pipeline_bench --ranks 4 --micro-batches 8 --milliseconds 5 --bytes 1048576 --plot timeline.svg
//
// A forward pass sleeps so many milliseconds, and so does each half of a backward pass; stages of
// `interleaved` sleep half as long. So ranks need no core of their own. The bubble is the part of the ranks'
// time in which they sleep in no pass, from the first pass to the end of the last; the least of five runs
// counts, because a shared machine is sometimes slower. The picture shows these runs.
//
// A message: a stage of two ranks hands on a tensor of so many bytes, 32 times; beside it, the same number of
// sends and receives of the group, with one receive posted ahead. Medians of 20 turns.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/files/new_file.hpp"
#include "base/parse_number.hpp"
#include "processes.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/nn/loss.hpp"
#include "weft/pp/pipeline.hpp"

namespace weft::bench {
namespace {

struct PipelineFlags {
  int ranks = 4, micro_batches = 8, milliseconds = 5;
  std::int64_t bytes = 1 << 20;
  std::string plot;
};

// Sleeps in the place of a forward pass, and of each half of a backward pass.
class Sleeps : public Module {
 public:
  explicit Sleeps(Duration each) : each_(each) {}

 private:
  Tensors do_forward(Inputs x, Frame&) override {
    std::this_thread::sleep_for(each_);
    return {x[0]};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    std::this_thread::sleep_for(each_);
    frame.later([each = each_](Frame&) { std::this_thread::sleep_for(each); });
    return {dy[0]};
  }
  const Duration each_;
};

// Hands a tensor of its own on; without one it takes its input and gives nothing.
class HandsOn : public Module {
 public:
  explicit HandsOn(Tensor y = {}) : y_(std::move(y)) {}

 private:
  Tensors do_forward(Inputs, Frame&) override { return y_ ? Tensors{y_} : Tensors{}; }
  Tensors do_backward(Inputs dy, Frame&) override { return {dy[0]}; }
  const Tensor y_;
};

PipelineOptions options_of(const PipelineSchedule& schedule) {
  PipelineOptions options{schedule, {}, [](int, const Tensors& x) { return PipelineBorder{x[0].shape()}; }};
  for (int stage = 0; stage < schedule.stages(); ++stage) options.stages.push_back({std::to_string(stage)});
  return options;
}

// The spans of all ranks, on every rank.
PipelineTimeline gathered(ProcessGroup& group, const std::vector<PipelineTimeline::Span>& own) {
  constexpr std::size_t kWords = 5;
  std::vector<double> mine;
  for (const PipelineTimeline::Span& s : own)
    mine.insert(mine.end(), {static_cast<double>(s.action.kind), static_cast<double>(s.action.stage),
                             static_cast<double>(s.action.micro_batch), s.begin, s.end});
  std::vector<double> all(mine.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(mine, all).wait();
  PipelineTimeline t;
  double busy = 0;
  for (std::size_t at = 0; at < all.size(); at += kWords) {
    if (at % mine.size() == 0) t.ranks.emplace_back();
    const double* const w = all.data() + at;
    t.ranks.back().push_back({{static_cast<PipelineAction::Kind>(static_cast<int>(w[0])),
                               static_cast<int>(w[1]), static_cast<int>(w[2])},
                              w[3],
                              w[4]});
    t.length = std::max(t.length, w[4]);
    busy += w[4] - w[3];
  }
  t.bubble = 1 - busy / (t.length * group.size());
  return t;
}

// Returns the pictures.
std::vector<std::string> measure_bubbles(ProcessGroup& group, const PipelineFlags& flags) {
  constexpr int kRuns = 5;
  if (group.rank() == 0)
    std::printf("%d ranks, %d micro-batches, passes of %d ms\n%-12s %10s %10s\n", flags.ranks,
                flags.micro_batches, flags.milliseconds, "schedule", "simulated", "measured");
  std::vector<std::string> pictures;
  for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::interleaved,
                                  PipelineKind::zero_bubble}) {
    const int stages = kind == PipelineKind::interleaved ? 2 : 1;
    const PipelineSchedule s = make_pipeline_schedule(kind, flags.ranks, flags.micro_batches, stages);
    Compute compute(group.context());
    Sequential net;
    for (int stage = 0; stage < s.stages(); ++stage)
      net.append(std::make_unique<Sleeps>(std::chrono::milliseconds(flags.milliseconds) / stages));
    MeanSquaredError loss;
    Pipeline pipeline(net, &loss, group, compute, options_of(s));
    const Tensor x = Tensor::zeros(group.context(), {1, 1024});
    const std::vector<PipelineMicroBatch> batches(static_cast<std::size_t>(flags.micro_batches),
                                                  {{x}, {x, scalar(group.context(), x.count())}});
    PipelineTimeline best;
    for (int run = 0; run < kRuns; ++run) {
      pipeline.run(batches, {.seed = 1, .step = run});
      PipelineTimeline t = gathered(group, pipeline.spans());
      if (best.ranks.empty() || t.bubble < best.bubble) best = std::move(t);
    }
    const double simulated = simulate_pipeline(s).bubble;
    if (group.rank() == 0)
      std::printf("%-12s %8.1f %% %8.1f %%\n", s.name.c_str(), simulated * 100, best.bubble * 100);
    pictures.push_back(timeline_svg(best, s.name + ", measured"));
  }
  return pictures;
}

double microseconds(Clock::time_point since, int messages) {
  return std::chrono::duration<double, std::micro>(Clock::now() - since).count() / messages;
}
double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void measure_messages(ProcessGroup& all, const PipelineFlags& flags) {
  constexpr int kMessages = 32, kTurns = 20, kTag = 1;
  if (all.rank() > 1) return;
  ProcessGroup group = all.subgroup("messages", {0, 1});
  Compute compute(group.context());
  const Shape shape{1, flags.bytes / 4};
  const auto memory = [&] { return Tensor::zeros(group.context(), shape, DType::f32, Memory::shared); };
  const Tensor y = memory(), in[] = {memory(), memory()};
  Sequential net;
  net.append(std::make_unique<HandsOn>(y));
  net.append(std::make_unique<HandsOn>());
  Pipeline pipeline(net, nullptr, group, compute,
                    options_of(make_pipeline_schedule(PipelineKind::forward_only, 2, kMessages)));
  const std::vector<PipelineMicroBatch> batches(kMessages, {{y}, {}});
  std::vector<double> ours, plain;
  for (int turn = 0; turn < kTurns; ++turn) {
    group.barrier().wait();
    auto began = Clock::now();
    pipeline.run(batches, {});
    group.barrier().wait();
    ours.push_back(microseconds(began, kMessages));
    began = Clock::now();
    std::vector<Work> sent;
    Work posted[2];
    if (group.rank() == 0) {
      for (int m = 0; m < kMessages; ++m) sent.push_back(group.send(y, 1, {.tag = kTag}));
      wait_all(sent);
    } else {
      posted[0] = group.recv(in[0], 0, {.tag = kTag});
      for (int m = 0; m < kMessages; ++m) {
        if (m + 1 < kMessages) posted[(m + 1) % 2] = group.recv(in[(m + 1) % 2], 0, {.tag = kTag});
        posted[m % 2].wait();
      }
    }
    group.barrier().wait();
    plain.push_back(microseconds(began, kMessages));
  }
  if (group.rank() == 0)
    std::printf("message of %ld bytes: %.1f us by a pipeline, %.1f us by send and recv (ratio %.2f)\n",
                static_cast<long>(flags.bytes), median(ours), median(plain), median(ours) / median(plain));
}

// All pictures, one below the other.
std::string stacked(const std::vector<std::string>& pictures, int ranks) {
  const int height = 60 + 28 * ranks;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1180\" height=\"" +
                    std::to_string(height * static_cast<int>(pictures.size())) + "\">\n";
  for (std::size_t i = 0; i < pictures.size(); ++i)
    svg += "<g transform=\"translate(0," + std::to_string(height * static_cast<int>(i)) + ")\">\n" +
           pictures[i] + "</g>\n";
  return svg + "</svg>\n";
}

void rank_body(int rank, const std::shared_ptr<Store>& store, const PipelineFlags& flags) {
  Context context;
  ProcessGroup group = ProcessGroup::create(
      context, "shm", {.store = store, .rank = rank, .size = flags.ranks, .name = "pipeline_bench"});
  const std::vector<std::string> pictures = measure_bubbles(group, flags);
  if (rank == 0 && !flags.plot.empty())
    write_new_file(flags.plot, stacked(pictures, flags.ranks), "bench: --plot: ");
  if (flags.ranks > 1) measure_messages(group, flags);
  group.barrier().wait();
}

int pipeline_main(int argc, char** argv) {
  PipelineFlags flags;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    const auto number = [&](auto& to, std::int64_t least, std::int64_t most) {
      const auto n = parse_integer<std::int64_t>(value);
      if (!n || *n < least || *n > most)
        throw Error(ErrorCode::bad_argument, "pipeline_bench: " + name + " " + value + ": expected " +
                                                 std::to_string(least) + " to " + std::to_string(most));
      to = static_cast<std::decay_t<decltype(to)>>(*n);
    };
    if (name == "--ranks")
      number(flags.ranks, 1, 64);
    else if (name == "--micro-batches")
      number(flags.micro_batches, 1, 256);
    else if (name == "--milliseconds")
      number(flags.milliseconds, 1, 1000);
    else if (name == "--bytes")
      number(flags.bytes, 4, std::int64_t{1} << 30);
    else if (name == "--plot")
      flags.plot = value;
    else
      throw Error(ErrorCode::bad_argument, "pipeline_bench: no flag " + name);
  }
  return run_processes(flags.ranks,
                       [&](int rank, std::shared_ptr<Store> store) { rank_body(rank, store, flags); });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  try {
    return weft::bench::pipeline_main(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
