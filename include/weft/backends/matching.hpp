// Matching of messages with receives, by (source, tag), in order. It has the posted queue and the unexpected
// queue of a rank. It is for transports that match messages themselves. Not thread-safe. If several threads
// use it, its owner must lock. No function waits.
//
// The rule is MPI's. A message matches receives with its tag, from its source or from any_source. The receive
// that was posted first gets it. A receive takes the first message that matches it. A receive from any_source
// takes messages of its tag from all ranks, in the order in which keep() added them. So messages of one
// source and tag never overtake each other, and a message never waits behind later messages of another
// source.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// The limit of unexpected messages that a rank keeps per group. For such messages no receive is posted yet.
struct UnexpectedLimits {
  std::int64_t messages = std::int64_t{1} << 20;
  std::int64_t bytes = std::int64_t{1} << 30;  ///< payload bytes of these messages
  /// The limits, changed by WEFT_UNEXPECTED_MESSAGES and WEFT_UNEXPECTED_BYTES if they are set. Throws
  /// bad_argument if a value is wrong.
  static UnexpectedLimits from_env();
};

/// `Receive` is the transport's posted receive; the matcher keeps its address. `Message` is the transport's
/// record of an unexpected message. It must be default-constructible. Matching takes constant time, except
/// for a search among the receives in flight, of which a group has at most 64. A receive from any_source
/// looks at each source that has unexpected messages.
template <class Receive, class Message, class SameTag = std::equal_to<>>
class MessageMatcher {
 public:
  MessageMatcher(int size, UnexpectedLimits limits)
      : limits_(limits), receives_(static_cast<std::size_t>(size)), queued_(static_cast<std::size_t>(size)) {}
  ~MessageMatcher() {
    for (auto& entry : queues_)
      for (Node* n = entry.second.first; n != nullptr;) delete std::exchange(n, n->next);
    while (spare_ != nullptr) delete std::exchange(spare_, spare_->next);
  }
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  /// Calls use(const Message&) for the oldest message of that source and tag, and removes the message.
  /// Returns false if there is none. `use` must not call the matcher.
  template <class Use>
  bool take_message(int source, std::int32_t tag, const Use& use) {
    const auto found = find(source, tag);
    if (found == queues_.end()) return false;
    std::int64_t& queued = queued_[static_cast<std::size_t>(source)];
    Node* const node = found->second.first;
    found->second.first = node->next;
    if (node->next == nullptr && queues_.size() > kIdleQueues) queues_.erase(found);
    --queued;
    --messages_;
    bytes_ -= node->bytes;
    use(std::as_const(node->message));
    put_back(node);
    return true;
  }
  /// The source of the oldest message with that tag, from `source` or, for any_source, from any rank. -1 if
  /// there is none. take_message() with the result gives this message. A transport that polls its sources one
  /// after the other should first keep() the arrived messages of all sources. Otherwise the order of its
  /// polls would decide.
  int source_of(int source, std::int32_t tag) const {
    if (source != any_source) return find(source, tag) != queues_.end() ? source : -1;
    int first = -1;
    std::uint64_t arrival = 0;
    for (int r = 0; messages_ > 0 && r < static_cast<int>(queued_.size()); ++r) {
      const auto found = find(r, tag);
      if (found == queues_.end() || (first >= 0 && found->second.first->arrival > arrival)) continue;
      first = r;
      arrival = found->second.first->arrival;
    }
    return first;
  }
  /// The message that take_message() would give. Null if there is none.
  const Message* message(int source, std::int32_t tag) const {
    const auto found = find(source, tag);
    return found == queues_.end() ? nullptr : &found->second.first->message;
  }
  /// The pairs (source, tag) of the unexpected messages from `source` (any_source: from all ranks), each pair
  /// once, sorted. Negative tags, which belong to composed calls, are left out.
  std::vector<std::pair<int, std::int32_t>> kept(int source) const {
    std::vector<std::pair<int, std::int32_t>> list;
    for (const auto& [number, queue] : queues_) {
      const int from = static_cast<int>(number >> 32);
      const auto tag = static_cast<std::int32_t>(static_cast<std::uint32_t>(number));
      if (queue.first != nullptr && tag >= 0 && (source == any_source || source == from))
        list.emplace_back(from, tag);
    }
    std::sort(list.begin(), list.end());
    return list;
  }
  /// Adds a receive for which there was no message, at the end of the queue. `source` may be any_source.
  void post(int source, std::int32_t tag, Receive& receive) {
    auto& list = source == any_source ? from_any_ : receives_[static_cast<std::size_t>(source)];
    if (list.capacity() == 0) list.reserve(kReceives);  // most ranks are never a source
    list.push_back({tag, &receive, next_post_++});
  }
  /// Removes and returns the oldest receive that matches that source and tag, including receives from
  /// any_source. Null if there is none.
  Receive* take_receive(int source, std::int32_t tag) noexcept {
    auto& list = receives_[static_cast<std::size_t>(source)];
    const std::size_t named = first_of(list, tag), any = first_of(from_any_, tag);
    if (named < list.size() && (any == from_any_.size() || list[named].posted < from_any_[any].posted))
      return take(list, named);
    return any < from_any_.size() ? take(from_any_, any) : nullptr;
  }
  /// Whether keep() may add another message of so many bytes. If there are no unexpected messages, a message
  /// of any size may be added.
  bool has_room(std::int64_t bytes) const noexcept {
    return messages_ == 0 || (messages_ < limits_.messages && bytes_ + bytes <= limits_.bytes);
  }
  /// Adds an unexpected message behind the messages of its source and tag, and returns it. The caller must
  /// fill it in. It may still hold the values of an earlier message.
  Message& keep(int source, std::int32_t tag, std::int64_t bytes) {
    Queue& queue = queues_[key(source, tag)];
    Node* node = spare_;
    if (node != nullptr) {
      spare_ = node->next;
      --spares_;
    } else {
      node = new Node;
    }
    node->next = nullptr;
    node->bytes = bytes;
    node->arrival = next_arrival_++;
    (queue.first == nullptr ? queue.first : queue.last->next) = node;
    queue.last = node;
    ++queued_[static_cast<std::size_t>(source)];
    ++messages_;
    bytes_ += bytes;
    return node->message;
  }
  /// Whether receives from that source wait for a message. Receives from any_source do not count.
  bool awaits(int source) const noexcept { return !receives_[static_cast<std::size_t>(source)].empty(); }
  /// Whether receives from any_source wait for a message.
  bool awaits_any() const noexcept { return !from_any_.empty(); }
  /// How many unexpected messages there are.
  std::int64_t messages() const noexcept { return messages_; }
  /// The failure of a group when a message arrives for which there is no room.
  Failure refusal(int rank, int source, std::int32_t tag, std::int64_t bytes) const;

