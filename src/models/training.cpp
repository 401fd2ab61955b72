#include "weft/models/training.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <exception>
#include <limits>
#include <string>

#include "base/hash.hpp"
#include "models/agreement.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/replicas.hpp"
#include "weft/store/elastic.hpp"
#include "weft/train/replicas.hpp"

namespace weft {
namespace {

constexpr const char* kEarlyStop = "train.early_stop";

[[noreturn]] void refuse_plan(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "train: " + text);
}

[[noreturn]] void refuse_hook() { refuse_plan("a hook failed on another rank; its own error says why"); }

void check_plan(const TrainingPlan& plan) {
  const auto expect = [](const char* name, std::int64_t value) {
    if (value < 0) refuse_plan(fmt::format("{} is {}; expected 0 or more", name, value));
  };
  if (!plan.step) refuse_plan("step is empty; expected a function");
  expect("steps", plan.steps);
  expect("evaluate_every", plan.evaluate_every);
  expect("patience", plan.patience);
  expect("checkpoints.every_steps", plan.checkpoints.every_steps);
  expect("checkpoints.keep", plan.checkpoints.keep);
  expect("checkpoints.every", plan.checkpoints.every.count());
  if (!(plan.least_gain >= 0))
    refuse_plan(fmt::format("least_gain is {}; expected 0 or more", plan.least_gain));
  if (plan.evaluate_every > 0 && !plan.evaluate)
    refuse_plan(
        fmt::format("evaluate_every is {} and evaluate is empty; expected a function", plan.evaluate_every));
  if (plan.patience > 0 && plan.evaluate_every == 0)
    refuse_plan(fmt::format("patience is {} and evaluate_every 0; expected evaluations", plan.patience));
  const bool saves = plan.checkpoints.every_steps > 0 || plan.checkpoints.every.count() > 0;
  if (saves && plan.checkpoints.folder.empty())
    refuse_plan("checkpoints.folder is empty; expected a folder for the checkpoints");
}

std::int64_t digest_of_plan(const TrainingPlan& p) {
  const CheckpointPlan& c = p.checkpoints;
  Fnv1a hash;
  for (const std::int64_t number :
       {p.steps, p.evaluate_every, p.patience, std::bit_cast<std::int64_t>(p.least_gain), c.every_steps,
        static_cast<std::int64_t>(c.every.count()), static_cast<std::int64_t>(c.keep),
        static_cast<std::int64_t>(c.at_end), static_cast<std::int64_t>(c.background),
        static_cast<std::int64_t>(c.check_replicas)})
    hash.add(static_cast<std::uint64_t>(number));
  hash.add(c.folder.string());
  if (const auto found = p.resumed.find(kEarlyStop); found != p.resumed.end()) hash.add(found->second);
  return static_cast<std::int64_t>(hash.value);
}

// The lowest loss of evaluations, and how many since then were not lower.
struct Patience {
  std::optional<double> best;
  std::int64_t in_vain = 0;

  void see(double loss, double least_gain) {
    if (!best || loss < *best - least_gain)
      best = loss, in_vain = 0;
    else
      ++in_vain;
  }
  std::string text() const { return fmt::format("{} {}", *best, in_vain); }
  static Patience from_text(const std::string& text) {
    Patience p;
    double loss = 0;
    const char* const end = text.data() + text.size();
    const auto number = std::from_chars(text.data(), end, loss);
    const bool more = number.ec == std::errc() && number.ptr != end && *number.ptr == ' ';
    if (!more || std::from_chars(number.ptr + 1, end, p.in_vain).ptr != end)
      refuse_plan(
          fmt::format("\"{}\" of the checkpoint is \"{}\"; expected a loss and a count", kEarlyStop, text));
    p.best = loss;
    return p;
  }
};

// A training on one rank.
class Run {
 public:
  Run(Trainer& trainer, const TrainingPlan& plan)
      : trainer_(trainer), plan_(plan), mesh_(trainer.model().mesh), saved_at_(Clock::now()) {
    if (const auto found = plan.resumed.find(kEarlyStop); found != plan.resumed.end())
      patience_ = Patience::from_text(found->second);
  }

  TrainingEnd go() {
    hook(plan_.on_begin);
    TrainingEnd end;
    // A run that has ended for want of a gain, and is resumed, has ended.
    bool ended = impatient();
    if (ended) end.why = TrainingEnded::patience;
    while (!ended && trainer_.steps() < plan_.steps) {
      take_step();
      const std::int64_t now = trainer_.steps();
      if (plan_.evaluate_every > 0 && now % plan_.evaluate_every == 0) evaluate();
      const Agreed agreed = exchange();
      end.reason = agreed.reason;
      if (agreed.reason > 0)
        end.why = TrainingEnded::stop;
      else if (agreed.impatient)
        end.why = TrainingEnded::patience;
      ended = end.why != TrainingEnded::steps;
      const CheckpointPlan& c = plan_.checkpoints;
      const bool last = ended || now >= plan_.steps;
      if (!c.folder.empty() &&
          (agreed.due || (last && c.at_end) || (c.every_steps > 0 && now % c.every_steps == 0)))
        save();
    }
    if (saves_) saves_->wait();
    end.steps = trainer_.steps();
    end.best_loss = patience_.best;
    hook(plan_.on_end, end);
    exchange();
    return end;
  }

 private:
  // All ranks know this after a step.
  struct Agreed {
    int reason;
    bool due;        // a checkpoint, by the clock
    bool impatient;  // a rank has seen too many evaluations without a lower loss
  };

