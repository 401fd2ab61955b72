// Memory of other processes that is not shared, read by the kernel (process_vm_readv): one copy. Used by one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/peers.hpp"
#include "host/peers/kernel_copy.hpp"
#include "weft/base/shape.hpp"

namespace weft::windows {

/// A run of bytes of a field.
struct Piece {
  std::size_t field;
  std::int64_t offset, bytes;
};
/// Appends the runs of a box, in row-major order; those that follow one another in memory are one.
void add_pieces(const Shape& counts, const std::array<std::int64_t, Dims::kMaxDims>& steps,
                std::int64_t element, std::size_t field, std::int64_t offset, std::vector<Piece>& pieces);
/// Runs of bytes, and where the fields begin.
struct Pieces {
  const std::vector<Piece>& list;
  const std::uint64_t* fields;  ///< addresses
};

class KernelReads {
 public:
  static constexpr std::int64_t kMostBytes = std::int64_t{4} << 20;  ///< of one system call: each costs 2 us
  /// Whether this process may read that word of the other one, and finds `expected`.
  static bool finds(PeerProcess& process, std::uint64_t address, std::uint64_t expected) noexcept;

  enum class Outcome { copied, more, refused, ended };
  /// Bytes of the other process, in the order of `there`, go to `here`: as many on both sides. It goes on after the first `done`, and counts there what it
  /// has copied. `more`: that were many, or their pages were slow. `ended`: the process has, perhaps meanwhile.
  static Outcome read(PeerProcess& process, const Pieces& there, const Pieces& here, KernelPace& pace,
                      std::int64_t& done) noexcept;
};

}  // namespace weft::windows
