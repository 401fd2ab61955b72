// Point to point: rings of envelopes per pair of ranks, matched by (source, tag) in order, never waiting
// behind another pair. Used by the owner of the group alone.
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

/// How receives find their messages: by equal tags. It is separate from MessageMatcher, which is public,
/// because of the mutant.
struct SameTag {
  bool operator()(std::int32_t a, std::int32_t b) const noexcept { return a == b || WEFT_MUTANT("any_tag"); }
};

/// - A small message travels with its envelope (eager).
/// - A large message is copied once, from where it lies, if the receiver can reach that memory itself or by
///   the kernel.
/// - Any other large message is granted after its match and streamed through two chunks of the pair, one
///   message of the pair at a time.
/// - A very large message that is read by the kernel is copied by both ranks if the sender waits: the sender
///   streams from the front, and the receiver reads from the back whenever no chunk is ready, until they
///   meet. So the receiver never waits for the sender.
///
/// Envelopes that no recv has asked for yet are taken out of the ring into the unexpected queue, so that a
/// ring never blocks, up to UnexpectedLimits. Further envelopes stay in the ring and their sender waits,
/// until the receiver has received some of the queue. If the receiver waits for another message of that
/// sender instead, which may be behind them, the group fails.
class Messages {
 public:
  /// `memory`: of the pairs; it outlives this.
  Messages(const Group& group, PairMemory& memory, UnexpectedLimits limits);
  void post(OpState& s);
  Step poll(OpState& s);
  /// Looks at what arrived, also while only collectives are in flight. True: something moved.
  bool advance();
  /// A cheap check: has any rank written to the inbox since the last advance()? A sender does not write to
  /// it while its ring has room: a rank that waits for an envelope polls the ring.
  bool news() const noexcept { return group_.mine().inbox.load(std::memory_order_seq_cst) != seen_; }
  /// Takes every envelope that is there, whether a recv waits for it or not. True: there were some.
  bool collect();
  /// The message that a receive from `source` (or any_source) with that tag would take.
  std::optional<MessageInfo> probe(int source, std::int32_t tag);
  /// Messages that no receive has taken, from the source of `recv`: not_received().
  std::string not_received(const OpState& recv) const { return weft::not_received(matcher_.kept(recv.peer)); }
  /// Peers that calls in flight wait for. awaited_by_name(): each of them must act. awaited(): also any
  /// rank that might send to a receive from any_source.
  std::vector<int> awaited_by_name() const;
  std::vector<int> awaited() const;
  /// Whether calls in flight wait for a message of any rank.
  bool awaits_any() const noexcept;
  /// Maps memory that other ranks have made for messages to this one: they wait for that. May set trouble().
  void find_pairs();
  /// Whether `src` has sent something, and its memory is not mapped.
  bool cannot_reach(int src) const noexcept {
    return peer(src).from == nullptr && group_.control.pair(src, group_.rank).load() != 0;
  }
  /// Senders whose envelopes stay in the ring because this rank's unexpected queue is full.
  std::vector<int> held_back() const;
  /// Does that peer leave this rank's envelopes in the ring for the same reason?
  bool held_by(int peer) const noexcept;
  /// Set if advance() found ranks that disagree, or no memory for a message. The caller raises it.
  const Failure* trouble() const noexcept { return trouble_.text.empty() ? nullptr : &trouble_; }

 private:
  enum class Phase : std::uint32_t { queued, posted, unmapped, matched, streaming, done };
  // A call's state, in the scratch of its slot.
  struct State {
    Phase phase;
    std::uint32_t number;  // of the envelope's answer
    std::int64_t moved_bytes;
    std::int64_t bytes;
    Buffer place;            // recv, matched: where the sender's bytes lie
    std::uint64_t envelope;  // its number from 1
    std::int64_t end;        // recv, helped: from here on the bytes are there
  };
  // An envelope, read once and found to be sound; its payload if no recv was posted for it.
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
    std::vector<OpState*> unposted;     // sends waiting for room in the ring, in order
    std::vector<OpState*> outstanding;  // large sends whose answer is awaited
    std::vector<OpState*> streams;      // recvs of large foreign messages, in order; the first is granted
    OpState* helped = nullptr;          // the recv of Pair::helped
    int read = 0;                       // recvs that read where the sender's bytes lie
    Pair* to = nullptr;                 // to the peer; null: nothing was sent yet
    Pair* from = nullptr;               // from it; null: nothing has come yet
    bool held = false;                  // Pair::held
    bool mapped = false;                // the peer reaches `to`, also after this rank has ended
    std::uint64_t free_numbers = ~std::uint64_t{0};
    std::uint64_t posted = 0;        // envelopes to the peer
    std::uint64_t room_to = 0;       // envelopes that were known to fit
    std::uint64_t taken = 0;         // envelopes from the peer
    std::uint64_t acknowledged = 0;  // of those, the peer knows: Pair::drained
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
  std::vector<const OpState*> waits_;  // wait_message, in flight
  int next_source_ = 0;                // where a look for a message of any rank begins
  PeerMemory peer_memory_;
  OwnMemory own_memory_;
  std::uint64_t seen_ = 0;
  bool held_ = false;  // envelopes stay in rings because the unexpected queue is full
  Failure trouble_;
};

}  // namespace weft::shm
