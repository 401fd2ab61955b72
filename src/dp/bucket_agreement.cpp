#include "dp/bucket_agreement.hpp"

#include <fmt/format.h>

#include "base/hash.hpp"
#include "mesh/same_list.hpp"
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

// The options that ranks exchange.
constexpr std::size_t kWords = 4;

std::string text_of_options(std::span<const std::uint64_t> words, const BucketOptions& own) {
  return fmt::format("number {} with bucket_bytes {}, unused {} and {}", words[0], words[1],
                     words[2] == static_cast<std::uint64_t>(Unused::error) ? "error" : "zeros",
                     words[3] == hash_of("")              ? "no hook"
                     : words[3] == hash_of(own.hook.name) ? fmt::format("the hook \"{}\"", own.hook.name)
                                                          : "another hook");
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
  expect_same_words("bucket_reducer", "the reducer is ", axes,
                    gather_with_list("bucket_reducer", axes, list, words, entries), 0, kWords,
                    [&](auto told, int) { return text_of_options(told, own.options); });
}

}  // namespace weft::dp
