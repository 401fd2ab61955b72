// The history of parameters' values, as digests that are equal on all ranks with equal histories:
// initialise() with one seed, or a step of an optimizer with one set of options and one learning rate.
// Reducers, sharded models and trainers compare these digests. Each Compute keeps the digests of its
// parameters. Only the rank (thread) that owns the model uses them. Private to nn and the layers above.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "base/hash.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// An attachment of a Compute.
struct Histories {
  explicit Histories(Compute&) {}
  struct History {
    std::uint64_t digest = 0;   ///< 0: not known
    std::uint64_t version = 0;  ///< of the master at that time
  };
  std::unordered_map<std::uint64_t, History> of;  ///< by Parameter::number(), which no other parameter gets
};

inline void set_history(const Parameter& p, std::uint64_t digest) {
  p.compute().attached<Histories>().of[p.number()] = {digest, p.master_version()};
}

/// For materialised parameters. Parameters for which `counts` returns false are ignored. Returns 0 if the
/// history of one of them is unknown, or if none is left.
template <class Parameters, class Counts>
std::uint64_t history_of(const Parameters& parameters, const Counts& counts, bool unwritten = false) {
  Fnv1a hash;
  bool any = false;
  for (const Parameter* p : parameters) {
    if (!counts(*p)) continue;
    const auto& known = p->compute().template attached<Histories>().of;
    const auto at = known.find(p->number());
    if (at == known.end() || at->second.digest == 0) return 0;
    if (unwritten && at->second.version != p->master_version()) return 0;
    hash.add_at_once(at->second.digest);
    any = true;
  }
  return any ? hash.value | 1 : 0;
}
/// Like the function above, for first values. It also returns 0 if one of the parameters has been written
/// since.
template <class Parameters>
std::uint64_t history_of_first_values(const Parameters& parameters) {
  return history_of(
      parameters, [](const Parameter&) { return true; }, true);
}
inline bool is_trained(const Parameter& p) { return p.trainable(); }

}  // namespace weft
