// One rank's parts in the steps of a program. All memory is allocated before the first call, so that only
// weft needs memory later.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "faults/strike.hpp"
#include "rank/gradient_trial.hpp"
#include "rank/trial.hpp"
#include "rank/window_trial.hpp"
#include "runner.hpp"

namespace weft::check {

class Parts {
 public:
  Parts(const Program& p, int rank, Context& context, const Settings& settings)
      : exact_(settings.exact()),
        calls_(p.steps.size()),
        windows_(p.steps.size()),
        gradients_(p.steps.size()) {
    if (shares_block(p)) pool_ = std::make_unique<Pool>(context, kPoolBytes);
    for (const int k : order_of(p, rank)) {
      if (!p.takes_part(k, rank)) continue;
      const Step s = as_called(p, k, rank);
      const int me = p.rank_in(s.group, rank), n = p.group_size(s.group);
      if (s.does == Does::call)
        calls_[at(k)] = std::make_unique<Trial>(context, s, me, n, settings.call_deadline(p), pool_.get());
      if (s.does == Does::window)
        windows_[at(k)] = std::make_unique<WindowTrial>(context, s, me, n, pool_.get());
      if (s.does == Does::gradients)
        gradients_[at(k)] =
            std::make_unique<GradientTrial>(context, s, me, n, pool_.get(), p.fault.kind == FaultKind::none);
    }
  }
  /// Only with shares_block().
  Pool& pool() const { return *pool_; }
  Trial& calls(int k) const { return *calls_[at(k)]; }
  /// Returns null if the step is no window.
  WindowTrial* window(int k) const { return windows_[at(k)].get(); }

  GradientTrial& gradients(int k) const { return *gradients_[at(k)]; }

  /// The fault in the memory of a finished step. Empty: none.
  std::string complaint(int k) const {
    return window(k) ? window(k)->complaint() : calls(k).complaint(exact_);
  }
  void overwrite(int k) const {
    of(k, [](auto& part) { part.overwrite(); });
  }
  std::string overwritten(int k) const {
    std::string wrong;
    of(k, [&](const auto& part) { wrong = part.overwritten(); });
    return wrong;
  }

 private:
  static constexpr std::int64_t kPoolBytes = 16 << 20;
  template <class F>
  void of(int k, const F& f) const {
    if (window(k) != nullptr) return f(*windows_[at(k)]);
    gradients_[at(k)] != nullptr ? f(*gradients_[at(k)]) : f(*calls_[at(k)]);
  }
  static std::size_t at(int k) { return static_cast<std::size_t>(k); }
  const bool exact_;
  std::unique_ptr<Pool> pool_;
  // By step.
  std::vector<std::unique_ptr<Trial>> calls_;
  std::vector<std::unique_ptr<WindowTrial>> windows_;
  std::vector<std::unique_ptr<GradientTrial>> gradients_;
};

}  // namespace weft::check
