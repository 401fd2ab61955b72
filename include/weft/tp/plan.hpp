// Which layers are split over the ranks of tensor-parallel axes, and how: a list of path patterns. A value; any
// thread.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/mesh/placement.hpp"
#include "weft/nn/module.hpp"

namespace weft {

/// How one module takes part: a row of data, and the library has no other knowledge of it. Four are built in:
///
///   Style            split    parameters of a Linear             boundaries
///   enter            –        –                                  before: x is whole; dx of the column layers
///                                                                inside is summed here, once for all of them
///   column           column   weight Shard(0), bias Shard(0)     before: as enter, unless a module around it
///                                                                has that already
///   column_gathered  column   as column                          before: as column; after: y is gathered
///   row              row      weight Shard(1), bias Replicate    after: y is summed; then the bias is added,
///                                                                once
///
/// Others are made the same way: Style{"sequence", {}, Style::Change{Replicate{}, Shard{1}}, {}, …}.
struct Style {
  /// A RedistributeBoundary along the axes.
  struct Change {
    Placement from, to;
    friend bool operator==(const Change&, const Change&) = default;
  };
  std::string_view name;
  std::optional<Split> split{};  ///< how the module's ShardRule is asked; nothing: its parameters stay whole
  std::optional<Change> before{};     ///< on each floating-point input
  std::optional<Change> after{};      ///< on each floating-point output
  bool before_is_for_inside = false;  ///< `before` serves the column layers inside: there must be one
  bool shares_before = false;         ///< needs no `before` of its own where such a module is around it

  friend bool operator==(const Style&, const Style&) = default;
  static const Style enter, column, column_gathered, row;
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

/// Patterns are dotted paths in which `*` stands for exactly one step, whatever it is, or for any part of
/// one: "layers.*.attention", "layers.*.mlp.*_proj".
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

 private:
  std::vector<Entry> entries_;
};

/// Whether `path` is one of those that `pattern` describes.
bool matches(std::string_view pattern, std::string_view path) noexcept;

}  // namespace weft
