// Control messages and messages between this rank and each other one, over Gloo's unbound buffers.
//
// Gloo tells of a finished send or receive only to a thread that blocks for it, takes a shorter message than
// was asked for without a word, and ends the process on a longer one. So every pair of ranks has one stream
// of control messages of a known size, with a thread that reads it: a small message travels in its control
// message; for a large one the control message says how large it is, the receiver asks Gloo for exactly that
// once it has matched it, and another control message tells the sender that it has arrived. A pair waits for
// no other, and no pair for a collective. The thread is also how a peer's death is noticed.
#pragma once

#include <gloo/rendezvous/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "weft/backends/call_record.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/roll_call_messages.hpp"

namespace weft::gloo_backend {

using UnboundBuffer = std::unique_ptr<::gloo::transport::UnboundBuffer>;

/// What the links tell the backend. Called from any thread.
struct LinkEvents {
  std::function<void(OpState&)> finished;
  std::function<void(OpState&, Failure)> refuse;
  std::function<void(const Failure&)> fail;
  std::function<void(int peer)> before_leave;  // tests; may be null
};

/// What a rank says to another before a collective.
struct Announcement {
  CallRecord record{};
  std::int64_t gives = 0, expects = 0;  ///< all_to_all_v: elements between the two
};

class Links {
 public:
  Links(std::shared_ptr<::gloo::Context> context, UnexpectedLimits limits, LinkEvents events);
  /// Says good-bye where the group is well, so that peers do not take this rank for dead; up to 2 s.
  ~Links();

  /// Messages: see BlockingBackend::start.
  void start(OpState& s) noexcept;
  /// Tells all what this rank is about to do and waits until all have told the same. Throws mismatch;
  /// peer_lost where one has left. From the group's thread.
  void agree(const OpState& s);
  /// The call that agree() was about is over.
  void over() noexcept;
  /// Who holds up the call, of those that have not announced it, or have not sent or taken, and those they
  /// wait for; where all have, those that do not answer.
  std::vector<int> missing(const OpState& s, std::string& story);
  /// See Backend::ask(). Whoever runs answers, whatever its program does: a thread does it.
  bool ask(const OpState& s);
  /// The rank has not said that it leaves.
  bool stays(int rank);
  /// Ends all connections: see BlockingBackend::interrupt.
  void interrupt() noexcept;

  static constexpr std::size_t kEagerBytes = 4096;  ///< of a message in its control message
  /// Of what the two ends must have alike.
  static std::uint64_t layout() noexcept;

 private:
  struct ControlMessage;
  struct Peer;
  struct Envelope;
  void read(Peer& peer) noexcept;
  void end_threads() noexcept;
  void take(Peer& peer, const ControlMessage& control, const std::byte* payload);
  void fetch(Peer& peer, OpState& recv, std::uint64_t number);
  bool match(OpState& recv, const Envelope& envelope);  // with mutex_ held
  void write(Peer& peer, ControlMessage control, const void* payload = nullptr, std::size_t bytes = 0);
  std::vector<int> late(std::uint64_t call) const;
  std::vector<int> awaited_by(const OpState& s) const;
  std::vector<int> awaited() const;
  Failure left(int rank, const OpState* s) const;
  int size() const noexcept { return context_->size; }
  Failure wrong_size(const OpState& recv, const Envelope& envelope) const;

  const std::shared_ptr<::gloo::Context> context_;
  const LinkEvents events_;
  std::mutex mutex_;  // matching and announcements
  std::condition_variable changed_;
  bool closed_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;
  MessageMatcher<OpState, Envelope> matcher_;  // under mutex_
  RollCallMessages roll_;                      // under mutex_, and so is
  std::optional<std::uint64_t> current_;       // the collective that is announced and not over
};

}  // namespace weft::gloo_backend
