#include "backends/shm/exchange/planned.hpp"

#include <algorithm>

#include "backends/shm/exchange/exchanges.hpp"
#include "reduce/strided_sums.hpp"

namespace weft::shm {
namespace {

// If there are few bytes in few runs, lists each run, in the order of the packed bytes.
void find_moves(Traffic& t) {
  constexpr std::int64_t kMostMoves = 128;
  if (t.bytes > kFewBytes || t.side->runs > kMostMoves) return;
  std::vector<Piece> pieces;
  for (const ExchangeProgram::Box& b : t.side->boxes)
    add_pieces(b.counts, b.steps, b.list, b.element, b.field, b.offset, pieces);
  std::int64_t at = 0;
  for (const Piece& p : pieces)
    for (std::int64_t done = 0; done < p.bytes;) {  // a run is cut at the end of the slot's first line
      const std::int64_t some =
          at < kBesideBytes ? std::min(p.bytes - done, kBesideBytes - at) : p.bytes - done;
      t.moves.push_back({static_cast<std::uint32_t>(p.field), static_cast<std::uint32_t>(some),
                         static_cast<std::uint32_t>(at), p.offset + done});
      at += some;
      done += some;
      if (at <= kBesideBytes) t.moves_beside = t.moves.size();
    }
  if (!t.moves.empty()) t.move_bytes = t.moves[0].bytes;
  for (const Traffic::Move& m : t.moves)
    if (m.bytes != t.move_bytes) t.move_bytes = 0;
}

}  // namespace

Traffic::Traffic(const ExchangeProgram::Side& of)
    : side(&of), peer(of.peer), bytes(of.bytes), form(of.form), short_runs(of.bytes < kLongRun * of.runs) {}

Planned::Planned(const ExchangePlan& plan, int rank) : program(plan, rank) {
  for (const ExchangeProgram::Side& side : program.sends) {
    Traffic& t = to.emplace_back(side);
    find_moves(t);
    std::size_t numbers = 0, indices = 0;
    bool short_indices = true;
    for (const ExchangeProgram::Box& b : side.boxes) {
      numbers += 2 + static_cast<std::size_t>(b.counts.rank());
      if (b.list == nullptr) continue;
      t.listed = true;
      indices += static_cast<std::size_t>(b.counts[0]);
      short_indices &= *std::max_element(b.list, b.list + b.counts[0]) <= UINT32_MAX;
    }
    t.nameable = t.bytes > kPackedBytes && program.fields.size() <= kMostPlaces && numbers <= kBoxNumbers &&
                 indices <= kListNumbers && short_indices;
    t.scattered = t.bytes < kScatteredRun * side.runs;
  }
  for (const ExchangeProgram::Side& side : program.receives) {
    Traffic& t = from.emplace_back(side);
    t.at = came_bytes;
    came_bytes += on_lines(side.bytes);
    if (program.adds) continue;
    find_moves(t);
    if (side.bytes >= kStreamedBytes && side.bytes >= kStreamedRun * side.runs)
      for (const ExchangeProgram::Box& b : side.boxes) t.streamed.push_back(b.loops.by(stream_runs));
  }
}

Planned::~Planned() = default;

}  // namespace weft::shm
