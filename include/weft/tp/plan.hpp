// A list of path patterns: the layers that are split over the ranks of tensor-parallel axes, and how each is
// split. A value; any thread.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/mesh/placement.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {

/// How one module is split. A Style is plain data. The library has no other information about it. These
/// styles are built in:
///
///   Style            split    parameters                         boundaries
///   enter            –        –                                  before: x is whole; dx of the column layers
///                                                                inside is summed here, once for all of them
///   column           column   weight Shard(0), bias Shard(0)     before: as enter, unless a module around it
///                                                                has that already
///   column_gathered  column   as column                          before: as column; after: y is gathered
///   row              row      weight Shard(1), bias Replicate    after: y is summed; then the bias is added,
///                             (Embedding: weight Shard(0))       once
///   vocabulary       column   as column; the parts may differ    before: as column; y stays cut, for a CrossEntropy
///                             in size                            that takes it so
///   sequence         –        whole                              after: y is cut along dimension 1, the sequence, as
///                                                                x was; otherwise a layout error. Nothing moves
///   cut_sequence     –        whole                              after: y, whole, is cut along dimension 1
///   gather_sequence  –        whole                              before: x, cut along dimension 1, is gathered
///
/// The first five styles are for tensors that are whole between layers. on_sequence() converts each of them
/// into the style for tensors that are cut along the sequence between layers. Make other styles in the same
/// way: Style{"mine", {}, Style::Change{Replicate{}, Shard{1}}, {}, …}.
struct Style {
  /// A RedistributeBoundary along the axes.
  struct Change {
    Placement from, to;
    friend bool operator==(const Change&, const Change&) = default;
  };
  std::string_view name;
  /// the argument for Module::shard_rule(); nothing: the module's parameters stay whole
  std::optional<Split> split{};
  std::optional<Change> before{};     ///< the change of each floating-point input
  std::optional<Change> after{};      ///< the change of each floating-point output
  bool before_is_for_inside = false;  ///< `before` is for the column layers inside, so there must be one
  /// `before` is left out if a module with before_is_for_inside is around this module
  bool shares_before = false;
  /// Whether the numbers of ShardRule::whole_units need not be multiples of the number of ranks. Parts then
  /// differ by one unit, and may be empty.
  bool uneven = false;

  /// Returns this style for tensors that are Shard(dim) (the sequence) between modules, and not whole
  /// (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198,
  /// section 4.2.2). An input that would be whole is gathered along `dim`, and its gradient is
  /// reduce-scattered. An output that would be all-reduced is reduce-scattered, and its gradient is gathered.
  /// Gathered features stay gathered.
  Style on_sequence(int dim = 1) const {
    Style s = *this;
    if (s.before && is_replicate(s.before->from)) s.before->from = Shard{dim};
    if (s.after && is_partial(s.after->from) && is_replicate(s.after->to)) s.after->to = Shard{dim};
    return s;
  }

  friend bool operator==(const Style&, const Style&) = default;
  static const Style enter, column, column_gathered, row, vocabulary, sequence, cut_sequence, gather_sequence;
};

inline const Style Style::enter{
    .name = "enter", .before = Change{Replicate{}, Replicate{}}, .before_is_for_inside = true};
inline const Style Style::column{.name = "column",
                                 .split = Split::column,
                                 .before = Change{Replicate{}, Replicate{}},
                                 .shares_before = true};
inline const Style Style::column_gathered{.name = "column_gathered",
                                          .split = Split::column,
                                          .before = Change{Replicate{}, Replicate{}},
                                          .after = Change{Shard{-1}, Replicate{}},
                                          .shares_before = true};
inline const Style Style::row{.name = "row", .split = Split::row, .after = Change{Partial{}, Replicate{}}};
inline const Style Style::vocabulary{.name = "vocabulary",
                                     .split = Split::column,
                                     .before = Change{Replicate{}, Replicate{}},
                                     .shares_before = true,
                                     .uneven = true};
inline const Style Style::sequence{.name = "sequence", .after = Change{Shard{1}, Shard{1}}};
inline const Style Style::cut_sequence{.name = "cut_sequence", .after = Change{Replicate{}, Shard{1}}};
inline const Style Style::gather_sequence{.name = "gather_sequence", .before = Change{Shard{1}, Replicate{}}};

/// Patterns are dotted paths. In them `*` stands for exactly one step with any name, or for any part of the
/// name of a step: "layers.*.attention", "layers.*.mlp.*_proj".
class Plan {
 public:
  struct Entry {
    std::string pattern;
    Style style;
  };

  Plan() = default;
  Plan(std::initializer_list<Entry> entries) : entries_(entries) {}
  Plan& add(std::string pattern, Style style) {
    entries_.push_back({std::move(pattern), style});
    return *this;
  }
  const std::vector<Entry>& entries() const noexcept { return entries_; }
  /// States that the module at `path` (not a pattern) itself stays whole. parallelize() then does not check
  /// its units(), even if entries split layers inside the module.
  Plan& leave_whole(std::string path) {
    left_whole_.push_back(std::move(path));
    return *this;
  }
  const std::vector<std::string>& left_whole() const noexcept { return left_whole_; }

 private:
  std::vector<Entry> entries_;
  std::vector<std::string> left_whole_;
};

}  // namespace weft