 private:
  static constexpr std::size_t kReceives = 64;    // in flight, of a group
  static constexpr std::size_t kIdleQueues = 64;  // empty queues up to this number are kept
  static constexpr std::size_t kSpares = 32;      // nodes kept for the next messages
  static constexpr std::int64_t kSpareBytes = 8192;
  struct Node {
    Message message{};
    std::int64_t bytes = 0;
    std::uint64_t arrival = 0;
    Node* next = nullptr;
  };
  struct Queue {
    Node *first = nullptr, *last = nullptr;
  };
  struct Waiting {
    std::int32_t tag;
    Receive* receive;
    std::uint64_t posted;
  };
  using Queues = std::unordered_map<std::uint64_t, Queue>;
  // The queue of that source and tag, if it holds messages.
  typename Queues::const_iterator find(int source, std::int32_t tag) const {
    if (queued_[static_cast<std::size_t>(source)] == 0) return queues_.end();
    const auto found = queues_.find(key(source, tag));
    return found == queues_.end() || found->second.first == nullptr ? queues_.end() : found;
  }
  typename Queues::iterator find(int source, std::int32_t tag) {
    if (queued_[static_cast<std::size_t>(source)] == 0) return queues_.end();
    const auto found = queues_.find(key(source, tag));
    return found == queues_.end() || found->second.first == nullptr ? queues_.end() : found;
  }
  static std::size_t first_of(const std::vector<Waiting>& list, std::int32_t tag) noexcept {
    std::size_t i = 0;
    while (i < list.size() && !SameTag()(list[i].tag, tag)) ++i;
    return i;
  }
  static Receive* take(std::vector<Waiting>& list, std::size_t i) noexcept {
    Receive* const found = list[i].receive;
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
    return found;
  }
  static std::uint64_t key(int source, std::int32_t tag) noexcept {
    return static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint32_t>(tag);
  }
  // Nodes keep the memory of their messages, so that a stream of small messages allocates nothing.
  void put_back(Node* node) noexcept {
    if (spares_ == kSpares || node->bytes > kSpareBytes) {
      delete node;
      return;
    }
    node->next = spare_;
    spare_ = node;
    ++spares_;
  }

