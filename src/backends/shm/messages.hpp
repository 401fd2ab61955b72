// Point-to-point messages: each pair of ranks has a ring of envelopes. Messages are matched by (source, tag)
// in order, and never wait for another pair. Only the owner of the group uses it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/shm/pair_memory.hpp"
#include "backends/shm/single_copy.hpp"
#include "base/mutant.hpp"
#include "weft/backends/matching.hpp"

namespace weft::shm {

/// Compares tags, for the matching of receives with messages. It is separate from the public MessageMatcher
/// because of a mutant.
struct SameTag {
  bool operator()(std::int32_t a, std::int32_t b) const noexcept { return a == b || WEFT_MUTANT("any_tag"); }
};

/// - A small message travels with its envelope (eager).
/// - A large message is copied once, from its place, if the receiver can reach that memory itself or by the
///   kernel.
/// - Any other large message is granted after its match and streamed through two chunks of the pair, one
///   message of the pair at a time.
/// - If the sender waits, both ranks copy a very large message that is read by the kernel. The sender streams
/// from the front, and the receiver reads from the back whenever no chunk is ready, until they meet. So the
/// receiver never waits for the sender.
///
/// Envelopes for which no recv is posted yet are moved from the ring to the unexpected queue, up to
/// UnexpectedLimits, so that a ring does not block. Further envelopes stay in the ring, and their sender
/// waits until the receiver has received messages of the queue. But if the receiver waits for another message
/// of that sender, which may be behind these envelopes, the group fails.
class Messages {
 public:
  /// `memory`: the memory of the pairs, which must outlive this object.
  Messages(const Group& group, PairMemory& memory, UnexpectedLimits limits);
  void post(OpState& s);
  Step poll(OpState& s);
  /// Takes in what has arrived, even if only collectives are in flight. Returns true if something moved.
  bool advance();
  /// A cheap check whether any rank has written to the inbox since the last advance(). A sender does not
  /// write to the inbox while its ring has room, so a rank that waits for an envelope must poll the ring.
  bool news() const noexcept { return group_.mine().inbox.load(std::memory_order_seq_cst) != seen_; }
  /// Takes all envelopes that have arrived, whether a recv waits for them or not. Returns true if there were
  /// any.
  bool collect();
  /// Returns the message that a receive from `source` (or any_source) with that tag would take.
  std::optional<MessageInfo> probe(int source, std::int32_t tag);
  /// Returns not_received() for the messages, from the source of `recv`, that no receive has taken.
  std::string not_received(const OpState& recv) const { return weft::not_received(matcher_.kept(recv.peer)); }
  /// Return the peers for which calls in flight wait. awaited_by_name(): only peers that must act. awaited():
  /// also all ranks that might send to a receive from any_source.
  std::vector<int> awaited_by_name() const;
  std::vector<int> awaited() const;
  /// Whether calls in flight wait for a message from any_source.
  bool awaits_any() const noexcept;
  /// Maps memory that other ranks have made for messages to this rank, because they wait for that. May set
  /// trouble().
  void find_pairs();
  /// Whether `src` has sent something, and its memory is not mapped.
  bool cannot_reach(int src) const noexcept {
    return peer(src).from == nullptr && group_.control.pair(src, group_.rank).load() != 0;
  }
  /// Returns the senders whose envelopes stay in the ring because this rank's unexpected queue is full.
  std::vector<int> held_back() const;
  /// Returns whether that peer leaves this rank's envelopes in the ring because its queue is full.
  bool held_by(int peer) const noexcept;
  /// Returns a failure if advance() has found a mismatch, or no memory for a message. The caller must raise
  /// it.
  const Failure* trouble() const noexcept { return trouble_.text.empty() ? nullptr : &trouble_; }

