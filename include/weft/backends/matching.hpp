// Matching of messages with receives, by (source, tag), in order: the posted queue and the unexpected queue
// of a rank. For every transport that matches by itself. Not thread-safe: its owner locks, where several
// threads use it. No function waits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// How many unexpected messages (for which no receive is posted yet) a rank keeps, per group.
struct UnexpectedLimits {
  std::int64_t messages = std::int64_t{1} << 20;
  std::int64_t bytes = std::int64_t{1} << 30;  ///< payload bytes of these messages
  /// WEFT_UNEXPECTED_MESSAGES and WEFT_UNEXPECTED_BYTES, where they are set. Throws bad_argument.
  static UnexpectedLimits from_env();
};

/// `Receive` is the transport's posted receive, kept by address; `Message` is what it knows of an unexpected
/// message, default-constructible. A message finds its receive, and a receive its message, in constant time,
/// but for a search among the receives in flight, of which a group has 64 at most.
template <class Receive, class Message, class SameTag = std::equal_to<>>
class MessageMatcher {
 public:
  MessageMatcher(int size, UnexpectedLimits limits)
      : limits_(limits), receives_(static_cast<std::size_t>(size)), queued_(static_cast<std::size_t>(size)) {
    for (auto& list : receives_) list.reserve(kReceives);
  }
  ~MessageMatcher() {
    for (auto& entry : queues_)
      for (Node* n = entry.second.first; n != nullptr;) delete std::exchange(n, n->next);
    while (spare_ != nullptr) delete std::exchange(spare_, spare_->next);
  }
  MessageMatcher(const MessageMatcher&) = delete;
  MessageMatcher& operator=(const MessageMatcher&) = delete;

  /// Gives the oldest message of that source and tag to use(const Message&). False: there is none.
  /// `use` must not call the matcher.
  template <class Use>
  bool take_message(int source, std::int32_t tag, const Use& use) {
    std::int64_t& queued = queued_[static_cast<std::size_t>(source)];
    if (queued == 0) return false;
    const auto found = queues_.find(key(source, tag));
    if (found == queues_.end() || found->second.first == nullptr) return false;
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
  /// Adds a receive for which take_message() has found no message, behind the others.
  void post(int source, std::int32_t tag, Receive& receive) {
    receives_[static_cast<std::size_t>(source)].push_back({tag, &receive});
  }
  /// Takes out the oldest receive for that source and tag; null: there is none.
  Receive* take_receive(int source, std::int32_t tag) noexcept {
    auto& list = receives_[static_cast<std::size_t>(source)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (!SameTag()(list[i].tag, tag)) continue;
      Receive* const found = list[i].receive;
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
      return found;
    }
    return nullptr;
  }
  /// Whether another message of so many bytes may be kept. An empty queue always takes one.
  bool has_room(std::int64_t bytes) const noexcept {
    return messages_ == 0 || (messages_ < limits_.messages && bytes_ + bytes <= limits_.bytes);
  }
  /// Adds an unexpected message, behind those of its source and tag, and returns it to be filled in. It may
  /// still hold the values of an earlier one.
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
    (queue.first == nullptr ? queue.first : queue.last->next) = node;
    queue.last = node;
    ++queued_[static_cast<std::size_t>(source)];
    ++messages_;
    bytes_ += bytes;
    return node->message;
  }
  /// Whether receives from that source wait for a message.
  bool awaits(int source) const noexcept { return !receives_[static_cast<std::size_t>(source)].empty(); }
  /// How many unexpected messages there are.
  std::int64_t messages() const noexcept { return messages_; }
  /// The failure of a group in which a message came for which there is no room.
  Failure refusal(int rank, int source, std::int32_t tag, std::int64_t bytes) const;

 private:
  static constexpr std::size_t kReceives = 64;    // in flight, of a group
  static constexpr std::size_t kIdleQueues = 64;  // kept though they are empty
  static constexpr std::size_t kSpares = 32;      // nodes kept for the next messages
  static constexpr std::int64_t kSpareBytes = 8192;
  struct Node {
    Message message{};
    std::int64_t bytes = 0;
    Node* next = nullptr;
  };
  struct Queue {
    Node *first = nullptr, *last = nullptr;
  };
  struct Waiting {
    std::int32_t tag;
    Receive* receive;
  };
  static std::uint64_t key(int source, std::int32_t tag) noexcept {
    return static_cast<std::uint64_t>(source) << 32 | static_cast<std::uint32_t>(tag);
  }
  // Nodes keep the memory of their messages, so that streams of small ones allocate nothing.
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
  std::vector<std::int64_t> queued_;            // messages by source
  std::unordered_map<std::uint64_t, Queue> queues_;
  Node* spare_ = nullptr;
  std::size_t spares_ = 0;
  std::int64_t messages_ = 0, bytes_ = 0;
};

/// The failure of a receive of rank `rank` for which a message of another dtype or count has come.
Failure message_mismatch(const OpState& recv, int rank, DType dtype, std::int64_t count);

/// The text of MessageMatcher::refusal().
Failure too_many_unexpected(const UnexpectedLimits& limits, std::int64_t held, std::int64_t held_bytes,
                            int rank, int source, std::int32_t tag, std::int64_t bytes);

template <class Receive, class Message, class SameTag>
Failure MessageMatcher<Receive, Message, SameTag>::refusal(int rank, int source, std::int32_t tag,
                                                           std::int64_t bytes) const {
  return too_many_unexpected(limits_, messages_, bytes_, rank, source, tag, bytes);
}

}  // namespace weft
