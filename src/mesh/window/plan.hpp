// The plan of a window: which rank sends which elements to which rank. Window's constructor (window.cpp)
// makes it, exchange.cpp carries it out.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/dependents.hpp"
#include "mesh/window/segments.hpp"
#include "weft/mesh/window.hpp"

namespace weft {
namespace windows {
class Exchange;
}  // namespace windows

struct Window::Plan {
  Plan();
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// A dimension of which a window is requested. A dimension with a pole is before its longitude.
  struct Dim {
    int dim;
    std::int64_t part_size, window_size;  // this rank's
    std::vector<windows::Run> runs;       // this rank's window
  };
  /// The elements that one rank's window has of one rank's part, in each of `dims`.
  struct Overlap {
    int rank;  // the other one, in the group of `axes`
    struct OfDim {
      std::vector<windows::Segment> plain, turned;  // turned: where a dimension before it is beyond a pole
      bool longitude = false;                       // it has turned ones
    };
    std::vector<OfDim> dims;
  };

  const char* name = "window";  ///< what the program called: errors begin with it
  Shape global;
  std::vector<Dim> dims;
  Dims own_begin;                 // of a halo: where this rank's part lies in its window, in each dimension
  DeviceMesh mesh;                // the root
  DeviceMesh axes;                // the axes that cut one of the dims; empty: none
  int me = 0;                     // in their group
  std::vector<Overlap> to, from;  // by rank: windows of others on this part, this window on parts of others
  Overlap self;

  // For the comparison of ranks that must have given the same arguments: the arguments of this rank, and
  // whether they were compared (agree.hpp).
  std::vector<PartitionDim> held;
  std::vector<WindowDim> wanted;
  bool agreed = false;
  ProcessGroup* group = nullptr;  // of `axes`, from the first start on
  DeviceRuntime* host = nullptr;  // from the first start on

  /// The steps of exchanges of fields of certain shapes and strides, worked out (program.hpp).
  struct Program;
  mutable std::vector<std::unique_ptr<const Program>> programs;
  /// Counts checks of fields (`judged.hpp`): the id of the last one.
  mutable std::uint64_t judgements = 0;
  /// Ids of fields that may be in flight at a time: those found last (in_flight.hpp).
  mutable std::array<std::pair<std::uint64_t, std::uint64_t>, 16> apart{};
  mutable std::size_t next_apart = 0;
  /// Exchanges begun, and neither finished nor failed, in no order.
  mutable std::vector<const windows::Exchange*> in_flight;
  /// Exchanges that began with this window and went together with others (exchange.cpp).
  struct Joined;
  mutable std::vector<std::unique_ptr<Joined>> joined;
  // Set at the first start. Exchanges in flight need the Context, and may exist longer than the group.
  std::optional<Dependents::Entry> listed;
};

namespace windows {

/// Calls see(segments, one of each of plan's dims) for each box of an overlap, in a fixed order. Both ranks
/// see the same boxes.
template <class See>
void each_box(const Window::Plan::Overlap& overlap, const See& see) {
  const std::size_t n = overlap.dims.size();
  std::vector<Segment> box(n);
  const auto descend = [&](const auto& again, std::size_t d, bool turned) -> void {
    if (d == n) return see(static_cast<const std::vector<Segment>&>(box));
    const auto& of = overlap.dims[d];
    for (const Segment& s : turned&& of.longitude ? of.turned : of.plain) {
      box[d] = s;
      again(again, d + 1, turned || s.turned);
    }
  };
  descend(descend, 0, false);
}

}  // namespace windows
}  // namespace weft
