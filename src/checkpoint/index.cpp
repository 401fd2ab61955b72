#include "checkpoint/index.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <set>

#include "mesh/slab.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {

Box intersection(const Box& a, const Box& b) {
  Box both = a;
  for (int d = 0; d < a.shape.rank(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    both.offset[d] = begin;
    both.shape[d] = std::max<std::int64_t>(0, end - begin);
  }
  return both;
}

std::vector<CheckpointTensor> checkpoint_tensors(std::string_view what, const DeviceMesh& mesh,
                                                 std::span<Parameter* const> parameters,
                                                 const Optimizer* optimizer) {
  const int ranks = mesh ? mesh.size() : 1;
  std::vector<CheckpointTensor> tensors;
  std::map<std::string, const Parameter*> by_path;
  for (const Parameter* p : parameters) {
    if (p->layout() == nullptr && ranks > 1)
      throw Error(ErrorCode::layout, fmt::format("{}: {} is a plain tensor; on {} it needs a layout", what,
                                                 p->path(), to_string(mesh.shape())));
    if (p->layout() != nullptr && p->layout()->partial())
      throw Error(ErrorCode::layout, fmt::format("{}: {} is {}; a partial value cannot be saved", what,
                                                 p->path(), to_string(*p->layout())));
    if (!by_path.emplace(p->path(), p).second)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: two parameters have the path {}", what, p->path()));
    tensors.push_back({fmt::format("param.{}", p->path()), p->value(), p->global_shape(), p->layout()});
  }
  if (optimizer == nullptr) return tensors;
  // State with a layout has the whole that its layout says, whatever its parameter has by now; the rest (the count
  // of steps) is the same on all ranks.
  optimizer->visit_state([&](const std::string& path, std::string_view state, const Tensor& tensor) {
    if (by_path.find(path) == by_path.end())
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}: the optimizer has state of {}, which is not among the parameters", what, path));
    tensors.push_back({fmt::format("optimizer.{}.{}", state, path), tensor,
                       tensor.layout() != nullptr ? tensor.layout()->global : tensor.shape(),
                       tensor.layout()});
  });
  return tensors;
}

std::vector<HeldBox> boxes_of(const CheckpointTensor& tensor, int rank) {
  Dims at = tensor.global;
  for (int d = 0; d < at.rank(); ++d) at[d] = 0;
  if (tensor.layout == nullptr) return {{{at, tensor.global}, at}};
  std::vector<HeldBox> boxes;
  for (const Box& box : tensor.layout->parts(rank)) {
    boxes.push_back({box, at});
    if (!tensor.layout->segments.sizes.empty()) {
      const int dim = tensor.layout->segments.dim;
      at[dim] += box.shape[dim];
    }
  }
  return boxes;
}

Tensor take_box(const CheckpointTensor& tensor, const HeldBox& held) {
  if (tensor.layout == nullptr || tensor.layout->segments.sizes.empty()) return tensor.local;
  const int dim = tensor.layout->segments.dim;
  const std::int64_t length = held.box.shape[dim];
  Tensor part(tensor.layout->mesh().context(), held.box.shape, tensor.local.dtype());
  copy_slab(fold(held.box.shape, dim, part.dtype()), length,
            {tensor.local.data(), tensor.local.size(dim), held.at[dim]}, {part.data(), length, 0});
  return part;
}

std::string part_file(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

CheckpointIndex make_index(std::span<const CheckpointTensor> tensors, int ranks) {
  CheckpointIndex index;
  for (const CheckpointTensor& tensor : tensors) {
    CheckpointEntry& entry = index.tensors[tensor.name];
    entry.dtype = tensor.local.dtype();
    entry.shape = tensor.global;
    if (tensor.layout != nullptr)
      for (const Placement& placement : tensor.layout->placements)
        entry.layout.push_back(to_string(placement));
    // Distinct parts, each by the first rank that holds it. Distinct shards never overlap.
    std::set<std::vector<std::int64_t>> known;  // offsets, then sizes
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<HeldBox> boxes = boxes_of(tensor, rank);
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const Box& box = boxes[i].box;
        std::vector<std::int64_t> numbers(box.offset.begin(), box.offset.end());
        numbers.insert(numbers.end(), box.shape.begin(), box.shape.end());
        if (box.shape.count() > 0 && known.insert(std::move(numbers)).second)
          entry.parts.push_back({part_file(rank), box,
                                 boxes.size() == 1 ? std::string() : fmt::format("{}[{}]", tensor.name, i)});
      }
      if (tensor.layout == nullptr) break;  // every rank holds the whole
    }
  }
  return index;
}

void agree(const DeviceMesh& mesh, std::string_view what, std::string_view consequence,
           std::exception_ptr mine) {
  if (!mesh || mesh.size() == 1) {
    if (mine) std::rethrow_exception(mine);
    return;
  }
  const std::int32_t failed = mine ? 1 : 0;
  std::vector<std::int32_t> all(static_cast<std::size_t>(mesh.size()));
  mesh.group().all_gather(view(&failed, 1), view(all)).wait();
  if (mine) std::rethrow_exception(mine);
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != 0) ranks.push_back(static_cast<int>(rank));
  if (ranks.empty()) return;
  Failure failure;
  failure.code = ErrorCode::system;
  failure.text = fmt::format("{}: {} failed, and {} why; {}", what, name_ranks(ranks),
                             ranks.size() == 1 ? "says" : "say", consequence);
  failure.ranks = std::move(ranks);
  throw Error(std::move(failure));
}

}  // namespace weft
