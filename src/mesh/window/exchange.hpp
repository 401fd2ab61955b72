// An exchange of windows in flight: a call of the group (exchange.cpp), on any transport and device.
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

class Exchange {
 public:
  using Plan = Window::Plan;
  using Program = Plan::Program;

  Exchange(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields, Stream stream);
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange();

  const Program& program() const noexcept { return *program_; }
  std::uint64_t judged() const noexcept { return judged_; }
  const Pair& pair(std::size_t field) const noexcept { return pairs_[field]; }

 protected:
  /// It is over, or has failed: others may take its memory, and it uses its program no more.
  void leave() const noexcept {
    std::vector<const Exchange*>& all = plan_->in_flight;
    if (!all.empty() && all.back() == this)
      all.pop_back();
    else
      std::erase(all, this);
  }
  /// The failure that other ranks are notified of if the program drops the exchange.
  Failure dropped() const;
  const Pair& pair(const Program::Step& step) const noexcept { return pairs_[step.field]; }
  /// Where the adjoint adds: in the part, or beside it.
  std::byte* sums_of(std::size_t field) const noexcept {
    const std::int64_t at = program_->sums[field];
    return at < 0 ? pairs_[field].part : buffer_.data() + at;
  }
  /// Memory for messages: spare one of the plan, or new.
  Tensor room_of(std::int64_t bytes) const;
  void keep(Tensor room) const;
  /// Copies the elements that this rank's window has of its own part; fill() writes its elements that are
  /// numbers.
  void copy_own() const;
  void fill() const;
  // The adjoint: sums are cleared, then the received elements are added in the order of the ranks, this
  // rank's own among them; then the sums are rounded.
  void clear_sums() const;
  void add(const Program::Step& step, const std::byte* from) const;
  void add_own() const;
  void round_sums() const;

  const std::shared_ptr<const Plan> plan_;
  const Program* const program_;  // the plan's
  const Pairs pairs_;
  const std::uint64_t judged_;  // the id of the fields
  const Stream stream_;
  DeviceRuntime& runtime_;
  Tensor buffer_;  // of program_->room bytes
};

}  // namespace weft::windows