 private:
  enum class Phase : std::uint32_t { queued, posted, unmapped, matched, streaming, done };
  // The state of a call, in the scratch of its slot.
  struct State {
    Phase phase;
    std::uint32_t number;  // the number of the envelope's answer
    std::int64_t moved_bytes;
    std::int64_t bytes;
    Buffer place;            // for a matched recv: the place of the sender's bytes
    std::uint64_t envelope;  // the number of the envelope, from 1
    std::int64_t end;        // for a helped recv: the bytes from here on have arrived
  };
  // An envelope that was read once and checked, with its payload if no recv was posted for it.
  struct UnexpectedMessage {
    DType dtype{};
    bool eager = false;
    std::uint32_t number = 0;
    std::int64_t count = 0;
    std::uint64_t envelope = 0;
    Buffer place{};
    std::vector<std::byte> payload{};
  };
  struct Peer {
    std::vector<OpState*> unposted;     // sends that wait for room in the ring, in order
    std::vector<OpState*> outstanding;  // large sends whose answer is awaited
    std::vector<OpState*> streams;      // recvs of large foreign messages, in order; the first one is granted
    OpState* helped = nullptr;          // the recv that belongs to Pair::helped
    int read = 0;                       // the number of recvs that read the sender's bytes in place
    Pair* to = nullptr;                 // for messages to the peer; null: nothing was sent yet
    Pair* from = nullptr;               // for messages from the peer; null: nothing has arrived yet
    bool held = false;                  // Pair::held
    // the peer has mapped `to`, so it reaches `to` even after this rank has ended
    bool mapped = false;
    std::uint64_t free_numbers = ~std::uint64_t{0};
    std::uint64_t posted = 0;        // the number of envelopes to the peer
    std::uint64_t room_to = 0;       // the number of envelopes that are known to fit
    std::uint64_t taken = 0;         // the number of envelopes from the peer
    std::uint64_t acknowledged = 0;  // how many of these are known to the peer as taken: Pair::drained
  };
  static State& state(OpState& s) noexcept { return *reinterpret_cast<State*>(s.scratch.data()); }
  static const State& state(const OpState& s) noexcept {
    return *reinterpret_cast<const State*>(s.scratch.data());
  }

  Buffer place(const OpState& s) const noexcept;
  Peer& peer(int r) noexcept { return peers_[static_cast<std::size_t>(r)]; }
  const Peer& peer(int r) const noexcept { return peers_[static_cast<std::size_t>(r)]; }
  bool has_room(int dst);
  void make_pair(int dst);
  bool find_pair(int src);
  void touch_envelopes(Peer& to) noexcept;
  static bool is_mapped(Peer& to) noexcept;
  bool flush(int dst);
  bool drain(int src);
  bool drain_for(OpState& s);
  bool found(OpState& wait);
  bool awaits(int src) const noexcept;
  bool read_head(int src, const Envelope& envelope, UnexpectedMessage& head);
  bool keep(int src, UnexpectedMessage& head, std::int32_t tag, const std::byte* payload);
  void hold(int src, const UnexpectedMessage& head, std::int32_t tag);
  void acknowledge(int src);
  bool answers(int dst);
  void match(OpState& recv, const UnexpectedMessage& head, const std::byte* payload);
  bool find_own(const OpState& recv, std::uint64_t number, Buffer& place);
  void say(int from, int to, Failure why);
  template <class Body>
  bool guarded(int from, int to, const Body& body);
  bool fill_chunk(OpState& s, std::int64_t end);
  Step stream_out(OpState& s);
  bool helps(const OpState& s) const noexcept;
  Step help(OpState& s);
  bool has_chunk_from(int src) const noexcept;
  bool empty_chunk(OpState& s);
  Step receive(OpState& s);
  Step receive_stream(OpState& s);
  Step receive_helped(OpState& s);
  bool read(OpState& s, std::int64_t from, std::int64_t bytes);
  void take(OpState& s);
  void notify(int r) noexcept;

  const Group& group_;
  PairMemory& memory_;
  std::vector<Peer> peers_;
  MessageMatcher<OpState, UnexpectedMessage, SameTag> matcher_;
  std::vector<const OpState*> waits_;  // wait_messages in flight
  int next_source_ = 0;                // the rank at which a look for a message from any_source begins
  PeerMemory peer_memory_;
  OwnMemory own_memory_;
  std::uint64_t seen_ = 0;
  bool held_ = false;  // envelopes stay in rings because the unexpected queue is full
  Failure trouble_;
};

}  // namespace weft::shm
