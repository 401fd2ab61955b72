// A composed call in flight: the inner calls of which it is made, and its progress.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/local_memory.hpp"
#include "weft/backends/backend.hpp"

namespace weft {

/// How a call is composed. `same`: the inner backend's own operation, numbered again. `exchange`: one
/// exchange of blocks. `reduce`: exchange (every rank's part of my slice comes to me), combine and, if other
/// ranks need the result, exchange (my slice goes to them). `scan`: like `reduce`, but each rank gets its own
/// result.
enum class Plan : std::uint8_t { same, exchange, reduce, scan };

/// Buffers of one exchange: block r of `to`, in `in`, goes to rank r; block r of `from`, in `out`, arrives
/// from rank r.
struct Exchange {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_count = 0, out_count = 0;
  std::vector<Block> to, from;
};

/// The work that this rank does by itself, chunk by chunk: elements (copies: bytes) [done, total).
struct LocalWork {
  std::int64_t done = 0, total = 0;
};

/// A collective call of the user that is in flight. The object is reused; its vectors keep their capacity.
struct Composed {
  explicit Composed(int size)
      : inner(static_cast<std::size_t>(2 * size)),
        done(static_cast<std::size_t>(2 * size)),
        ins(static_cast<std::size_t>(size)),
        prefixes(static_cast<std::size_t>(size)),
        exchange{.to = std::vector<Block>(static_cast<std::size_t>(size)),
                 .from = std::vector<Block>(static_cast<std::size_t>(size))} {}

  OpState* user = nullptr;
  Plan plan = Plan::same;
  int posted = 0, steps = 1;  // inner steps
  // The inner calls of the current step: the first `count` entries, of which `open` are not done.
  std::vector<OpState> inner;  // a step has at most 2n; never moves
  std::vector<bool> done;
  int count = 0, open = 0;
  LocalWork copy;  // of the own block, in bytes
  const std::byte* copy_from = nullptr;
  std::byte* copy_to = nullptr;
  LocalWork work;     // combine or fill, in elements
  Block mine;         // reduce: my slice of `in`
  std::byte* result;  // reduce with a second exchange: my slice, combined
  std::vector<const std::byte*> ins;
  std::array<std::byte*, 2> outs{};
  std::size_t outs_count = 0;
  std::vector<std::byte*> prefixes;  // scan: the result of each rank for my slice; null: the rank needs none
  Exchange exchange;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

/// Part r of `count` elements divided evenly over n ranks (weft/base/chunk.hpp).
Block slice(std::int64_t count, int r, int n) noexcept;

/// Plans the user's call `s` of rank `rank`: how the call is composed over a transport with these traits, its
/// first exchange, and its scratch memory, allocated from `memory`. Throws std::bad_alloc, and the errors of
/// LocalMemory::allocate().
void plan_call(Composed& c, OpState& s, const Traits& traits, int rank, int size, LocalMemory& memory);
/// Plans the second exchange of Plan::reduce and Plan::scan: this rank's slice goes to the ranks that have an
/// `out`; if this rank has an `out`, the other ranks' slices come here. Rank 0 of an exscan receives nothing:
/// it fills its `out` with the identity.
void plan_results(Composed& c, int rank, int size) noexcept;

}  // namespace weft