  const UnexpectedLimits limits_;
  std::vector<std::vector<Waiting>> receives_;  // by source, in order
  std::vector<Waiting> from_any_;               // in order
  std::vector<std::int64_t> queued_;            // messages by source
  Queues queues_;
  std::uint64_t next_post_ = 0, next_arrival_ = 0;
  Node* spare_ = nullptr;
  std::size_t spares_ = 0;
  std::int64_t messages_ = 0, bytes_ = 0;
};

/// The tag of the messages that make up exchanges. No other messages have it. Error texts call such a message
/// a part.
inline constexpr int kExchangeTag = -1;

/// The failure of a receive of rank `rank` when a message of another dtype or count has arrived. `recv.peer`
/// is the message's source, even if the receive is from any_source.
Failure message_mismatch(const OpState& recv, int rank, DType dtype, std::int64_t count);
/// Like the function above, but the argument `source` gives the message's source.
Failure message_mismatch(const OpState& recv, int source, int rank, DType dtype, std::int64_t count);
/// Like the function above, for a message whose elements have already arrived.
Failure message_mismatch(const OpState& recv, int source, int rank, DType dtype, std::int64_t count,
                         const std::byte* elements);

/// The ranks for which a recv or wait_message of rank `rank` waits. This is its source. If the source is
/// any_source, these are all other ranks (in a group of one rank: the rank itself).
std::vector<int> awaited_sources(const OpState& recv, int rank, int size);
/// The part of the time-out text of a recv or wait_message that says what these ranks have not done: "rank 1
/// has not sent it (tag 7)", "no rank has sent a message with tag 7".
std::string not_sent(const OpState& recv, std::span<const int> ranks, int rank, int size);
/// Like not_sent(), for a send: "rank 1 has not received it (tag 7)".
std::string not_received(const OpState& send);

/// The part of that text that lists the messages of MessageMatcher::kept(), in case the tag was wrong: ";
/// messages that were not received: tag 8 from rank 1". Empty if there are none.
std::string not_received(std::span<const std::pair<int, std::int32_t>> kept);

/// The text of MessageMatcher::refusal().
Failure too_many_unexpected(const UnexpectedLimits& limits, std::int64_t held, std::int64_t held_bytes,
                            int rank, int source, std::int32_t tag, std::int64_t bytes);

template <class Receive, class Message, class SameTag>
Failure MessageMatcher<Receive, Message, SameTag>::refusal(int rank, int source, std::int32_t tag,
                                                           std::int64_t bytes) const {
  return too_many_unexpected(limits_, messages_, bytes_, rank, source, tag, bytes);
}

}  // namespace weft
