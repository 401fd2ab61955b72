// What weft's transports do themselves and promise: one table, from which the plug-ins, docs/support.md and
// the conformance tests take it.
#include <algorithm>

#include "backends/reduce.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace {

constexpr DTypeSet kAllDTypes = (DTypeSet{1} << kDTypeCount) - 1;
constexpr OpSet kAllOps = ((OpSet{1} << kOpCount) - 1) & ~op_bit(Op::none);

Traits shm() {
  Traits t{.name = "shm", .ops = kAllOps, .dtypes = kAllDTypes};
  for (int k = 0; k < kReduceKindCount; ++k)
    for (int d = 0; d < kDTypeCount; ++d)
      if (can_reduce(static_cast<DType>(d), ReduceOp{static_cast<ReduceOp::Kind>(k)}))
        t.reduces[static_cast<std::size_t>(k)] |= dtype_bit(static_cast<DType>(d));
  t.native_is_canonical = true;
  t.promises = {.deadline = true,
                .names_absent = true,
                .detects_death = true,
                .survives_death = true,
                .checks_calls = true,
                .revocable = true,
                .quiesces = true};
  return t;
}

const Traits kTable[] = {shm()};
const std::string_view kNames[] = {"shm"};

}  // namespace

const Traits* known_traits(std::string_view name) noexcept {
  const auto* const found =
      std::find_if(std::begin(kTable), std::end(kTable), [&](const Traits& t) { return t.name == name; });
  return found == std::end(kTable) ? nullptr : found;
}

std::span<const std::string_view> known_backends() noexcept { return kNames; }

}  // namespace weft
