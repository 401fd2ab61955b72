// Runs of bytes of fields, in order: the runs that one system call copies, and the runs by which few bytes
// are moved.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "weft/base/shape.hpp"

namespace weft::shm {

/// A run of bytes of a field.
struct Piece {
  std::size_t field;
  std::int64_t offset, bytes;
};
/// Appends the runs of a box, in row-major order; runs that are adjacent in memory are joined. `list`: see
/// ExchangeProgram::Box.
void add_pieces(const Shape& counts, const std::array<std::int64_t, Dims::kMaxDims>& steps,
                const std::int64_t* list, std::int64_t element, std::size_t field, std::int64_t offset,
                std::vector<Piece>& pieces);

/// Runs of bytes, and the addresses of the fields.
struct Pieces {
  const std::vector<Piece>& list;
  const std::uint64_t* fields;
};

/// The part of Pieces that one system call copies.
class PieceList {
 public:
  static constexpr std::size_t kMost = 256;
  /// At most `bytes` bytes, after the first `from` bytes.
  PieceList(const Pieces& pieces, std::int64_t from, std::int64_t bytes) noexcept;
  const iovec* data() const noexcept { return list_.data(); }
  std::size_t size() const noexcept { return count_; }

 private:
  std::array<iovec, kMost> list_;
  std::size_t count_ = 0;
};

}  // namespace weft::shm
