// A composed call in flight: the inner calls of which it is made, and its progress.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "host/local_memory.hpp"
#include "weft/backends/backend.hpp"

namespace weft {

/// How a call is composed. `same`: the inner backend's own operation, with another number. `exchange`: one
/// exchange of blocks. `reduce`: an exchange (this rank gets the parts of its slice from all ranks), then the
/// combination and, if other ranks need the result, a second exchange (this rank's slice goes to them).
/// `scan`: like `reduce`, but each rank gets its own result.
enum class Plan : std::uint8_t { same, exchange, reduce, scan };

/// Buffers of one exchange: block r of `to`, in `in`, goes to rank r; block r of `from`, in `out`, arrives
/// from rank r.
struct Exchange {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_count = 0, out_count = 0;
  std::vector<BufferBlock> to, from;
};

/// The local work of this rank, which is done chunk by chunk: elements (for copies, bytes) [done, total) are
/// left.
struct LocalWork {
  std::int64_t done = 0, total = 0;
};

/// A collective call of the user that is in flight. The object is reused. Its vectors keep their capacity.
struct Composed {
  explicit Composed(int size)
      : inner(static_cast<std::size_t>(2 * size)),
        done(static_cast<std::size_t>(2 * size)),
        ins(static_cast<std::size_t>(size)),
        prefixes(static_cast<std::size_t>(size)),
        exchange{.to = std::vector<BufferBlock>(static_cast<std::size_t>(size)),
                 .from = std::vector<BufferBlock>(static_cast<std::size_t>(size))} {}

  OpState* user = nullptr;
  Plan plan = Plan::same;
  int posted = 0, steps = 1;  // inner steps
  // The inner calls of the current step: the first `count` entries, of which `open` are not done.
  std::vector<OpState> inner;  // has room for the 2n calls of a step, so it never moves
  std::vector<bool> done;
  int count = 0, open = 0;
  LocalWork copy;  // copies the rank's own block; counts bytes
  const std::byte* copy_from = nullptr;
  std::byte* copy_to = nullptr;
  LocalWork work;     // combines or fills; counts elements
  BufferBlock mine;   // reduce: this rank's slice of `in`
  std::byte* result;  // reduce with a second exchange: this rank's slice after the combination
  std::vector<const std::byte*> ins;
  std::array<std::byte*, 2> outs{};
  std::size_t outs_count = 0;
  // scan: the result of each rank for this rank's slice; null: the rank needs none
  std::vector<std::byte*> prefixes;
  Exchange exchange;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

/// Returns part r of `count` elements that are divided evenly over n ranks (weft/base/chunk.hpp).
BufferBlock slice(std::int64_t count, int r, int n) noexcept;

/// Plans the user's call `s` of rank `rank`: how the call is composed over a transport with these traits, its
/// first exchange, and its scratch memory, allocated from `memory`. Throws std::bad_alloc, and the errors of
/// LocalMemory::allocate().
void plan_call(Composed& c, OpState& s, const Traits& traits, int rank, int size, LocalMemory& memory);
/// Plans the second exchange of Plan::reduce and Plan::scan. This rank's slice goes to the ranks that have an
/// `out`. If this rank has an `out`, it receives the other ranks' slices. Rank 0 of an exscan receives
/// nothing. It fills its `out` with the identity.
void plan_results(Composed& c, int rank, int size) noexcept;

}  // namespace weft
