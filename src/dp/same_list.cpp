#include "dp/same_list.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "dp/axis_ranks.hpp"
#include "mesh/layout_table.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::dp {
namespace {

constexpr std::size_t kTextBytes = 512;  // of an entry's text; what is longer is cut

// Entry i of every rank's digests.
std::vector<std::uint64_t> gather(const DeviceMesh& axes, const std::vector<std::uint64_t>& own) {
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(axes.size()));
  axes.group().all_gather(view(own), view(all)).wait();
  return all;
}

// The text of every rank's entry i.
std::vector<std::string> gather_texts(const DeviceMesh& axes, const ListEntries& list, std::size_t i) {
  std::vector<std::uint8_t> own(kTextBytes), all(kTextBytes * static_cast<std::size_t>(axes.size()));
  const std::string text = i < list.count ? list.text(i) : "missing";
  std::memcpy(own.data(), text.data(), std::min(text.size(), kTextBytes - 1));
  axes.group().all_gather(view(own), view(all)).wait();
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < static_cast<std::size_t>(axes.size()); ++r)
    texts.emplace_back(reinterpret_cast<const char*>(all.data() + r * kTextBytes));
  return texts;
}

}  // namespace

std::uint64_t digest_of_gradient(const Gradient& g) {
  Fnv1a hash;
  hash.add(g.name);
  hash.add(static_cast<std::uint64_t>(g.data.dtype));
  hash.add(static_cast<std::uint64_t>(g.layout != nullptr));
  if (g.layout != nullptr) {
    add_to(hash, *g.layout);
  } else {
    hash.add(static_cast<std::uint64_t>(g.data.shape.rank()));
    for (const std::int64_t extent : g.data.shape) hash.add(static_cast<std::uint64_t>(extent));
  }
  return hash.value;
}

std::string text_of_gradient(const Gradient& g) {
  return fmt::format(
      "\"{}\" ({} {})", g.name, name(g.data.dtype),
      g.layout == nullptr ? to_string(g.data.shape) + " without a layout" : to_string(*g.layout));
}

bool same_lists(std::span<const std::uint64_t> all, std::size_t stride) {
  for (std::size_t at = stride; at < all.size(); at += stride)
    for (std::size_t w = 0; w < ListDigest::kWords; ++w)
      if (all[at + w] != all[w]) return false;
  return true;
}

void throw_first_difference(std::string_view what, const DeviceMesh& axes, const ListEntries& list) {
  const std::vector<std::uint64_t> counts = gather(axes, {static_cast<std::uint64_t>(list.count)});
  const std::size_t longest = static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
  std::vector<std::uint64_t> own(longest);
  for (std::size_t i = 0; i < list.count; ++i) own[i] = list.digest(i);
  const std::vector<std::uint64_t> all = gather(axes, own);
  std::size_t first = 0, other = 1;  // the entry, and the first rank where it is not that of rank 0
  const auto differs = [&](std::size_t i, std::size_t r) {
    return all[r * longest + i] != all[i] || (i < counts[r]) != (i < counts[0]);
  };
  const auto found = [&] {
    for (first = 0; first < longest; ++first)
      for (other = 1; other < counts.size(); ++other)
        if (differs(first, other)) return true;
    return false;
  };
  if (!found())  // somebody has changed the list meanwhile
    throw Error(Failure{
        ErrorCode::mismatch, fmt::format("{}: ranks gave different gradients", what), Op::none, kNoCall, {}});
  const std::vector<std::string> texts = gather_texts(axes, list, first);
  throw Error(Failure{
      ErrorCode::mismatch,
      fmt::format("{}: gradient {} is {} on {}, but {} on {}", what, first, texts[0], name_axis_rank(axes, 0),
                  texts[other], name_axis_rank(axes, static_cast<int>(other))),
      Op::none,
      kNoCall,
      {0, static_cast<int>(other)}});
}

void expect_same_list(std::string_view what, const DeviceMesh& axes, const ListEntries& list) {
  if (axes.size() == 1) return;
  ListDigest digest;
  for (std::size_t i = 0; i < list.count; ++i) digest.add(list.digest(i));
  const auto own = digest.words();
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(axes.size()));
  axes.group().all_gather(view(own.data(), ListDigest::kWords), view(all)).wait();
  if (!same_lists(all, own.size())) throw_first_difference(what, axes, list);
}

void expect_same_list(std::string_view what, const DeviceMesh& axes, std::span<const Gradient> gradients) {
  expect_same_list(
      what, axes,
      ListEntries{gradients.size(), [&](std::size_t i) { return digest_of_gradient(gradients[i]); },
                  [&](std::size_t i) { return text_of_gradient(gradients[i]); }});
}

}  // namespace weft::dp
