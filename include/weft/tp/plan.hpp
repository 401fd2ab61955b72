// Which layers are split over the ranks of a tensor-parallel axis, and how: a list of path patterns. A value;
// any thread.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

/// How one module takes part.
///
///   style            module   parameters                         boundaries
///   enter            any      –                                  before: x is whole; dx of the column layers
///                                                                inside is summed here, once for all of them
///   column           Linear   weight Shard(0), bias Shard(0)     before: as enter, unless a module around it
///                                                                has that already
///   column_gathered  Linear   as column                          before: as column; after: y is gathered
///   row              Linear   weight Shard(1), bias Replicate    after: y is summed; then the bias is added,
///                                                                once
enum class Style : unsigned char { enter, column, column_gathered, row };

/// "enter", "column", "column_gathered", "row"
std::string_view name(Style style) noexcept;

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
