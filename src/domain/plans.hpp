// The plan of a layer for maps of one layout: its windows and parts. It is made once and used in every pass.
// Only files of domain include it.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "weft/mesh/layout.hpp"

namespace weft::domain {

/// The plans of a layer, by the layout of its input (or by another Key). It keeps the kMost plans that were
/// used last. A layer, with its plans, belongs to the thread of one rank.
template <class Plan, class Key = LayoutRef>
class Plans {
 public:
  static constexpr std::size_t kMost = 8;

  /// Calls make() if there is no plan for this key. Every rank has seen equal layouts, so either all ranks
  /// make a plan or none does.
  template <class Make>
  std::shared_ptr<const Plan> of(const Key& maps, const Make& make) const {
    const auto found =
        std::find_if(plans_.begin(), plans_.end(), [&](const auto& known) { return known.first == maps; });
    if (found != plans_.end()) {
      std::rotate(plans_.begin(), found, found + 1);
      return plans_.front().second;
    }
    plans_.insert(plans_.begin(), {maps, std::make_shared<const Plan>(make())});
    if (plans_.size() > kMost) plans_.pop_back();
    return plans_.front().second;
  }

 private:
  mutable std::vector<std::pair<Key, std::shared_ptr<const Plan>>> plans_;  // the one used last first
};

}  // namespace weft::domain
