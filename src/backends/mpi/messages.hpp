// Point to point: envelopes that announce a message, matched here by (source, tag) in order, and the data of
// large ones.
//
// A message of at most kEager bytes travels with its envelope (eager); its send is done when MPI has taken
// that. The envelope of a larger one carries a number, and the data follows in pieces, under an MPI tag made
// from that number. The numbers of a pair repeat after ControlChannel::kNumbers messages, of which at most 64
// (the slots of a group's ring) are in flight. So tags may have any value, whatever MPI's limits, and a
// receive of another dtype or count is noticed before MPI sees it.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/mpi/control_channel.hpp"
#include "backends/mpi/rounds.hpp"
#include "weft/backends/backend.hpp"
#include "weft/backends/matching.hpp"
#include "weft/base/error.hpp"

namespace weft::mpi {

class Messages {
 public:
  static constexpr std::int64_t kEager = ControlChannel::kPayload;
  static constexpr std::int64_t kPieceBytes = std::int64_t{1} << 18;  ///< of a large one, through our buffers

  Messages(ControlChannel& channel, Limits limits, UnexpectedLimits unexpected);
  void post(OpState& s);
  /// An envelope of kind `message` has come.
  void arrived(int from, const Envelope& envelope, std::span<const std::byte> payload);
  /// done, advanced or pending.
  Step poll(OpState& s);
  /// A receive that does not fit what was sent, or an unexpected message for which there is no room.
  const std::optional<Failure>& trouble() const noexcept { return trouble_; }
  /// The message that a receive from `source` (or any_source) with that tag would take.
  std::optional<MessageInfo> probe(int source, std::int32_t tag) const;
  /// Messages that no receive has taken, from the source of `recv`: weft::not_received().
  std::string not_received(const OpState& recv) const { return weft::not_received(matcher_.kept(recv.peer)); }
  /// The ranks that must still do something for a message of this rank: receivers of large ones, senders to
  /// its receives; of a receive from any_source all others, if `any`.
  std::vector<int> awaited(bool any = true) const;
  /// Whether calls in flight wait for a message of any rank.
  bool awaits_any() const noexcept;
  /// Whether MPI may still access the caller's memory.
  bool exposed() noexcept;

 private:
  static constexpr int kWindow = 4;  // pieces under way
  struct Piece {
    MPI_Request request = MPI_REQUEST_NULL;
    std::int64_t at = 0, count = 0;
    Stage stage;
  };
  enum class Phase : std::uint8_t {
    unmatched,
    moving,
    written,
    done
  };  // written: all of it, in its envelope
  struct Transfer {
    OpState* call = nullptr;
    Phase phase = Phase::unmatched;
    std::uint32_t number = 0;
    std::uint64_t envelope = 0;  // its place in the channel; written
    std::int64_t count = 0;
    std::int64_t started = 0, finished = 0;  // elements
    std::deque<Piece> pieces;                // under way, in order
  };
  struct UnexpectedMessage {
    Envelope envelope;
    std::vector<std::byte> payload;
  };
  void match(Transfer& t, const Envelope& envelope, std::span<const std::byte> payload);
  bool advance(Transfer& t);

  ControlChannel& channel_;
  const Limits limits_;
  std::vector<std::uint32_t> next_numbers_;  // by peer
  MessageMatcher<Transfer, UnexpectedMessage> matcher_;
  std::list<Transfer> transfers_;
  std::vector<Stage> spare_;
  std::optional<Failure> trouble_;
};

}  // namespace weft::mpi
