// The Backend that has every operation, over an inner backend. fail(), failure(), quiet(), quiesce(), gone()
// and announce_sleep() may be called from any thread, the other functions from one thread at a time.
// compose.cpp posts and polls; texts.cpp writes the texts for users about inner calls.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/compose/composed_call.hpp"
#include "backends/exchange/by_messages.hpp"
#include "host/local_memory.hpp"
#include "weft/backends/backend.hpp"
#include "weft/backends/call_record.hpp"

namespace weft {

class Composer final : public Backend {
 public:
  Composer(Context& context, std::unique_ptr<Backend> inner, int rank, int size)
      : rank_(rank),
        size_(size),
        memory_(context.options().allocator, context.log()),
        inner_(std::move(inner)),
        exchanges_(context, *inner_, rank),
        traits_(inner_->traits()) {}
  ~Composer() override;

  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override;
  Step poll(OpState& s) noexcept override;
  bool healthy() noexcept override { return inner_->healthy(); }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override;
  bool ask(const OpState& s) noexcept override;
  void answer() noexcept override { inner_->answer(); }
  void fail(const Failure& why) noexcept override;
  Failure failure() const override;
  bool quiet() const noexcept override { return inner_->quiet(); }
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override {
    const bool reached = inner_->quiesce(deadline, exposed);
    if (reached) quiesced_.store(true, std::memory_order_release);
    return reached;
  }
  void announce_sleep(bool asleep) noexcept override { inner_->announce_sleep(asleep); }
  void batch(bool begin) noexcept override {
    batching_ = begin;
    inner_->batch(begin);
  }
  bool wait_on(OpState& s, Stream stream) noexcept override;
  void check_stream(Stream stream, bool calls) override { inner_->check_stream(stream, calls); }
  std::vector<int> gone() const noexcept override { return inner_->gone(); }
  std::vector<LastCall> last_calls() noexcept override;
  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    return inner_->probe(source, tag);
  }
  std::unique_ptr<PlannedExchange> plan_exchange(const ExchangePlan& plan) override {
    return traits_.has(Op::exchange) ? inner_->plan_exchange(plan) : exchanges_.plan(plan);
  }

 private:
  bool exchanges(const OpState& s) const noexcept {
    return s.op == Op::exchange && !traits_.has(Op::exchange);
  }
  // The number of calls whose names are kept for the texts of failures; it is larger than a ring.
  static constexpr std::uint64_t kRemembered = 256;

  static Composed*& of(OpState& s) noexcept { return *reinterpret_cast<Composed**>(s.scratch.data()); }
  static const Composed* of(const OpState& s) noexcept {
    return *reinterpret_cast<const Composed* const*>(s.scratch.data());
  }
  void refuse(const OpState& s, ErrorCode code, std::string text) noexcept;
  void start(Composed& c) noexcept;
  void start_queued() noexcept;
  void post_step(Composed& c) noexcept;
  void post_exchange(Composed& c) noexcept;
  void post_all_to_all(Composed& c, int tag) noexcept;
  void post_messages(Composed& c, int tag) noexcept;
  static OpState& next_inner(Composed& c, Op op, int tag) noexcept;
  void post_collective(Composed& c, OpState& inner) noexcept;
  void post_inner(Composed& c, OpState& inner) noexcept;
  static OpState& next_inner(Composed& c) noexcept { return c.inner[static_cast<std::size_t>(c.count++)]; }
  Step poll(Composed& c) noexcept;
  Step poll_inner(Composed& c) noexcept;
  bool copy(Composed& c) noexcept;
  bool work(Composed& c) noexcept;
  void spare(Composed& c) noexcept;
  std::uint64_t users_call(std::uint64_t inner) const noexcept {
    return users_call_[inner % kRemembered].load(std::memory_order_relaxed);
  }
  Op users_op(std::uint64_t call) const noexcept {
    return users_op_[call % kRemembered].load(std::memory_order_relaxed);
  }
  std::string users_words(std::string text, Op inner, Op users) const;

  const int rank_, size_;
  // Keep this order of members: the inner backend is destroyed before the memory that the calls exposed to
  // it.
  LocalMemory memory_;
  std::vector<std::unique_ptr<Composed>> calls_;  // all objects that were ever made
  std::vector<Composed*> spare_;
  std::unique_ptr<Backend> inner_;
  ExchangeByMessages exchanges_;
  const Traits traits_;
  // collectives that have not started, because an earlier collective is not completely posted
  std::deque<Composed*> queue_;
  Composed* unfinished_ = nullptr;  // the collective that is not completely posted
  std::uint64_t next_inner_ = 0;    // the number of the next inner collective
  std::uint64_t next_exchange_ = 0;
  bool batching_ = false;
  bool by_messages_ = false;  // some collective was made of messages, so the inner backend does not know it
  std::atomic<bool> quiesced_{false};
  // For texts: for each inner call number the user's call number, and for each of these the user's operation.
  std::array<std::atomic<std::uint64_t>, kRemembered> users_call_{};
  std::array<std::atomic<Op>, kRemembered> users_op_{};
};

}  // namespace weft
