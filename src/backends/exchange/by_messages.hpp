// An exchange made of sends and receives, for a transport that has no exchange of its own. The owner of the
// group uses it.
//
// A rank sends each other rank one message of packed bytes, which begins with everything that both ranks
// must have alike, as a hash and in words; and one more for each box of 16 KiB or more. A rank sends such a
// box from its place, or receives it there, if it is one piece of memory on that rank. The receiver unpacks
// a message when it has arrived, and makes sums when all messages have arrived.
#pragma once

#include <memory>
#include <vector>

#include "backends/exchange/program.hpp"
#include "weft/backends/backend.hpp"
#include "weft/base/tensor.hpp"

namespace weft {

class ExchangeByMessages {
 public:
  /// `transport` has send and recv, and outlives this. Its failures are the exchange's.
  ExchangeByMessages(Context& context, Backend& transport, int rank);
  ~ExchangeByMessages();
  /// The transport ends while a peer, or its library, may still write to the memory of a failed exchange:
  /// that memory stays as long as the Context.
  void abandon() noexcept;
  ExchangeByMessages(const ExchangeByMessages&) = delete;
  ExchangeByMessages& operator=(const ExchangeByMessages&) = delete;

  /// As Backend has them, of Op::exchange.
  std::unique_ptr<PlannedExchange> plan(const ExchangePlan& plan);
  /// `batched`: the transport's batch is open.
  void post(OpState& s, bool batched = false) noexcept;
  Step poll(OpState& s) noexcept;
  std::vector<int> missing(const OpState& s, std::string& story) noexcept;
  bool ask(const OpState& s) noexcept;

 private:
  struct Message {
    bool packed = true, small = false;  // small: the boxes that have no message of their own, behind the head
    std::int64_t bytes = 0, at = 0;     // packed: in the room
    DType dtype = DType::u8;            // of one that is not packed
    std::size_t field = 0;
    std::int64_t offset = 0;
    std::vector<std::size_t> boxes{};  // of the side; packed
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
  std::vector<std::unique_ptr<Flight>> flights_;  // all that were ever made
  std::vector<Flight*> spare_;
};

}  // namespace weft
