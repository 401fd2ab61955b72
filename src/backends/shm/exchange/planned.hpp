// An exchange in the form for shm: the program of a plan, and the measurements for each neighbour. Only the
// owner of the group uses it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/exchange/program.hpp"
#include "backends/shm/exchange/pieces.hpp"
#include "backends/shm/exchange/ring.hpp"
#include "backends/shm/exchange/ways.hpp"
#include "host/arena.hpp"
#include "host/strided/runs.hpp"

namespace weft::shm {

struct Flight;

/// The bytes that go to one rank, or come from it.
struct Traffic {
  /// A run of bytes in this rank's memory, at its place in the packed bytes.
  struct Move {
    std::uint32_t field, bytes, at;
    std::int64_t offset;
  };
  /// A copy from the other rank's memory: a box with the steps of both ranks. `to`: the place in this rank's
  /// field, or in its sums.
  struct Joint {
    std::size_t field;
    Loops loops;
    std::int64_t from, to, elements, element;
    std::array<std::int64_t, Dims::kMaxDims> steps;  // of the other rank
    const std::int64_t* list;                        // of the other rank, in joint_lists; null: none
  };
  struct Run {
    std::size_t field;
    std::int64_t from, to, bytes;
    CopyRuns copy;
  };

  explicit Traffic(const ExchangeProgram::Side& of);

  const ExchangeProgram::Side* side;
  int peer;
  std::int64_t bytes;
  std::uint64_t form;
  std::int64_t at = 0;  ///< if received: its place in the memory for all received bytes
  /// Whether a slot has room for its fields and boxes, and there are more bytes than are always packed.
  bool nameable = false;
  bool listed = false;  ///< if sent: a box has indices
  /// Whether the runs are so short that a system call takes longer.
  bool short_runs;
  /// Whether the runs are so short that packing may be faster even if the receiver reaches the memory.
  bool scattered = false;
  /// All runs, if there are few bytes in few runs: the loops over boxes would take longer than these copies.
  /// The first `moves_beside` of them lie in a slot's first line. Empty if there are more.
  std::vector<Move> moves{};
  std::size_t moves_beside = 0;
  std::uint32_t move_bytes = 0;  ///< the bytes of each run; 0: they differ

  // If sent: the way that the bytes take if several are possible, and the measurement of it in progress.
  struct Measured {
    Ways ways{};
    Way way = Way::gathered;
    std::uint16_t timing = 0;     // 0: nothing is measured
    std::uint64_t last_slot = 0;  // the last slot of the measured exchange; 0: not sent yet
    std::uint64_t ns = 0;         // the time that the sender took to pack
  };
  Measured measured{};
  // If sent: the places of the fields with that number (ExchangeCall::memory), in memory that the receiver
  // maps.
  struct Placed {
    std::uint64_t memory = 0;  // 0: none
    Arena::Version arena{};
    std::uint32_t mapped = 0;
    std::array<Buffer, kMostPlaces> places{};
  };
  Placed placed{};
  // a bit for each field whose memory the kernel lets other processes read
  std::array<std::uint64_t, 4> copyable{};

  // If received, for many packed bytes: the loops of each box that write past the caches, whether they are
  // faster, and how often bytes have arrived.
  std::vector<Loops> streamed{};
  Unpackings unpackings{};
  std::uint64_t came = 0;
  // If received from the memory of the other rank: the copies, computed from its boxes when these had that
  // number.
  std::uint64_t joint_id = 0, pieces_id = 0;
  std::vector<Joint> joint{};
  std::vector<Run> joint_runs{};                         // the copies if each of them is one run
  std::vector<std::vector<std::int64_t>> joint_lists{};  // the indices of the other rank's boxes
  // for each field: the bytes that are read from the other rank's field
  std::vector<ExchangeProgram::Span> joint_spans{};
  std::vector<Piece> there{}, here{};  // the runs for copies by the kernel
};

struct Planned final : PlannedExchange {
  Planned(const ExchangePlan& plan, int rank);
  ~Planned() override;

  const ExchangeProgram program;
  std::vector<Traffic> to, from;  ///< parallel to program.sends and program.receives
  /// the number of the boxes of `to`, for the receivers; 0: not numbered yet
  std::uint64_t boxes_id = 0;
  std::int64_t came_bytes = 0;                   ///< the size of memory for all received bytes
  std::vector<std::unique_ptr<Flight>> flights;  ///< all Flights that were ever made
  std::vector<Flight*> spare;                    ///< the Flights that no call uses
};

}  // namespace weft::shm
