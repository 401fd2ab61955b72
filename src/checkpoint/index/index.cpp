#include "checkpoint/index/index.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "mesh/same_list.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

bool is_same_memory(const NamedView& a, const NamedView& b) {
  return a.data.data == b.data.data && a.data.dtype == b.data.dtype && a.data.shape == b.data.shape &&
         a.layout == b.layout;
}

// Orders the tensors by their place in memory, without the empty ones.
std::vector<const NamedView*> by_place(std::span<const NamedView> tensors) {
  std::vector<const NamedView*> order;
  for (const NamedView& t : tensors)
    if (t.data.count() > 0) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(),
                   [](const NamedView* a, const NamedView* b) { return a->data.data < b->data.data; });
  return order;
}

// The views must have no memory_fault(). If two values were read into shared memory, only the last tensor's
// would remain.
void expect_disjoint(std::string_view what, std::span<const NamedView> tensors) {
  const NamedView* reaches_farthest = nullptr;
  for (const NamedView* t : by_place(tensors)) {
    if (reaches_farthest != nullptr && overlap(reaches_farthest->data, t->data) &&
        !is_same_memory(*reaches_farthest, *t))
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}: the memory of \"{}\" overlaps that of \"{}\"; expected the same place, dtype, "
                      "shape and layout (tied tensors), or disjoint memory",
                      what, t->name, reaches_farthest->name));
    if (reaches_farthest == nullptr ||
        t->data.data + t->data.bytes() > reaches_farthest->data.data + reaches_farthest->data.bytes())
      reaches_farthest = t;
  }
}

}  // namespace

std::vector<int> aliases_of(std::span<const NamedView> tensors) {
  std::vector<int> aliases(tensors.size(), -1);
  const NamedView* first = nullptr;
  for (const NamedView* t : by_place(tensors)) {
    if (first != nullptr && is_same_memory(*first, *t))
      aliases[static_cast<std::size_t>(t - tensors.data())] = static_cast<int>(first - tensors.data());
    else
      first = t;
  }
  return aliases;
}

void check_tensors(std::string_view what, const DeviceMesh& mesh, std::span<const NamedView> tensors) {
  if (mesh && !mesh.is_root())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: mesh is {}, a part of {}; expected the whole", what, to_string(mesh.shape()),
                            to_string(mesh.root().shape())));
  std::set<std::string_view> names;
  for (const NamedView& t : tensors) {
    const auto wrong = [&](ErrorCode code, const std::string& text) {
      throw Error(code, fmt::format("{}: \"{}\" {}", what, t.name, text));
    };
    if (!names.insert(t.name).second) wrong(ErrorCode::bad_argument, "is given twice");
    if (t.data.device.kind != DeviceKind::cpu) wrong(ErrorCode::bad_argument, is_on(t.data.device, {}));
    if (const std::string fault = memory_fault(t.data); !fault.empty()) wrong(ErrorCode::bad_argument, fault);
    if (t.layout == nullptr) {
      if (mesh && mesh.size() > 1)
        wrong(
            ErrorCode::layout,
            fmt::format("is a plain tensor; on {} it needs a layout, which says what part of the whole it is",
                        to_string(mesh.shape())));
      continue;
    }
    if (t.layout->partial())
      wrong(ErrorCode::layout, fmt::format("is {}; it must be reduced first", to_string(*t.layout)));
    if (mesh ? !(t.layout->mesh() == mesh.root()) : t.layout->mesh_shape().size() > 1)
      wrong(ErrorCode::layout,
            fmt::format("is laid out over {}, but the mesh given is {}", to_string(t.layout->mesh_shape()),
                        mesh ? "another, " + to_string(mesh.root().shape()) : "empty"));
    if (!(t.data.shape == t.layout->local_shape()))
      wrong(ErrorCode::layout, fmt::format("is {}; {} is {} on this rank", to_string(t.data.shape),
                                           to_string(*t.layout), to_string(t.layout->local_shape())));
  }
  expect_disjoint(what, tensors);
}

std::vector<std::byte> take_box(const NamedView& tensor, const HeldBox& held) {
  const Shape& shape = held.box.shape;
  std::vector<std::byte> part(static_cast<std::size_t>(shape.count() * size_bytes(tensor.data.dtype)));
  copy_elements(narrow(tensor.data, held.at, shape),
                {part.data(), tensor.data.dtype, {}, shape, row_major(shape)});
  return part;
}

std::string part_file(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::vector<OwnedPart> parts_of(const NamedView& tensor, int ranks) {
  std::vector<OwnedPart> parts;
  std::set<std::vector<std::int64_t>> known;  // offsets, then sizes
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<HeldBox> boxes = boxes_of(tensor, rank);
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      const Box& box = boxes[i].box;
      std::vector<std::int64_t> numbers(box.offset.begin(), box.offset.end());
      numbers.insert(numbers.end(), box.shape.begin(), box.shape.end());
      if (box.shape.count() > 0 && known.insert(std::move(numbers)).second)
        parts.push_back({rank, box, i, boxes.size()});
    }
    if (tensor.layout == nullptr) break;  // every rank holds the whole tensor
  }
  return parts;
}

std::vector<std::uint64_t> expect_same_tensors(std::string_view what, const DeviceMesh& mesh,
                                               std::span<const NamedView> tensors,
                                               std::span<const std::uint64_t> own) {
  return gather_with_list(what, mesh, digest_of_list(tensors), own,
                          [&] { return entries_of("tensor", tensors); });
}

CheckpointIndex make_index(std::span<const NamedView> tensors, int ranks, std::span<const int> aliases) {
  CheckpointIndex index;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const NamedView& tensor = tensors[i];
    const NamedView& stored =
        aliases.empty() || aliases[i] < 0 ? tensor : tensors[static_cast<std::size_t>(aliases[i])];
    CheckpointEntry& entry = index.tensors[std::string(tensor.name)];
    entry.dtype = tensor.data.dtype;
    entry.shape = global_shape(tensor);
    if (tensor.layout != nullptr)
      for (const Placement& placement : tensor.layout->placements)
        entry.layout.push_back(to_string(placement));
    for (const OwnedPart& part : parts_of(tensor, ranks))
      entry.parts.push_back({part_file(part.rank), part.box,
                             part.of == 1 ? std::string() : fmt::format("{}[{}]", stored.name, part.number)});
    if (&stored != &tensor)
      for (CheckpointPart& part : entry.parts)
        if (part.name.empty()) part.name = stored.name;
    for (const CheckpointPart& part : entry.parts) index.files[part.file] = {};
  }
  return index;
}

}  // namespace weft
