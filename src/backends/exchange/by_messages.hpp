// An exchange that is made of sends and receives, for a transport without exchanges. Only the owner of the
// group uses it.
//
// A rank sends each other rank one message of packed bytes. The message begins with the description that must
// be equal on both ranks, as a hash and in words. Each box of 16 KiB or more is sent as a separate message;
// if such a box is one piece of memory on a rank, the rank sends it from its place, or receives it there. The
// receiver unpacks a message when it has arrived, and makes sums when all messages have arrived.
#pragma once

#include <memory>
#include <vector>

#include "backends/exchange/program.hpp"
#include "weft/backends/backend.hpp"
#include "weft/base/tensor.hpp"

namespace weft {

class ExchangeByMessages {
 public:
  /// `transport` must have send and recv, and must outlive this object. Each box of 16 KiB or more is sent as
  /// a separate message. If such a box is one piece of memory on a rank, the rank sends it from its place, or
  /// receives it there.
  ExchangeByMessages(Context& context, Backend& transport, int rank);
  ~ExchangeByMessages();
  /// Call it if the transport ends while a peer, or the transport's library, may still write to the memory of
  /// a failed exchange. That memory then exists as long as the Context.
  void abandon() noexcept;
  ExchangeByMessages(const ExchangeByMessages&) = delete;
  ExchangeByMessages& operator=(const ExchangeByMessages&) = delete;

  /// Like the functions of Backend, for Op::exchange.
  std::unique_ptr<PlannedExchange> plan(const ExchangePlan& plan);
  /// `batched`: whether the transport's batch is open.
  void post(OpState& s, bool batched = false) noexcept;
  Step poll(OpState& s) noexcept;
  std::vector<int> missing(const OpState& s, std::string& story) noexcept;
  bool ask(const OpState& s) noexcept;

 private:
  struct Message {
    // small: the message with the head and all boxes that have no separate message
    bool packed = true, small = false;
    std::int64_t bytes = 0, at = 0;  // packed: its place in the room
    DType dtype = DType::u8;         // the dtype of a message that is not packed
    std::size_t field = 0;
    std::int64_t offset = 0;
    std::vector<std::size_t> boxes{};  // the packed boxes of the side
  };
  struct Planned;
  struct Flight;
  static Flight* of(const OpState& s) noexcept { return *reinterpret_cast<Flight* const*>(s.scratch.data()); }
  void begin(OpState& s, Flight& f, bool batched);
  bool take(Flight& f, std::size_t receive, std::size_t message);
  void end(Flight& f) noexcept;
  void refuse(const OpState& s, ErrorCode code, std::string text, std::vector<int> ranks) noexcept;

  Context& context_;
  Backend& transport_;
  const int rank_;
  std::vector<std::unique_ptr<Flight>> flights_;  // all objects that were ever made
  std::vector<Flight*> spare_;
};

}  // namespace weft
