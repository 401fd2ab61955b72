#include "mesh/same_list.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "mesh/axis_ranks.hpp"
#include "mesh/layout_table.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {
namespace {

constexpr std::size_t kTextBytes = 512;  // of an entry's text; longer texts are cut

// Entry i of every rank's digests.
std::vector<std::uint64_t> gather(const DeviceMesh& axes, const std::vector<std::uint64_t>& own) {
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(axes.size()));
  gather_on_host(axes.group(), view(own), view(all));
  return all;
}

std::vector<std::string> gather_texts(const DeviceMesh& axes, std::string_view text) {
  std::vector<std::uint8_t> own(kTextBytes), all(kTextBytes * static_cast<std::size_t>(axes.size()));
  std::memcpy(own.data(), text.data(), std::min(text.size(), kTextBytes - 1));
  gather_on_host(axes.group(), view(own), view(all));
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < static_cast<std::size_t>(axes.size()); ++r) {
    const auto* const theirs = reinterpret_cast<const char*>(all.data() + r * kTextBytes);
    texts.emplace_back(theirs, ::strnlen(theirs, kTextBytes));
  }
  return texts;
}

// The error codes show that some ranks have a fault. The lowest of these ranks supplies the error text.
[[noreturn]] void throw_fault(std::string_view what, const DeviceMesh& axes, const std::optional<Error>& own,
                              int first, ErrorCode code) {
  const std::vector<std::string> texts = gather_texts(axes, own ? own->what() : "");
  if (own) throw *own;
  throw Error(Failure{code,
                      fmt::format("{}: {} failed: {}", what, name_axis_rank(axes, first),
                                  texts[static_cast<std::size_t>(first)]),
                      Op::none,
                      kNoCall,
                      {first}});
}

}  // namespace

std::uint64_t digest_of_view(std::string_view name, const ConstTensorView& data, const LayoutRef& layout) {
  Fnv1a hash;
  hash.add(name);
  hash.add(static_cast<std::uint64_t>(data.dtype));
  hash.add(static_cast<std::uint64_t>(layout != nullptr));
  if (layout != nullptr) {
    add_to(hash, *layout);
  } else {
    hash.add(static_cast<std::uint64_t>(data.shape.rank()));
    for (const std::int64_t extent : data.shape) hash.add(static_cast<std::uint64_t>(extent));
  }
  return hash.value;
}

std::string text_of_view(std::string_view name, const ConstTensorView& data, const LayoutRef& layout) {
  return fmt::format("\"{}\" ({} {})", name, weft::name(data.dtype),
                     layout == nullptr ? to_string(data.shape) + " without a layout" : to_string(*layout));
}

void throw_first_difference(std::string_view what, const DeviceMesh& axes, const ListEntries& list) {
  const std::vector<std::uint64_t> counts = gather(axes, {static_cast<std::uint64_t>(list.count)});
  // If memory that ranks share is damaged, a count may be any number.
  constexpr std::uint64_t kLongest = std::uint64_t{1} << 24;
  const std::uint64_t most = *std::max_element(counts.begin(), counts.end());
  if (most < list.count || most > kLongest)
    throw Error(Failure{ErrorCode::corrupt,
                        fmt::format("{}: the longest list of {}s of a rank has {} entries; expected {} to {}",
                                    what, list.kind, most, list.count, kLongest),
                        Op::none,
                        kNoCall,
                        {}});
  const auto longest = static_cast<std::size_t>(most);
  std::vector<std::uint64_t> own(longest);
  for (std::size_t i = 0; i < list.count; ++i) own[i] = list.digest(i);
  const std::vector<std::uint64_t> all = gather(axes, own);
  std::size_t first = 0, other = 1;  // the entry, and the first rank if it is not that of rank 0
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
    throw Error(Failure{ErrorCode::mismatch,
                        fmt::format("{}: ranks gave different {}s", what, list.kind),
                        Op::none,
                        kNoCall,
                        {}});
  const std::vector<std::string> texts =
      gather_texts(axes, first < list.count ? list.text(first) : "missing");
  const int rank = static_cast<int>(other);
  const std::string difference =
      list.difference ? list.difference(texts[0], texts[other], rank)
                      : fmt::format("{} {} is {} on {}, but {} on {}", list.kind, first, texts[0],
                                    name_axis_rank(axes, 0), texts[other], name_axis_rank(axes, rank));
  throw Error(
      Failure{ErrorCode::mismatch, fmt::format("{}: {}", what, difference), Op::none, kNoCall, {0, rank}});
}

