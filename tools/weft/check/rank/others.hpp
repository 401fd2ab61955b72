// If a rank is stopped inside the others' memory (shares_block()), the other ranks have a separate group,
// whose buffers lie in one block with all their other buffers. A call of this group is in flight while the
// ranks give that memory other pages.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "rank/trial.hpp"
#include "rank/window_trial.hpp"
#include "runner.hpp"

namespace weft::check {

class Others {
 public:
  /// Collective among the ranks that are not struck.
  Others(const Program& p, int rank, Context& context, const Membership& member, const Settings& settings,
         SharedReport& shared, Pool& pool);
  ~Others();
  Others(const Others&) = delete;
  Others& operator=(const Others&) = delete;
  /// Starts an all_reduce or an exchange of windows, calls `give_back`, and finishes. The last rank starts
  /// when all others have called `give_back`; or, in half of the programs with windows, about when they do.
  /// Returns what is wrong, and whether a late rank would explain it.
  std::pair<std::string, bool> go_on_while(const std::function<void()>& give_back);

 private:
  void start();
  void finish();

  const Program& p_;
  const int rank_;
  SharedReport& shared_;
  ProcessGroup group_;
  std::unique_ptr<Trial> call_;
  std::unique_ptr<WindowTrial> window_;
  Windows windows_;
  Step step_;
  Work work_;
  std::vector<WindowTransfer> transfers_;
};

}  // namespace weft::check
