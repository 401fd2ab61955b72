#include "backends/shm/exchange/pieces.hpp"

#include <algorithm>

namespace weft::shm {

void add_pieces(const Shape& counts, const std::array<std::int64_t, Dims::kMaxDims>& steps,
                const std::int64_t* list, std::int64_t element, std::size_t field, std::int64_t offset,
                std::vector<Piece>& pieces) {
  const auto step = [&](int d) { return steps[static_cast<std::size_t>(d)]; };
  int rank = counts.rank();
  std::int64_t run = element;
  while (rank > (list != nullptr ? 1 : 0) && (counts[rank - 1] == 1 || step(rank - 1) == run)) {
    run *= counts[rank - 1];
    --rank;
  }
  Dims index;
  for (int d = 0; d < rank; ++d) index.push_back(0);
  for (;;) {
    std::int64_t at = offset;
    for (int d = 0; d < rank; ++d) at += (d == 0 && list != nullptr ? list[index[d]] : index[d]) * step(d);
    if (!pieces.empty() && pieces.back().field == field && pieces.back().offset + pieces.back().bytes == at)
      pieces.back().bytes += run;
    else
      pieces.push_back({field, at, run});
    int d = rank - 1;
    for (; d >= 0; --d) {
      if (++index[d] < counts[d]) break;
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

PieceList::PieceList(const Pieces& pieces, std::int64_t from, std::int64_t bytes) noexcept {
  std::size_t i = 0;
  for (; i < pieces.list.size() && from >= pieces.list[i].bytes; ++i) from -= pieces.list[i].bytes;
  for (; i < pieces.list.size() && count_ < kMost && bytes > 0; ++i, from = 0) {
    const Piece& p = pieces.list[i];
    const std::int64_t some = std::min(p.bytes - from, bytes);
    const std::uint64_t address = pieces.fields[p.field] + static_cast<std::uint64_t>(p.offset + from);
    list_[count_++] = {reinterpret_cast<void*>(address),  // NOLINT(performance-no-int-to-ptr)
                       static_cast<std::size_t>(some)};
    bytes -= some;
  }
}

}  // namespace weft::shm
