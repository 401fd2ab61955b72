// Masters that hold other values for some time: averages, or the values to evaluate. Optimizers and averages
// mark them. So no code trains, averages or exchanges values in the place of the masters. Only the rank
// (thread) that owns the model uses it. Private to nn and the layers above.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>
#include <unordered_map>

#include "weft/base/error.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// An attachment of a Compute.
struct SwappedMasters {
  explicit SwappedMasters(Compute&) {}
  std::unordered_map<std::uint64_t, std::string_view> of;  ///< by Parameter::number(): the values, in words
};

inline void mark_swapped(const Parameter& p, std::string_view values) {
  p.compute().attached<SwappedMasters>().of.emplace(p.number(), values);
}
inline void mark_trained(const Parameter& p) { p.compute().attached<SwappedMasters>().of.erase(p.number()); }

/// Whether other values are in the place of a master.
template <class Parameters>
bool any_swapped(const Parameters& parameters) {
  for (const Parameter* p : parameters)
    if (p->compute().template attached<SwappedMasters>().of.contains(p->number())) return true;
  return false;
}

/// Throws bad_argument if other values are in the place of a master: `ema: update(): "w" holds the values for
/// evaluation; swap_out() first`.
template <class Parameters>
void expect_trained_masters(std::string_view what, const Parameters& parameters) {
  for (const Parameter* p : parameters) {
    const auto& of = p->compute().template attached<SwappedMasters>().of;
    if (of.empty()) continue;
    if (const auto at = of.find(p->number()); at != of.end())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: \"{}\" holds the {}; swap_out() first", what, p->path(), at->second));
  }
}

}  // namespace weft
