// The messages between one rank and its peers, for every transport that sends messages. This class matches
// messages with receives. It also records the calls in flight, the ranks for which they wait, the ranks that
// have left, and the roll-call. A MessageMedium, which the transport provides, moves the bytes. This header
// is private. An ABI for plug-ins would freeze it.
//
// A message is a head and its elements. The elements travel with the head, or they stay with the sender,
// which offers them. In that case the receive that takes the message fetches the elements. Messages of one
// source arrive here in the order in which they were sent.
//
// Not thread-safe. The owner must lock if several threads use it. No function waits. The medium's functions
// are called under that lock, and may call functions of PeerMessages only if their comment says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "weft/backends/call_record.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/roll_call_messages.hpp"
#include "weft/base/storage.hpp"

namespace weft {

struct MessageHead {
  DType dtype = DType::u8;
  std::int32_t tag = 0;
  std::int64_t count = 0;    ///< elements
  bool offered = false;      ///< the elements stay with the sender until they are fetched
  std::uint64_t number = 0;  ///< the number of an offer among the offers of this source
  /// The bytes of the elements that travel with the head.
  std::int64_t bytes() const noexcept { return offered ? 0 : count * size_bytes(dtype); }
};

/// Notices that ranks send each other in addition to messages. Each ping is answered by a pong with the same
/// number.
enum class Notice : std::uint8_t { ping, pong };

/// The collectives of this rank, for the answer to a ping: the ranks for which they wait, and the last
/// collective that it has called.
struct OwnCalls {
  std::vector<int> awaited;
  LastCall last{};
};

/// The functions that a transport provides for PeerMessages.
class MessageMedium {
 public:
  /// Sends a notice, behind everything that was sent to that rank before. May drop the notice if the
  /// connection is broken.
  virtual void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) = 0;
  /// Fetches the elements of an offer to recv.out, and then calls received(), perhaps at once.
  virtual void fetch(OpState& recv, int source, std::uint64_t number) = 0;
  /// Reports that the message is done, and no longer in flight. `found`: for a send, the message that was
  /// sent.
  virtual void done(OpState& s, const MessageInfo& found) = 0;
  /// Reports that the message cannot be done: the group must fail with `why`. The message is no longer in
  /// flight.
  virtual void refuse(OpState& s, Failure why) = 0;
  /// Returns whether a message in flight is done although PeerMessages has not been notified yet.
  virtual bool over(const OpState&) const { return false; }
  /// Returns memory for elements for which no receive waits. If the result is empty, PeerMessages allocates
  /// the memory. Throws if there is no memory.
  virtual Storage room_for(std::size_t) { return {}; }
  /// The collectives of this rank, for the answer to a ping and for last_calls().
  virtual OwnCalls own_calls() const { return {}; }

 protected:
  ~MessageMedium() = default;
};

class PeerMessages {
 public:
  PeerMessages(MessageMedium& medium, int rank, int size, UnexpectedLimits limits);

  // --- Calls of this rank. Each call is in flight until done() or refuse() of the medium, or ended().
  /// Begins a recv or a wait_message. A recv takes a message that has arrived, or waits for one; a
  /// wait_message leaves the message in the queue.
  void receive(OpState& s);
  /// Begins a send, which the transport carries out; the transport then calls sent() or ended().
  void begin_send(OpState& s);
  /// Copies a send to this rank itself, and completes it.
  void send_to_self(OpState& s);
  void sent(OpState& s);
  /// Reports that a fetched message has arrived completely.
  void received(OpState& recv);
  /// Reports that the call is over, however it ended. Ignores a call that is not in flight.
  void ended(const OpState& s) noexcept;
  /// Records that this rank waits in this call. last_message() describes the call that was recorded last.
  void waits_in(const OpState& s) noexcept;

