// The messages of one rank with its peers, the same for every transport that sends messages: it matches
// messages with receives, and knows the calls in flight, the ranks that they wait for, the ranks that have
// left, and the roll-call. The bytes are moved by a MessageMedium, which the transport brings. Private: an
// ABI for plug-ins would freeze it.
//
// A message is a head and its elements. The elements come with the head, or stay with the sender, which
// offers them: then the receive that takes the message fetches them. Messages of one source come here in the
// order in which they were sent.
//
// Not thread-safe: the owner locks, if several threads use it. No function waits; the medium's functions
// are called under that lock, and may call back only where they say so.
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
  std::uint64_t number = 0;  ///< of an offer, among those of this source
  /// The tag of the elements that come with it.
  std::int64_t bytes() const noexcept { return offered ? 0 : count * size_bytes(dtype); }
};

/// Notices that ranks send each other besides messages. A ping is answered by a pong of the same number.
enum class Notice : std::uint8_t { ping, pong };

/// The collectives of a rank that is asked: whom they wait for, and what it called last.
struct OwnCalls {
  std::vector<int> awaited;
  LastCall last{};
};

/// The functions that a transport provides for PeerMessages.
class MessageMedium {
 public:
  /// Sends a notice, behind what was sent to that rank before. May drop it where the connection is broken.
  virtual void notify(int to, Notice notice, std::uint32_t number, std::span<const std::byte> bytes) = 0;
  /// The elements of an offer go to recv.out; received() follows, perhaps at once.
  virtual void fetch(OpState& recv, int source, std::uint64_t number) = 0;
  /// The message is done, and no longer in flight. `found`: of a send, what was sent.
  virtual void done(OpState& s, const MessageInfo& found) = 0;
  /// The message cannot be done: the group is to fail with `why`. It is no longer in flight.
  virtual void refuse(OpState& s, Failure why) = 0;
  /// Whether a message in flight is done, though PeerMessages has not heard it yet.
  virtual bool over(const OpState&) const { return false; }
  /// Memory for elements that no receive waits for; empty: PeerMessages' own. Throws if it cannot be had.
  virtual Storage room_for(std::size_t) { return {}; }
  /// The collectives of this rank, for the answer to a ping and for last_calls().
  virtual OwnCalls own_calls() const { return {}; }

 protected:
  ~MessageMedium() = default;
};

class PeerMessages {
 public:
  PeerMessages(MessageMedium& medium, int rank, int size, UnexpectedLimits limits);

  // Calls of this rank. Each is in flight until done() or refuse() of the medium, or ended().
  /// A recv takes a message that has come, or waits for one; a wait_message the same, and leaves it where it
  /// is.
  void receive(OpState& s);
  /// A send, which the transport carries out: sent() or ended() follows.
  void begin_send(OpState& s);
  /// A send to this rank: copied, and done.
  void send_to_self(OpState& s);
  void sent(OpState& s);
  /// A message that was fetched has arrived as a whole.
  void received(OpState& recv);
  /// The call is over, however it ended. One that is not in flight is left alone.
  void ended(const OpState& s) noexcept;
  /// The rank waits in this call; last_message() is about the one that was named last.
  void waits_in(const OpState& s) noexcept;

  // Events from peers.
  /// A message has come, with all its elements or as an offer. Returns the failure of a message for which no
  /// receive waits and there is no room: it cannot be left waiting, since all that its source sends later is
  /// behind it.
  [[nodiscard]] std::optional<Failure> arrived(int source, const MessageHead& head,
                                               std::span<const std::byte> elements);
  /// The same in two steps, where elements come piece by piece. The receive that takes the message, whose
  /// elements may be written to its `out`; received() follows. Null: no receive waits for the message, or it
  /// does not fit, in which case refuse() of the medium was called.
  OpState* claim(int source, const MessageHead& head);
  /// The failure of a message that no receive has claimed, if there is no room for it.
  std::optional<Failure> no_room(int source, const MessageHead& head) const;
  /// All elements of an unclaimed message are there. A receive may have come meanwhile.
  void completed(int source, const MessageHead& head, Storage elements);
  void received_notice(int source, Notice notice, std::uint32_t number, std::span<const std::byte> bytes);
  /// Rank r has announced this call, without being asked.
  void called(int r, const CallRecord& record);
  /// Rank r sends nothing any more.
  void left(int r) { left_[static_cast<std::size_t>(r)] = true; }

  // Queries.
  std::optional<MessageInfo> probe(int source, std::int32_t tag) const;
  bool has_left(int r) const { return left_[static_cast<std::size_t>(r)]; }
  const std::vector<bool>& left_ranks() const noexcept { return left_; }  ///< by rank
  /// The ranks that messages in flight wait for.
  std::vector<int> awaited() const;
  /// The ranks that this message waits for.
  std::vector<int> awaited_by(const OpState& s) const;
  /// The ranks that have left, and without which a message in flight cannot be done; for a receive from
  /// any_source they count only if all others have left. Empty: there are none.
  std::vector<int> lost() const;
  /// The same for a message that is not begun yet. A receive for which a message has come already needs none
  /// of them.
  std::vector<int> lost(const OpState& s) const;
  /// The user's message that this rank waits in: see waits_in(); without it, the oldest in flight.
  LastCall::Message last_message() const noexcept;

  // Time-outs: see Backend::ask(), missing() and last_calls().
  /// Asks the others whom they wait for, unless they were asked a moment ago.
  void ask(const OpState& s);
  bool settled(std::span<const int> awaited) { return roll_.settled(awaited); }
  HoldUp found(std::span<const int> awaited) const { return roll_.found(awaited); }
  /// For a message. `all_answer`: see tell().
  std::vector<int> missing(const OpState& s, std::string& story, bool all_answer = false) const;
  std::vector<LastCall> last_calls(LastCall::State silent) const;

 private:
  static constexpr std::size_t kInFlight = 64;  // of a group
  static constexpr int kMostPongBytes = 4096;   // beyond it, ranks are left out
  struct InFlight {
    OpState* call = nullptr;
    int peer = -1;  // of a receive from any_source, once it has taken a message, the source
  };
  struct Kept {
    MessageHead head;
    std::vector<std::byte> own;
    Storage given;  // by the medium; then `own` is empty
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
