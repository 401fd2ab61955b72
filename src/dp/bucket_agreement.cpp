#include "dp/bucket_agreement.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/hash.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/replicas/same_list.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

std::uint64_t digest(const ReducerToCompare& of, std::size_t i) {
  const BucketEntry& e = of.entries[i];
  return digest_of(hash_of(e.name), e.count, static_cast<int>(e.dtype), static_cast<int>(e.op.kind),
                   of.in_place(i));
}
std::string text(const ReducerToCompare& of, std::size_t i) {
  const BucketEntry& e = of.entries[i];
  return fmt::format("\"{}\" ({} x{} {}{})", e.name, name(e.dtype), e.count, name(e.op),
                     of.in_place(i) ? ", bound" : "");
}

// What ranks tell of their options.
constexpr std::size_t kWords = 4;

void expect_same_options(const DeviceMesh& axes, const BucketOptions& options,
                         const std::vector<std::uint64_t>& all) {
  const auto told = [&](int rank) { return all.begin() + rank * static_cast<std::ptrdiff_t>(kWords); };
  const auto shown = [&](int rank) {
    const std::uint64_t hook = told(rank)[3];
    return fmt::format("number {} with bucket_bytes {}, unused {} and {} on {}", told(rank)[0], told(rank)[1],
                       told(rank)[2] == static_cast<std::uint64_t>(Unused::error) ? "error" : "zeros",
                       hook == hash_of("") ? "no hook"
                       : hook == hash_of(options.hook.name)
                           ? fmt::format("the hook \"{}\"", options.hook.name)
                           : "another hook",
                       name_axis_rank(axes, rank));
  };
  for (int r = 1; r < axes.size(); ++r)
    if (!std::equal(told(0), told(1), told(r)))
      throw Error(Failure{ErrorCode::mismatch,
                          fmt::format("bucket_reducer: the reducer is {}, but {}", shown(0), shown(r)),
                          Op::none,
                          kNoCall,
                          {0, r}});
}

}  // namespace

void expect_same_reducers(const DeviceMesh& axes, const ReducerToCompare& own) {
  ListDigest list;
  for (std::size_t i = 0; i < own.entries.size(); ++i) list.add(digest(own, i));
  const std::uint64_t words[kWords] = {
      static_cast<std::uint64_t>(own.number), static_cast<std::uint64_t>(own.options.bucket_bytes),
      static_cast<std::uint64_t>(own.options.unused), hash_of(own.options.hook.name)};
  const auto entries = [&] {
    return ListEntries{"gradient", own.entries.size(), [&](std::size_t i) { return digest(own, i); },
                       [&](std::size_t i) { return text(own, i); }};
  };
  expect_same_options(axes, own.options, gather_with_list("bucket_reducer", axes, list, words, entries));
}

}  // namespace weft::dp
