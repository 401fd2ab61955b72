// Performs one collective at a time by MPI's own nonblocking collectives.
//
// MPI counts in int, and its requests cannot be revoked. So a call is a sequence of rounds. Round k packs
// elements [k·chunk, (k+1)·chunk) of every block of `in` into a buffer of weft, moves them by one MPI_I*
// call, and unpacks them from another buffer of weft into `out`. The number of rounds depends only on values
// on which all ranks have agreed. If safe buffers are switched off, a call that fits into one round uses the
// caller's memory.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backends/mpi/process.hpp"
#include "weft/backends/backend.hpp"

namespace weft::mpi {

struct Limits {
  bool safe = true;            ///< data goes through buffers of weft
  std::int64_t max_count = 0;  ///< the most elements of one MPI call; > 0
};

/// Uninitialised memory, which the next call reuses.
class Stage {
 public:
  Stage() = default;
  Stage(Stage&& other) noexcept : bytes_(std::move(other.bytes_)), size_(std::exchange(other.size_, 0)) {}
  Stage& operator=(Stage&& other) noexcept {
    bytes_ = std::move(other.bytes_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }
  std::byte* get(std::int64_t bytes) {
    if (bytes > size_) {
      bytes_.reset(new std::byte[static_cast<std::size_t>(bytes)]);
      size_ = bytes;
    }
    return bytes_.get();
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  std::int64_t size_ = 0;
};

class Rounds {
 public:
  /// bytes of a round, all blocks together
  static constexpr std::int64_t kStageBytes = std::int64_t{1} << 20;
  static constexpr std::int64_t kLeastBlockBytes =
      std::int64_t{1}  /// bytes of a block in a round, if there are many ranks
      << 14;
  Rounds(const Process& process, MPI_Comm comm, int rank, int size, Limits limits);
  /// `largest`: for all_to_all_v, the number of elements in the largest block of any rank. It is equal on all
  /// ranks.
  void begin(const OpState& s, std::int64_t largest);
  /// done, advanced or pending.
  Step step(const OpState& s);
  /// Returns whether MPI may still access the caller's memory.
  bool exposed() noexcept;

 private:
  struct Side {  // `in` or `out` of the call
    bool present = false;
    int blocks = 0;       // 1, or one per rank
    bool direct = false;  // this round uses the caller's memory
    std::byte* at = nullptr;
    std::int64_t elements = 0;        // elements of this round, all blocks together
    std::vector<int> counts, displs;  // for v-forms of this round; kept until its request is done
  };
  BufferBlock piece(const OpState& s, bool in, int block) const noexcept;
  void prepare(const OpState& s, bool in);
  void pack(const OpState& s);
  void unpack(const OpState& s);
  void start(const OpState& s);

  const Process& process_;
  const MPI_Comm comm_;
  const int rank_, size_;
  const Limits limits_;
  std::int64_t chunk_ = 0, round_ = 0, rounds_ = 0;  // chunk_: elements of a block per round
  bool running_ = false;                             // request_ belongs to a round in flight
  MPI_Request request_ = MPI_REQUEST_NULL;
  Side in_, out_;
  Stage in_stage_, out_stage_;
};

}  // namespace weft::mpi
