// The MPI part of point-to-point messages (see PeerMessages). The elements of a small message travel in its
// control message. The elements of a large message follow it.
//
// A message of at most kEager bytes travels with its envelope (eager). Its send is done when MPI has taken
// the envelope. The envelope of a larger message carries a number, and the data follows in pieces, under an
// MPI tag made from that number. The numbers of a pair repeat after ControlChannel::kNumbers messages. At
// most 64 of these messages (the slots of a group's ring) are in flight. So tags may have any value, whatever
// MPI's limits, and a receive of another dtype or count is noticed before MPI sees it.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <vector>

#include "backends/mpi/control_channel.hpp"
#include "backends/mpi/rounds.hpp"
#include "weft/backends/backend.hpp"

namespace weft::mpi {

class Messages {
 public:
  static constexpr std::int64_t kEager = ControlChannel::kPayload;
  /// a piece of a large message, which goes through weft's buffers
  static constexpr std::int64_t kPieceBytes = std::int64_t{1} << 18;

  Messages(ControlChannel& channel, Limits limits);
  /// Begins a call, which is in flight until poll() returns done. s.scratch belongs to the call.
  void begin(OpState& s);
  void send(OpState& s);
  /// Begins to receive a large message of rank recv.peer.
  void fetch(OpState& recv, std::uint32_t number);
  /// Ends a call that needs no further MPI calls.
  void finish(OpState& s) noexcept;
  /// Returns whether poll() would return done.
  bool over(const OpState& s) const;
  /// Returns done, advanced or pending.
  Step poll(OpState& s);
  /// Returns whether MPI may still access the caller's memory.
  bool exposed() noexcept;

 private:
  static constexpr int kWindow = 4;  // pieces in flight
  struct Piece {
    MPI_Request request = MPI_REQUEST_NULL;
    std::int64_t at = 0, count = 0;
    Stage stage;
  };
  // written: the whole message was written with its envelope
  enum class Phase : std::uint8_t { waiting, moving, written, done };
  struct Transfer {
    OpState* call = nullptr;
    Phase phase = Phase::waiting;
    std::uint32_t number = 0;
    std::uint64_t envelope = 0;  // for `written`: the number of the envelope in the channel
    std::int64_t count = 0;
    std::int64_t started = 0, finished = 0;  // elements
    std::deque<Piece> pieces;                // pieces in flight, in order
  };
  static Transfer*& kept_in(OpState& s) noexcept { return *reinterpret_cast<Transfer**>(s.scratch.data()); }
  static const Transfer& kept_in(const OpState& s) noexcept {
    return **reinterpret_cast<Transfer* const*>(s.scratch.data());
  }
  bool advance(Transfer& t);

  ControlChannel& channel_;
  const Limits limits_;
  std::vector<std::uint32_t> next_numbers_;  // by peer
  std::list<Transfer> transfers_;
  std::vector<Stage> spare_;
};

}  // namespace weft::mpi
