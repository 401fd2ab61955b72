#include "weft/mesh/replicas.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <string>
#include <vector>

#include "mesh/axis_ranks.hpp"
#include "mesh/replicas/replica_bits.hpp"
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

// After the ranks have compared their lists: all throw, or none.
void expect_layouts(std::span<const NamedView> tensors, const DeviceMesh& axes) {
  for (const NamedView& t : tensors) {
    if (t.layout == nullptr && axes.size() > 1)
      wrong(ErrorCode::layout, t,
            fmt::format("is a plain tensor; on {}={} it needs a layout (as_layout states what it is)",
                        axes.name(), axes.size()));
    if (t.layout != nullptr && !is_over(*t.layout, axes))
      wrong(ErrorCode::layout, t,
            fmt::format("is laid out over {}, another mesh than that of {}",
                        to_string(t.layout->mesh_shape()), axes.name()));
  }
}

[[noreturn]] void throw_drift(const ReplicaBits& bits, std::span<const NamedView> tensors,
                              const std::vector<std::size_t>& compared, const DeviceMesh& axes) {
  constexpr std::size_t kNamed = 3;  // of the others
  std::size_t first = 0;
  while (bits.same(first)) ++first;
  const std::vector<int> ranks = bits.drifted(first);
  const NamedView& t = tensors[compared[first]];
  std::vector<std::string> along, others;
  for (const int a : replicated_along(t.layout, axes)) along.push_back(axes.root().shape().name(a));
  std::size_t more = 0;
  for (std::size_t i = first + 1; i < compared.size(); ++i)
    if (!bits.same(i) && ++more <= kNamed) others.push_back(fmt::format("\"{}\"", tensors[compared[i]].name));
  std::string also;
  if (more > 0)
    also = fmt::format("; replicas of {}{} differ, too", fmt::join(others, ", "),
                       more > kNamed ? fmt::format(" and {} more", more - kNamed) : "");
  const DeviceMesh mesh = axes.root().submesh(along);
  throw Error(
      Failure{ErrorCode::mismatch,
              fmt::format("check_replicas: \"{}\" is Replicate on {}={}, but on {} it has other bits{}",
                          t.name, mesh.name(), mesh.size(), name_axis_ranks(axes, ranks), also),
              Op::none, kNoCall, ranks});
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
  if (!bits.same_everywhere()) throw_drift(bits, tensors, compared, axes);
}

}  // namespace weft
