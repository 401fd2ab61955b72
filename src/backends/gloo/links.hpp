// Control messages and messages between this rank and every other rank, over Gloo's unbound buffers.
//
// Gloo reports the end of a send or a receive only to a thread that blocks until then. If a message is
// shorter than requested, Gloo reports no error. If it is longer, Gloo ends the process. So every pair of
// ranks has one stream of control messages of a known size, with a thread that reads it. A small message
// travels in its control message. For a large message the control message gives its size. When the receiver
// has matched the message, it requests exactly that size from Gloo, and another control message notifies the
// sender that the data has arrived. No pair waits for another pair or for a collective. The thread also
// notices the death of the peer.
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

#include "backends/messages/announced_calls.hpp"
#include "backends/messages/peer_messages.hpp"
#include "weft/backends/call_record.hpp"

namespace weft::gloo_backend {

using UnboundBuffer = std::unique_ptr<::gloo::transport::UnboundBuffer>;

/// The reports of the links to the backend. Called from any thread.
struct LinkEvents {
  std::function<void(OpState&)> finished;
  std::function<void(OpState&, const MessageInfo&)> found;  // for a recv from any_source, or a wait_message
  std::function<void(OpState&, Failure)> refuse;
  std::function<void(const Failure&)> fail;
  std::function<void(int peer)> before_leave;  // for tests; may be null
};

class Links final : private MessageMedium {
 public:
  Links(std::shared_ptr<::gloo::Context> context, UnexpectedLimits limits, LinkEvents events);
  /// If the group has not failed, notifies the peers that this rank leaves, so that they do not regard it as
  /// dead. Takes up to 2 s.
  ~Links();

  /// Starts a message: see BlockingCalls::start.
  void start(OpState& s) noexcept;
  /// Announces that this rank is about to perform a collective. Call it from the group's thread, like the
  /// next two functions.
  void begin(const OpState& s);
  /// Announces to all ranks the collective that this rank is about to perform, and waits until all ranks have
  /// announced the same collective. Throws mismatch; throws peer_lost if a rank has left.
  void agree(const OpState& s);
  /// For a call whose connection has broken, and on which the ranks have not agreed. Returns a failure that
  /// names the ranks that have left. Returns nothing if no rank has left, or if the group fails for another
  /// reason within a moment.
  std::optional<Failure> leaving(const OpState& s);
  /// Call this when the call that begin() announced is over.
  void over() noexcept;
  /// Returns the ranks that hold up the call. These are ranks that have not announced the call, or have not
  /// sent or received, and ranks for which those ranks wait. If there are none, returns the ranks that do not
  /// answer.
  std::vector<int> missing(const OpState& s, std::string& story);
  /// See Backend::last_calls(). `announced`: whether ranks announce their calls, by agree().
  std::vector<LastCall> last_calls(bool announced) const;
  /// See Backend::probe().
  std::optional<MessageInfo> probe(int source, int tag);
  /// See Backend::ask(). A background thread answers, so every running rank answers, whatever its program
  /// does.
  bool ask(const OpState& s);
  /// Returns whether the rank has not announced that it leaves.
  bool stays(int rank);
  /// Ends all connections: see BlockingBackend::interrupt.
  void interrupt() noexcept;

  /// the largest message that travels in its control message
  static constexpr std::size_t kEagerBytes = 4096;
  /// A digest of the constants and layouts that must be equal at both ends.
  static std::uint64_t layout() noexcept;

 private:
  struct ControlMessage;
  struct Peer;
  void read(Peer& peer) noexcept;
  void end_threads() noexcept;
  void take(Peer& peer, const ControlMessage& control, const std::byte* payload);
  void take_message(Peer& peer, const ControlMessage& control, const std::byte* payload);
  void take_taken(Peer& peer, std::uint64_t number);
  void take_leave(Peer& peer);
  void send(OpState& s);  // with mutex_ held
  void fetch_one(Peer& peer, OpState& recv, std::uint64_t number);
  void fetch_matched(Peer& peer);
  // The functions of MessageMedium, called with mutex_ held.
  void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) override;
  void fetch(OpState& recv, int source, std::uint64_t number) override;
  void done(OpState& s, const MessageInfo& found) override;
  void refuse(OpState& s, Failure why) override { events_.refuse(s, std::move(why)); }
  OwnCalls own_calls() const override;
  void write(Peer& peer, ControlMessage control, const void* payload = nullptr, std::size_t bytes = 0);
  std::vector<int> awaited_in(std::uint64_t sequence) const;
  std::vector<int> awaited_by(const OpState& s) const;
  bool has_left(int rank) const;  // the caller must not hold mutex_
  Failure left(const std::vector<int>& ranks, const OpState* s) const;
  int size() const noexcept { return context_->size; }

  const std::shared_ptr<::gloo::Context> context_;
  const LinkEvents events_;
  mutable std::mutex mutex_;  // guards matching and announcements
  std::condition_variable changed_;
  bool closed_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;
  PeerMessages messages_;                 // guarded by mutex_, …
  AnnouncedCalls calls_;                  // … and so is this: the calls of agree()
  std::optional<std::uint64_t> current_;  // the sequence number, in calls_, of the call that is not over
  LastCall last_{.state = LastCall::State::none};
};

}  // namespace weft::gloo_backend
