// An exchange of windows in flight. exchange.cpp begins it as a call of the group, on any transport and
// device.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "mesh/window/program.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft::windows {

/// A list that allocates nothing while it is short.
template <class T, std::size_t kFew>
class Few {
 public:
  explicit Few(std::span<const T> list) : count_(list.size()) {
    if (list.size() > kFew)
      many_.assign(list.begin(), list.end());
    else
      std::copy(list.begin(), list.end(), few_.begin());
  }
  const T& operator[](std::size_t i) const noexcept { return count_ > kFew ? many_[i] : few_[i]; }

 private:
  std::size_t count_;
  std::array<T, kFew> few_;  // the first count_ of them
  std::vector<T> many_;
};
using Pairs = Few<Pair, 8>;

/// One window's part in an exchange in flight: the memory that it uses, and the work that this rank does by
/// itself.
class Exchange {
 public:
  using Plan = Window::Plan;
  using Program = Plan::Program;

  Exchange(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields, Stream stream);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { leave(); }

  const Plan& plan() const noexcept { return *plan_; }
  const Program& program() const noexcept { return *program_; }
  std::uint64_t judged() const noexcept { return judged_; }
  const Pair& pair(std::size_t field) const noexcept { return pairs_[field]; }

  /// Before the group's exchange: sums of an adjoint are 0.
  void clear() const;
  /// All elements that a rank without other ranks has to move.
  void move_own(std::span<const ExchangeField> memory) const;
  /// Writes the elements of the window that are numbers. This needs no other rank.
  void fill() const;
  /// The exchange has ended or failed. Others may use its memory, and it does not use its program any more.
  void leave() const noexcept {
    std::vector<const Exchange*>& all = plan_->in_flight;
    if (!all.empty() && all.back() == this)
      all.pop_back();
    else
      std::erase(all, this);
  }

 private:
  const Pair& pair(const Program::Step& step) const noexcept { return pairs_[step.field]; }

  const std::shared_ptr<const Plan> plan_;
  const Program* const program_;  // the plan's
  const Pairs pairs_;
  const std::uint64_t judged_;  // the id of the fields
  const Stream stream_;
  DeviceRuntime& runtime_;
};

}  // namespace weft::windows
