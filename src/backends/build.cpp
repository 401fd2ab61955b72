#include "backends/build.hpp"

#include <fmt/format.h>

#include <cstddef>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/join.hpp"

namespace weft {
namespace {

constexpr std::string_view kPrefix = "weft-";

// The constants that ranks share over every transport: call records contain the numbers of operations, dtypes
// and reductions, and composed calls consist of the same messages on every transport.
std::uint64_t common_layout() {
  Fnv1a hash;
  hash.add(digest_of(kProtocol, kComposedTags, kUsersCall, sizeof(CallRecord), offsetof(CallRecord, call),
                     offsetof(CallRecord, count), offsetof(CallRecord, hash), offsetof(CallRecord, root),
                     offsetof(CallRecord, op), offsetof(CallRecord, dtype), offsetof(CallRecord, reduce),
                     offsetof(CallRecord, order), sizeof(Announcement), offsetof(Announcement, record),
                     offsetof(Announcement, gives), offsetof(Announcement, expects),
                     offsetof(Announcement, largest), sizeof(BufferBlock), kOpCount, kDTypeCount,
                     kReduceKindCount));
  for (int i = 0; i < kOpCount; ++i) hash.add(name(static_cast<Op>(i)));
  for (int i = 0; i < kDTypeCount; ++i) hash.add(name(static_cast<DType>(i)));
  for (int i = 0; i < kReduceKindCount; ++i) hash.add(name(static_cast<ReduceOp::Kind>(i)));
  return hash.value;
}

}  // namespace

std::string build_word(std::uint64_t layout, int rank) {
  static const std::uint64_t common = common_layout();
  std::uint64_t all = digest_of(common, layout);
  if (rank == 1 && WEFT_MUTANT("mixed_builds")) ++all;
  return fmt::format("{}{}-{:08x}", kPrefix, WEFT_PROJECT_VERSION,
                     static_cast<std::uint32_t>(all ^ (all >> 32)));
}

std::string describe_build(std::string_view word) {
  const std::size_t layout = word.rfind('-');
  if (!word.starts_with(kPrefix) || layout < kPrefix.size())
    return fmt::format("another weft (\"{}\")", word);
  return fmt::format("weft {} (layout {})", word.substr(kPrefix.size(), layout - kPrefix.size()),
                     word.substr(layout + 1));
}

void compare_builds(const GroupInit& b) {
  if (b.size == 1) return;
  const std::string what = "build";
  join(b, what, {}, 0);
  // The rank that arrives last knows that all ranks have read the texts.
  const std::string done = fmt::format("{}/{}/done", b.token, what);
  if (b.store->add(done, 1, b.deadline) != b.size) return;
  GroupInit each = b;
  for (each.rank = 0; each.rank < b.size; ++each.rank) withdraw(each, what);
  b.store->remove(done, b.deadline);
}

}  // namespace weft
