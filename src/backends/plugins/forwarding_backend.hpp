// A Backend that passes every call on to another Backend: the base class of backends that change some
// functions.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "weft/backends/backend.hpp"

namespace weft {

/// Forwards the functions of version 6.0 of the ABI. Also forwards exchanges, which are requested only from a
/// transport that has them. Functions of later minor versions keep their defaults.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}
  const Traits& traits() const noexcept override { return inner_->traits(); }
  void post(OpState& s) noexcept override { inner_->post(s); }
  Step poll(OpState& s) noexcept override { return inner_->poll(s); }
  bool healthy() noexcept override { return inner_->healthy(); }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    return inner_->missing(s, story);
  }
  void fail(const Failure& why) noexcept override { inner_->fail(why); }
  Failure failure() const override { return inner_->failure(); }
  bool quiet() const noexcept override { return inner_->quiet(); }
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override {
    return inner_->quiesce(deadline, exposed);
  }
  void announce_sleep(bool asleep) noexcept override { inner_->announce_sleep(asleep); }
  void batch(bool begin) noexcept override { inner_->batch(begin); }
  bool wait_on(OpState& s, Stream stream) noexcept override { return inner_->wait_on(s, stream); }
  void check_stream(Stream stream, bool calls) override { inner_->check_stream(stream, calls); }
  std::vector<int> gone() const noexcept override { return inner_->gone(); }
  std::unique_ptr<PlannedExchange> plan_exchange(const ExchangePlan& plan) override {
    return inner_->plan_exchange(plan);
  }

 protected:
  Backend& inner() noexcept { return *inner_; }

 private:
  const std::unique_ptr<Backend> inner_;
};

}  // namespace weft
