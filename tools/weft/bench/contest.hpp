// Programs that measure one list of cases in turns, case by case and round by round. Their results must be
// equal. For use by one thread.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "job.hpp"
#include "options.hpp"
#include "other_load.hpp"

namespace weft::bench {

struct ContestCell {
  double median_us = 0, p99_us = 0;
  std::vector<double> rounds{};  ///< the medians of all of them; median_us is the least
  nlohmann::ordered_json row{};  ///< all results of the program in that round
};

/// A program and its measurements.
struct Contestant {
  std::string title{}, version{};
  bool ours = true;  ///< must be there; a peer may be left out
  std::unique_ptr<Job> job{};
  std::vector<std::optional<ContestCell>> cells{};
  std::string gone{};  ///< why it measures no more

  const ContestCell* cell(std::size_t k) const { return k < cells.size() && cells[k] ? &*cells[k] : nullptr; }
};

class Contest {
 public:
  /// `op`: the name for texts. `options` must outlive this object.
  Contest(const Options& options, std::string op, std::vector<std::string> cases);

  /// Starts a program. Throws system if one of our programs does not report its settings.
  Contestant& enter(const WorkFolder& folder, const std::string& title, bool ours, Job::Start start);
  /// Runs all rounds. Throws system if one of our programs fails, or if random projections and norms
  /// (along_…, norm_…) of a program differ from those of the first program.
  void run();

  const std::vector<std::string>& cases() const noexcept { return cases_; }
  const std::deque<Contestant>& all() const noexcept { return all_; }
  /// `text` and the times of all programs: `title` is the heading of the first column.
  std::string times_table(const std::string& title) const;
  /// How each program was run, and on which machine.
  std::string notes() const;
  nlohmann::ordered_json to_json() const;

 private:
  void give_up(Contestant& c, const std::string& why) const;
  void turn(Contestant& c, std::size_t k);
  /// Prints the figures of the last round on standard error as soon as it ends: all cases take minutes.
  void tell(std::size_t k) const;
  void compare(const Contestant& c, std::size_t k, const nlohmann::ordered_json& row);
  const Options& o_;
  std::string op_;
  std::vector<std::string> cases_;
  std::deque<Contestant> all_;
  OtherLoad load_;
  std::string busy_;               // what other programs did meanwhile
  nlohmann::ordered_json checks_;  // the first program's row of this case
};

/// Throws bad_argument that names the flag if there is no word or an unknown word.
void expect_known(const char* flag, const std::vector<std::string>& words,
                  const std::vector<std::string>& known);

}  // namespace weft::bench
