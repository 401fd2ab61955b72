// Checks whether all ranks of some axes work on the same list of tensors in the same order. The ranks compare
// one digest of the whole list. The digest travels with an all-gather that happens in any case, or in a
// separate one. Further exchanges find the first entry that differs; they happen only if the digest differs.
// Private to mesh and the layers above.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.hpp"
#include "weft/base/error.hpp"
#include "weft/base/view.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The facts about a tensor that must be equal on all ranks: name, dtype, layout. Without a layout, also the
/// shape.
std::uint64_t digest_of_view(std::string_view name, const ConstTensorView& data, const LayoutRef& layout);
/// `"w" (f32 (7, 4) as [dp: Shard(0)])`
std::string text_of_view(std::string_view name, const ConstTensorView& data, const LayoutRef& layout);

/// The digest of one rank's list.
class ListDigest {
 public:
  static constexpr std::size_t kWords = 2;
  void add(std::uint64_t entry) {
    ++count_;
    hash_.add(entry);
  }
  std::array<std::uint64_t, kWords> words() const { return {count_, hash_.value}; }

 private:
  std::uint64_t count_ = 0;
  Fnv1a hash_;
};

/// A list, for the text of an error. If `difference` is given, it describes in other words that an entry
/// differs between rank 0 and `other`, from the texts of both ranks. The text is "missing" if a list is
/// shorter.
struct ListEntries {
  std::string_view kind;  ///< "gradient"
  std::size_t count = 0;
  std::function<std::uint64_t(std::size_t)> digest;
  std::function<std::string(std::size_t)> text;
  std::function<std::string(std::string_view first, std::string_view second, int other)> difference{};
};

/// Collective over `axes`. Call it if digests differ. Throws mismatch with one text on all ranks:
/// `reduce_gradients: gradient 0 is "a" (…) on dp rank 0, but "b" (…) on dp rank 1`. `what`: the caller's
/// name.
[[noreturn]] void throw_first_difference(std::string_view what, const DeviceMesh& axes,
                                         const ListEntries& list);

/// all_gather of host memory in any group. It goes through device memory if the group moves that. Waits at
/// most `deadline`. Zero: the group's deadline.
void gather_on_host(ProcessGroup& group, const ConstTensorView& own, const TensorView& all,
                    Duration deadline = {});

/// Words that ranks send each other together with the comparison of their lists: `own` of every rank, that of
/// rank r from r * own.size() on. Ranks with equal lists have equally many words. Uses one all-gather if
/// `own` has up to kWordsAtOnce words, otherwise two. `list` is called if the lists differ, and then throws.
/// With one rank nothing is sent.
///
/// `fault`: the fault in this rank's arguments, if any. This rank then throws it, and the other ranks throw
/// an error of the same code that names the rank and has the text: `check_replicas: dp rank 1 failed: …`.
constexpr std::size_t kWordsAtOnce = 13;
std::vector<std::uint64_t> gather_with_list(std::string_view what, const DeviceMesh& axes,
                                            const ListDigest& digest, std::span<const std::uint64_t> own,
                                            const std::function<ListEntries()>& list,
                                            const std::optional<Error>& fault = {});

/// Throws mismatch if the `count` words of a rank from `first` on, in `all` (the result of
/// gather_with_list()), differ from those of rank 0: `sharded_parameters: the options are reduce f32 on dp
/// rank 0, but reduce f64 on dp rank 1`. `what`: the caller's name; `those`: what the words are ("the options
/// are "); `text`: the text of a rank's words.
void expect_same_words(
    std::string_view what, std::string_view those, const DeviceMesh& axes, std::span<const std::uint64_t> all,
    std::size_t first, std::size_t count,
    const std::function<std::string(std::span<const std::uint64_t> words, int rank)>& text);

/// Throws `fault`, which this rank found while nobody communicates. First it sends the fault to the other
/// ranks, in the gather_with_list() of the same caller with which they begin later. This rank waits for them,
/// at most the group's deadline.
[[noreturn]] void throw_told(std::string_view what, const DeviceMesh& axes, const Error& fault);

/// Returns the Error that `check` throws, if any, for gather_with_list().
template <class Check>
std::optional<Error> fault_of(const Check& check) {
  try {
    check();
  } catch (const Error& e) {
    return e;
  }
  return {};
}

/// The digest of a list of Gradients or NamedViews.
template <class View>
ListDigest digest_of_list(std::span<const View> views) {
  ListDigest digest;
  for (const View& v : views) digest.add(digest_of_view(v.name, v.data, v.layout));
  return digest;
}
template <class View>
ListEntries entries_of(std::string_view kind, std::span<const View> views) {
  return {kind, views.size(),
          [views](std::size_t i) { return digest_of_view(views[i].name, views[i].data, views[i].layout); },
          [views](std::size_t i) { return text_of_view(views[i].name, views[i].data, views[i].layout); }};
}

}  // namespace weft