void gather_on_host(ProcessGroup& group, const ConstTensorView& own, const TensorView& all,
                    Duration deadline) {
  if (!group.traits().device) return group.all_gather(own, all, {.deadline = deadline}).wait();
  // Uses the device's default stream: this waits for no work on the streams of the ranks.
  Context& context = group.context();
  const Stream stream = Device{DeviceKind::cuda, group.traits().device_index};
  const Tensor in(context, own.shape, own.dtype, Memory::shared, stream);
  const Tensor out(context, all.shape, all.dtype, Memory::shared, stream);
  copy(context, own, in, stream);
  group.all_gather(in, out, {.deadline = deadline, .stream = stream}).wait();
  copy(context, out, all, stream);
  context.device(stream.device).wait(stream);
}

// Ranks with different lists may have different numbers of words, so the first all-gather has a fixed size:
// the digest, a fault and the first words. Usually no second one is needed.
std::vector<std::uint64_t> gather_with_list(std::string_view what, const DeviceMesh& axes,
                                            const ListDigest& digest, std::span<const std::uint64_t> own,
                                            const std::function<ListEntries()>& list,
                                            const std::optional<Error>& fault) {
  if (axes.size() == 1) {
    if (fault) throw *fault;
    return {own.begin(), own.end()};
  }
  constexpr std::size_t kFault = ListDigest::kWords, kDigest = kFault + 1, kStride = kDigest + kWordsAtOnce;
  const auto ranks = static_cast<std::size_t>(axes.size());
  const std::size_t first = std::min(own.size(), kWordsAtOnce), later = own.size() - first;
  const auto words = digest.words();
  std::vector<std::uint64_t> head(kStride);
  std::copy(words.begin(), words.end(), head.begin());
  if (fault) head[kFault] = static_cast<std::uint64_t>(fault->code());
  std::copy_n(own.begin(), first, head.begin() + kDigest);
  const std::vector<std::uint64_t> heads = gather(axes, head);
  for (std::size_t r = 0; r < ranks; ++r)
    if (const std::uint64_t code = heads[r * kStride + kFault]; code != 0)
      throw_fault(what, axes, fault, static_cast<int>(r), error_code(static_cast<std::int64_t>(code)));
  for (std::size_t r = 1; r < ranks; ++r)
    if (!std::equal(heads.begin(), heads.begin() + kDigest,
                    heads.begin() + static_cast<std::ptrdiff_t>(r * kStride)))
      throw_first_difference(what, axes, list());
  std::vector<std::uint64_t> tails, all;
  if (later > 0) tails = gather(axes, {own.begin() + static_cast<std::ptrdiff_t>(first), own.end()});
  all.reserve(own.size() * ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto from = heads.begin() + static_cast<std::ptrdiff_t>(r * kStride + kDigest);
    all.insert(all.end(), from, from + static_cast<std::ptrdiff_t>(first));
    const auto rest = tails.begin() + static_cast<std::ptrdiff_t>(r * later);
    all.insert(all.end(), rest, rest + static_cast<std::ptrdiff_t>(later));
  }
  return all;
}

void expect_same_words(std::string_view what, std::string_view those, const DeviceMesh& axes,
                       std::span<const std::uint64_t> all, std::size_t first, std::size_t count,
                       const std::function<std::string(std::span<const std::uint64_t>, int)>& text) {
  const std::size_t stride = all.size() / static_cast<std::size_t>(axes.size());
  const auto told = [&](int rank) {
    return all.subspan(static_cast<std::size_t>(rank) * stride + first, count);
  };
  for (int r = 1; r < axes.size(); ++r)
    if (!std::equal(told(0).begin(), told(0).end(), told(r).begin()))
      throw Error(Failure{ErrorCode::mismatch,
                          fmt::format("{}: {}{} on {}, but {} on {}", what, those, text(told(0), 0),
                                      name_axis_rank(axes, 0), text(told(r), r), name_axis_rank(axes, r)),
                          Op::none,
                          kNoCall,
                          {0, r}});
}

void throw_told(std::string_view what, const DeviceMesh& axes, const Error& fault) {
  if (axes.size() > 1) try {
      gather_with_list(
          what, axes, ListDigest(), {}, [] { return ListEntries{}; }, fault);
    } catch (const Error&) {  // this failure, or one because no rank came to receive it
    }
  throw Error(fault);
}

}  // namespace weft
