// An exchange as shm carries it out: the program of a plan, with the measurements made of each neighbour.
// The owner of the group uses it.
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

/// The traffic in one direction with one rank.
struct Traffic {
  /// A run of bytes in this rank's memory, at its place in the packed bytes.
  struct Move {
    std::uint32_t field, bytes, at;
    std::int64_t offset;
  };
  /// A copy from the other rank's memory: a box with the steps of both ranks. `to`: in this rank's field,
  /// or in its sums.
  struct Joint {
    std::size_t field;
    Loops loops;
    std::int64_t from, to, elements, element;
    std::array<std::int64_t, Dims::kMaxDims> steps;  // of the other rank
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
  std::int64_t at = 0;  ///< receiving: where it begins in the memory for all that comes
  /// A slot has room for its fields and boxes, and there are more bytes than are packed in any case.
  bool nameable = false;
  /// The runs are too short for a system call to pay.
  bool short_runs;
  /// The runs are so short that packing may pay also where the receiver reaches the memory.
  bool scattered = false;
  /// All the runs, if there are few bytes in few runs: the loops of boxes would take longer than these
  /// copies. The first `moves_beside` of them lie in a slot's first line. Empty: there are more.
  std::vector<Move> moves{};
  std::size_t moves_beside = 0;
  std::uint32_t move_bytes = 0;  ///< of each of them; 0: they differ

  // Sending: the way that the bytes take where more than one is possible, and the measurement of it that is
  // under way.
  struct Measured {
    Ways ways{};
    Way way = Way::gathered;
    std::uint16_t timing = 0;     // 0: nothing
    std::uint64_t last_slot = 0;  // of the exchange that is measured; 0: not yet sent
    std::uint64_t ns = 0;         // that the sender took to pack
  };
  Measured measured{};
  // Sending: where the fields of that number (ExchangeCall::memory) lay, in memory that the receiver maps.
  struct Placed {
    std::uint64_t memory = 0;  // 0: none
    Arena::Version arena{};
    std::uint32_t mapped = 0;
    std::array<Buffer, kMostPlaces> places{};
  };
  Placed placed{};
  std::array<std::uint64_t, 4> copyable{};  // fields, by number, of whose memory the kernel let others read

  // Receiving. If many packed bytes arrive: the loops of each box around the caches, whether they are
  // quicker, and how often bytes arrived.
  std::vector<Loops> streamed{};
  Unpackings unpackings{};
  std::uint64_t came = 0;
  // Receiving from the memory of the other rank: the copies, worked out from its boxes when those had that
  // number.
  std::uint64_t joint_id = 0, pieces_id = 0;
  std::vector<Joint> joint{};
  std::vector<Run> joint_runs{};                     // the same, where each is one run
  std::vector<ExchangeProgram::Span> joint_spans{};  // of each field: the bytes that are read there
  std::vector<Piece> there{}, here{};                // for the kernel
};

struct Planned final : PlannedExchange {
  Planned(const ExchangePlan& plan, int rank);
  ~Planned() override;

  const ExchangeProgram program;
  std::vector<Traffic> to, from;                 ///< as program.sends, program.receives
  std::uint64_t boxes_id = 0;                    ///< of `to`, for the receivers; 0: not numbered yet
  std::int64_t came_bytes = 0;                   ///< of memory for all that comes
  std::vector<std::unique_ptr<Flight>> flights;  ///< all that were ever made
  std::vector<Flight*> spare;                    ///< those of them that no call uses
};

}  // namespace weft::shm