  // A hook that fails must not leave the other ranks waiting: the next exchange notifies them.
  template <class Action>
  void guarded(const Action& action) {
    if (failed_) return;
    try {
      action();
    } catch (...) {
      failed_ = std::current_exception();
    }
  }
  template <class Hook, class... Arguments>
  void hook(const Hook& hook, const Arguments&... arguments) {
    guarded([&] {
      if (hook) hook(arguments...);
    });
  }

  // A function of the plan that calls the trainer. Other ranks know of an error of the trainer. They
  // learn of another error in the trainer's call, or, if that is done on this rank, in the next exchange.
  template <class Action, class IsDone>
  void with_trainer(const Action& action, const IsDone& is_done) {
    const std::int64_t failed = trainer_.calls().failed;
    try {
      action();
    } catch (...) {
      if (trainer_.calls().failed != failed) throw;
      if (!is_done()) {
        trainer_.give_up();
        throw;
      }
      if (!failed_) failed_ = std::current_exception();
    }
  }

  void take_step() {
    const std::int64_t number = trainer_.steps();
    Trainer::Result result;
    with_trainer(
        [&] {
          result = plan_.step(number);
          if (trainer_.steps() != number + 1)
            refuse_plan(fmt::format("step({}) left the trainer at step {}; expected {}", number,
                                    trainer_.steps(), number + 1));
        },
        [&] { return trainer_.steps() > number; });
    if (mesh_.rank() == 0) report_step(trainer_.steps());
    hook(plan_.on_step, result);
  }

  void evaluate() {
    const std::int64_t begun = trainer_.calls().begun;
    Trainer::Evaluation found;
    with_trainer([&] { found = plan_.evaluate(); }, [&] { return trainer_.calls().begun > begun; });
    if (!failed_) patience_.see(found.loss, plan_.least_gain);
    hook(plan_.on_evaluation, found);
  }

  bool impatient() const noexcept { return plan_.patience > 0 && patience_.in_vain >= plan_.patience; }

  Agreed exchange() {
    int reason = 0;
    guarded([&] {
      if (plan_.stop) reason = std::max(0, plan_.stop());
    });
    const Duration every = plan_.checkpoints.every;
    const bool due = mesh_.rank() == 0 && every.count() > 0 && Clock::now() - saved_at_ >= every;
    const Numbers least =
        least_of(trainer_.compute(), mesh_,
                 {failed_ ? -1 : 0, -static_cast<std::int64_t>(reason), due ? -1 : 0, impatient() ? -1 : 0});
    if (failed_) std::rethrow_exception(failed_);
    if (least[0] != 0) refuse_hook();
    return {static_cast<int>(-least[1]), least[2] != 0, least[3] != 0};
  }

  // Along the axes on which ranks may hold the same elements; the stages of a pipeline have others each.
  void compare_replicas() {
    const ParallelModel& model = trainer_.model();
    // All ranks make all comparisons, also a rank that has found a difference.
    const auto compare = [&](const DeviceMesh& axes) {
      if (axes.size() == 1) return;
      try {
        check_replicas(model.parameters(), axes, &trainer_.compute());
      } catch (...) {
        if (!failed_) failed_ = std::current_exception();
      }
    };
    compare(model.data);
    compare(model.tensor);
    if (model.domain) compare(model.domain.axes());
  }

  void save() {
    const CheckpointPlan& c = plan_.checkpoints;
    CheckpointExtra extra;
    guarded([&] {
      if (c.extra) extra = c.extra();
    });
    const std::int64_t of_hook = failed_ ? -2 : 0;
    if (c.check_replicas) compare_replicas();
    const Numbers least =
        least_of(trainer_.compute(), mesh_, {std::min<std::int64_t>(of_hook, failed_ ? -1 : 0)});
    if (failed_) std::rethrow_exception(failed_);
    if (least[0] == -1) refuse_plan("replicas differ on another rank; its own error says which");
    if (least[0] != 0) refuse_hook();
    if (plan_.patience > 0 && patience_.best) extra[kEarlyStop] = patience_.text();
    saved_at_ = Clock::now();
    const bool background = c.background;
    if (background && !saves_) saves_.emplace(mesh_);
    if (background)
      trainer_.save(*saves_, c.folder, extra, {.keep = c.keep});
    else
      trainer_.save(c.folder, extra, {.keep = c.keep});
    hook(plan_.on_checkpoint, trainer_.steps());
  }

  Trainer& trainer_;
  const TrainingPlan& plan_;
  const DeviceMesh mesh_;
  Patience patience_;
  std::optional<AsyncCheckpoint> saves_;
  Clock::time_point saved_at_;
  std::exception_ptr failed_;
};

}  // namespace

TrainingEnd train(Trainer& trainer, const TrainingPlan& plan) {
  const DeviceMesh& mesh = trainer.model().mesh;
  std::exception_ptr failed;
  std::optional<Run> run;
  try {
    check_plan(plan);
    run.emplace(trainer, plan);
  } catch (...) {
    failed = std::current_exception();
  }
  const std::int64_t digest = digest_of_plan(plan);
  const Numbers least = least_of(trainer.compute(), mesh, {failed ? -1 : 0, digest, ~digest});
  if (failed) std::rethrow_exception(failed);
  if (least[0] != 0)
    refuse_plan("another rank was given a plan that cannot be followed; its own error says why");
  if (least[1] != ~least[2])
    refuse_plan(
        fmt::format("the plan is not the same on all ranks of {}; expected the same steps, evaluations "
                    "and checkpoints",
                    to_string(mesh.shape())));
  return run->go();
}

}  // namespace weft
