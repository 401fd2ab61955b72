// The files to which a run writes its steps: JSON lines, CSV, events of TensorBoard, and curves at its end.
// One thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/files/new_file.hpp"
#include "chart.hpp"
#include "event_file.hpp"
#include "model_kind.hpp"
#include "weft/models/trainer.hpp"

namespace weft::tools {

struct StepValues {
  std::int64_t step = 0, epoch = 0;
  double loss = 0, grad_norm = 0, lr = 0, units_per_s = 0, seconds = 0;  ///< units: KindWords::rate
  double memory_mib = 0;                                                 ///< resident, of rank 0
  double peak_share = 0;                       ///< of the arithmetic that the cores can do; 0: not known
  std::vector<double> imbalance{}, dropped{};  ///< of the layers with experts
};

class RunLog {
 public:
  /// Files without a name are not written.
  struct Files {
    std::string metrics, csv, tensorboard, curves;
    /// Throws bad_argument if the name of `curves` ends neither in .svg nor in .png.
    void check() const;
  };
  /// `resumed`: files that are there keep the lines of steps before `first`. Throws system.
  RunLog(const Files& files, std::int64_t first, bool resumed, KindWords words);

  /// `evaluation_follows`: the step is written when evaluated() has added its evaluation.
  void step(const StepValues& values, bool evaluation_follows);
  void evaluated(const Trainer::Evaluation& evaluation);
  /// Writes what waits, and the curves.
  void finish();

 private:
  struct Row {
    StepValues values;
    std::optional<Trainer::Evaluation> evaluation;
  };
  void keep_points(const std::string& lines);
  void write_waiting();
  void draw() const;
  Files files_;
  KindWords words_;
  std::optional<NewFile> metrics_, csv_;
  std::optional<EventFile> events_;
  std::optional<Row> waits_;
  Curve training_, held_out_;
};

}  // namespace weft::tools