  // --- Events from peers.
  /// Reports that a message has arrived, with all its elements or as an offer. Returns a failure if no
  /// receive waits for the message and there is no room for it. (The message cannot stay in the transport,
  /// because all later messages of its source are behind it.)
  [[nodiscard]] std::optional<Failure> arrived(int source, const MessageHead& head,
                                               std::span<const std::byte> elements);
  /// claim() and completed() do the work of arrived() in two steps, for elements that arrive piece by piece.
  /// claim() returns the receive that takes the message. The caller writes the elements to its `out`, and
  /// then calls received(). It returns null if no receive waits for the message, or if the message does not
  /// match the receive. In the second case it has called refuse() of the medium.
  OpState* claim(int source, const MessageHead& head);
  /// Returns a failure if there is no room for a message that no receive has claimed.
  std::optional<Failure> no_room(int source, const MessageHead& head) const;
  /// Reports that all elements of an unclaimed message have arrived. A receive may have been posted
  /// meanwhile.
  void completed(int source, const MessageHead& head, Storage elements);
  void received_notice(int source, Notice notice, std::uint32_t number, std::span<const std::byte> bytes);
  /// Reports that rank r has announced this call without a ping.
  void called(int r, const CallRecord& record);
  /// Call this when rank r sends nothing any more.
  void left(int r) { left_[static_cast<std::size_t>(r)] = true; }

  // --- Queries.
  std::optional<MessageInfo> probe(int source, std::int32_t tag) const;
  bool has_left(int r) const { return left_[static_cast<std::size_t>(r)]; }
  const std::vector<bool>& left_ranks() const noexcept { return left_; }  ///< by rank
  /// Returns the ranks for which messages in flight wait.
  std::vector<int> awaited() const;
  /// `own`, with the ranks for which the messages in flight wait.
  std::vector<int> awaited_with(const OwnCalls& own) const;
  /// Returns the ranks for which this message waits.
  std::vector<int> awaited_by(const OpState& s) const;
  /// Returns the ranks that have left and without which a message in flight cannot be done. (For a receive
  /// from any_source this is so only if all other ranks have left.) Returns an empty list if there are none.
  std::vector<int> lost() const;
  /// Like lost(), for a message that has not begun yet. If a message for a receive has already arrived, the
  /// receive needs no such rank any more.
  std::vector<int> lost(const OpState& s) const;
  /// Returns the user's message in which this rank waits (see waits_in()), or the oldest message in flight if
  /// it waits in none.
  LastCall::Message last_message() const noexcept;

  // --- For time-outs: see Backend::ask(), missing() and last_calls().
  /// Asks the other ranks whom they wait for, unless a recent roll-call serves this call.
  void ask(const OpState& s);
  bool settled(std::span<const int> awaited) {
    return roll_.settled(awaited, awaited_with(medium_.own_calls()));
  }
  HoldUp found(std::span<const int> awaited) const {
    return roll_.found(awaited, awaited_with(medium_.own_calls()));
  }
  /// Like Backend::missing(), for a message. `all_answer`: see tell().
  std::vector<int> missing(const OpState& s, std::string& story, bool all_answer = false) const;
  std::vector<LastCall> last_calls(LastCall::State silent) const;

 private:
  static constexpr std::size_t kInFlight = 64;  // the calls in flight of a group
  static constexpr int kMostPongBytes = 4096;   // ranks that do not fit are left out
  struct InFlight {
    OpState* call = nullptr;
    // the source; for a receive from any_source it is known when the receive has taken a message
    int peer = -1;
  };
  struct Kept {
    MessageHead head;
    std::vector<std::byte> own;
    Storage given;  // memory of the medium; if it is set, `own` is empty
    const std::byte* elements() const noexcept { return given ? given.data() : own.data(); }
  };
  void start(OpState& s) { in_flight_.push_back({&s, s.peer}); }
  bool fits(OpState& recv, int source, const MessageHead& head, const std::byte* elements);
  void give(OpState& recv, int source, const MessageHead& head, const std::byte* elements);
  void finish(OpState& s, const MessageInfo& found);
  Kept& keep(int source, const MessageHead& head);
  void find(int source, const MessageHead& head);
  InFlight* entry(const OpState& s) noexcept;
  std::vector<int> sources(const OpState& s, int peer) const;
  bool have_left(const OpState& s, int peer) const;
  LastCall own_last_call(const OwnCalls& own) const;

  MessageMedium& medium_;
  const int rank_, size_;
  MessageMatcher<OpState, Kept> matcher_;
  std::vector<InFlight> in_flight_;  // in the order of their calls
  const OpState* waits_in_ = nullptr;
  std::vector<bool> left_;  // by rank
  RollCallMessages roll_;
};

}  // namespace weft
