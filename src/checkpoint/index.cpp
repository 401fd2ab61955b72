#include "checkpoint/index.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>

#include "weft/base/error.hpp"

namespace weft {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "weft checkpoint";
constexpr int kVersion = 1;

std::vector<std::int64_t> list(const Dims& dims) { return {dims.begin(), dims.end()}; }

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("checkpoint: {}: {}", path.string(), what));
}

Dims dims_from(const json& values) {
  return Dims(std::span<const std::int64_t>(values.get<std::vector<std::int64_t>>()));
}

// Each part lies inside the whole and together they have as many elements: with parts that do not overlap,
// which is what `save` writes, that is the whole.
void check_parts(const std::filesystem::path& path, const std::string& name, const CheckpointEntry& entry) {
  std::int64_t count = 0;
  for (const CheckpointPart& part : entry.parts) {
    bool inside = part.box.offset.rank() == entry.shape.rank() && part.box.shape.rank() == entry.shape.rank();
    for (int d = 0; inside && d < entry.shape.rank(); ++d)
      inside = part.box.offset[d] >= 0 && part.box.shape[d] >= 0 && part.box.offset[d] <= entry.shape[d] &&
               part.box.shape[d] <= entry.shape[d] - part.box.offset[d];
    if (!inside)
      refuse(path,
             fmt::format("the part of \"{}\" in {} is {} at {}, outside of the whole {}", name, part.file,
                         to_string(part.box.shape), to_string(part.box.offset), to_string(entry.shape)));
    count += part.box.shape.count();
  }
  if (count != entry.shape.count())
    refuse(path, fmt::format("the {} parts of \"{}\" have {} elements; expected {} (shape {})",
                             entry.parts.size(), name, count, entry.shape.count(), to_string(entry.shape)));
}

}  // namespace

CheckpointBox intersection(const CheckpointBox& a, const CheckpointBox& b) {
  CheckpointBox both = a;
  for (int d = 0; d < a.shape.rank(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.shape[d], b.offset[d] + b.shape[d]);
    both.offset[d] = begin;
    both.shape[d] = std::max<std::int64_t>(0, end - begin);
  }
  return both;
}

std::string to_json(const CheckpointIndex& index) {
  json tensors = json::object();
  for (const auto& [name, entry] : index.tensors) {
    json parts = json::array();
    for (const CheckpointPart& part : entry.parts)
      parts.push_back(
          {{"file", part.file}, {"offset", list(part.box.offset)}, {"shape", list(part.box.shape)}});
    tensors[name] = {{"dtype", weft::name(entry.dtype)},
                     {"shape", list(entry.shape)},
                     {"layout", entry.layout},
                     {"parts", std::move(parts)}};
  }
  const json whole = {{"format", kFormat},  {"version", kVersion},  {"step", index.step},
                      {"mesh", index.mesh}, {"extra", index.extra}, {"tensors", std::move(tensors)}};
  try {
    return whole.dump(1) + "\n";
  } catch (const json::type_error&) {
    throw Error(ErrorCode::bad_argument, "save_checkpoint: a string of `extra` or a path is not UTF-8");
  }
}

CheckpointIndex index_from_json(const std::filesystem::path& path, const std::string& text) {
  CheckpointIndex index;
  try {
    const json whole = json::parse(text);
    if (!whole.is_object() || whole.value("format", "") != kFormat)
      refuse(path, fmt::format("\"format\" is not \"{}\"", kFormat));
    if (whole.at("version") != kVersion)
      refuse(path, fmt::format("has version {}; this build reads {}", whole.at("version").dump(), kVersion));
    index.step = whole.at("step").get<std::int64_t>();
    index.mesh = whole.at("mesh").get<std::string>();
    index.extra = whole.at("extra").get<CheckpointExtra>();
    for (const auto& [name, entry] : whole.at("tensors").items()) {
      CheckpointEntry& tensor = index.tensors[name];
      tensor.dtype = dtype_from_name(entry.at("dtype").get<std::string>());
      tensor.shape = dims_from(entry.at("shape"));
      tensor.layout = entry.at("layout").get<std::vector<std::string>>();
      for (const json& part : entry.at("parts"))
        tensor.parts.push_back({part.at("file").get<std::string>(),
                                {dims_from(part.at("offset")), dims_from(part.at("shape"))}});
      check_parts(path, name, tensor);
    }
  } catch (const json::exception& e) {
    refuse(path, fmt::format("is no index: {}", e.what()));
  }
  return index;
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
  // State that lies as its parameter does has the parameter's whole; the rest (the count of steps) is the
  // same on all ranks.
  optimizer->visit_state([&](const std::string& path, std::string_view state, const Tensor& tensor) {
    const auto found = by_path.find(path);
    if (found == by_path.end())
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}: the optimizer has state of {}, which is not among the parameters", what, path));
    const Parameter& p = *found->second;
    const bool as_parameter = tensor.layout() != nullptr && tensor.layout() == p.layout();
    tensors.push_back({fmt::format("optimizer.{}.{}", state, path), tensor,
                       as_parameter ? p.global_shape() : tensor.shape(),
                       as_parameter ? p.layout() : nullptr});
  });
  return tensors;
}

CheckpointBox box_of(const CheckpointTensor& tensor, int rank) {
  if (tensor.layout != nullptr) return {tensor.layout->local_offsets(rank), tensor.layout->local_shape(rank)};
  CheckpointBox box{tensor.global, tensor.global};
  for (int d = 0; d < box.offset.rank(); ++d) box.offset[d] = 0;
  return box;
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
    for (int rank = 0; rank < ranks; ++rank) {
      const CheckpointBox box = box_of(tensor, rank);
      const bool known = std::any_of(entry.parts.begin(), entry.parts.end(),
                                     [&](const CheckpointPart& part) { return part.box == box; });
      if (!known && box.shape.count() > 0) entry.parts.push_back({part_file(rank), box});
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
  failure.text = fmt::format("{}: {} {} failed, and {} why; {}", what, ranks.size() == 1 ? "rank" : "ranks",
                             fmt::join(ranks, ", "), ranks.size() == 1 ? "says" : "say", consequence);
  failure.ranks = std::move(ranks);
  throw Error(std::move(failure));
}

}  // namespace weft
