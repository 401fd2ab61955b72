// The display of a training run for a person. For use by one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model_kind.hpp"
#include "weft/base/clock.hpp"

namespace weft::tools {

/// `bar`: one line that is overwritten, no wider than the terminal; lines if standard output is no terminal.
/// `lines`: a line every few seconds. `none`: nothing. `auto`: a bar on a terminal, otherwise lines. Steps
/// run over [first, until).
class ProgressBar {
 public:
  ProgressBar(const std::string& style, std::int64_t first, std::int64_t until, KindWords words);
  /// The loss of an evaluation, which is shown from now on.
  void evaluated(double loss) { held_out_ = loss; }
  struct Values {
    std::int64_t step;
    double loss, lr, grad_norm, units_per_s, memory_mib;  ///< units: KindWords::rate
    double peak_share;                                    ///< 0: not known
  };
  void show(const Values& values);
  void finish();

 private:
  enum class Style { bar, lines, none };
  Style style_;
  std::int64_t first_, until_;
  KindWords words_;
  std::optional<double> held_out_;
  Clock::time_point began_, shown_{};
};

/// Losses over time as a small drawing in text, with its scale, at most `columns` wide (at least 40).
std::string loss_curve(const std::vector<double>& losses, int columns);

/// The columns of a line of standard output: the terminal's width, COLUMNS, or 80.
int output_columns();

}  // namespace weft::tools
