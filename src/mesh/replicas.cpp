#include "weft/mesh/replicas.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "mesh/axis_ranks.hpp"
#include "mesh/replica_bits.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

[[noreturn]] void wrong(ErrorCode code, const NamedView& t, const std::string& text) {
  throw Error(code, fmt::format("check_replicas: \"{}\" {}", t.name, text));
}

void expect_readable(const NamedView& t, const Compute* compute) {
  if (const std::string fault = device_fault(t.data.device, compute); !fault.empty())
    wrong(ErrorCode::bad_argument, t, fault);
  if (const std::string fault = memory_fault(t.data); !fault.empty())
    wrong(ErrorCode::bad_argument, t, fault);
  if (t.layout != nullptr && !(t.data.shape == t.layout->local_shape()))
    wrong(ErrorCode::layout, t,
          fmt::format("is {}; {} is {} on this rank", to_string(t.data.shape), to_string(*t.layout),
                      to_string(t.layout->local_shape())));
}

// Called after the ranks have compared their lists: either all ranks throw or none does.
void expect_layouts(std::span<const NamedView> tensors, const DeviceMesh& axes) {
  for (const NamedView& t : tensors) {
    if (t.layout == nullptr && axes.size() > 1)
      wrong(ErrorCode::layout, t,
            fmt::format(
                "is a plain tensor; on {}={} it needs a layout, which says what part of the whole it is",
                axes.name(), axes.size()));
    if (t.layout != nullptr && !is_over(*t.layout, axes))
      wrong(ErrorCode::layout, t,
            fmt::format("is laid out over {}, another mesh than that of {}",
                        to_string(t.layout->mesh_shape()), axes.name()));
  }
}

}  // namespace

void check_replicas(std::span<const NamedView> tensors, const DeviceMesh& axes, Compute* compute) {
  given_mesh("check_replicas", axes);
  const std::optional<Error> fault = fault_of([&] {
    for (const NamedView& t : tensors) expect_readable(t, compute);
  });
  ReplicaBits bits(axes, compute);
  std::vector<std::size_t> compared;  // of the tensors, in the order of `bits`
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<int> along = replicated_along(tensors[i].layout, axes);
    if (along.empty()) continue;
    bits.add(tensors[i].data, along);
    compared.push_back(i);
  }
  bits.compare(
      "check_replicas", digest_of_list(tensors), {}, [&] { return entries_of("tensor", tensors); }, fault);
  expect_layouts(tensors, axes);
  bits.expect_same("check_replicas",
                   [&](std::size_t i) { return std::string_view(tensors[compared[i]].name); });
}

}  // namespace weft
