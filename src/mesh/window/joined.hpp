// The exchange of several windows that start together. The plan's thread uses it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "mesh/window/flight.hpp"
#include "weft/group/persistent_exchange.hpp"

namespace weft {

/// The last ones are kept with the plan of the first window.
struct Window::Plan::Joined {
  std::vector<std::uint64_t> programs{};  ///< their ids
  PersistentExchange exchange{};          ///< empty if this rank is alone
  std::vector<ExchangeField> memory{};    ///< of the last start

  /// Whether these fields, of all windows, are known not to share memory.
  bool is_apart(std::span<const windows::Known> known) const {
    return std::ranges::equal(apart_, known, {}, {}, [](const windows::Known& k) { return k.fields->id(); });
  }
  void set_apart(std::span<const windows::Known> known) {
    apart_.clear();
    memory.clear();
    for (const windows::Known& k : known) {
      apart_.push_back(k.fields->id());
      memory.insert(memory.end(), k.fields->memory().begin(), k.fields->memory().end());
    }
  }

 private:
  std::vector<std::uint64_t> apart_{};
};

}  // namespace weft
