#include "weft/mesh/build_mesh.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::array kDataAxes = {"dp", "dp_replicate", "dp_shard"};

[[noreturn]] void bad(const std::string& text) { throw Error(ErrorCode::bad_argument, text); }

void check(const Parallelism& p) {
  if (p.data != "fsdp2" && p.data != "ddp" && p.data != "none")
    bad(fmt::format("parallelism.data is \"{}\"; expected \"fsdp2\", \"ddp\" or \"none\"", p.data));
  if (p.tensor < 1) bad(fmt::format("parallelism.tensor is {}; expected 1 or more", p.tensor));
  if (p.domain < 1) bad(fmt::format("parallelism.domain is {}; expected 1 or more", p.domain));
}

/// How many of the `ranks` ranks data parallelism has.
int data_ranks(const Parallelism& p, int ranks) {
  const std::int64_t others = std::int64_t{p.tensor} * p.domain;
  if (ranks % others != 0)
    bad(fmt::format("mesh: {} ranks do not divide into tensor={} x domain={}", ranks, p.tensor, p.domain));
  const int data = ranks / static_cast<int>(others);
  if (p.data == "none" && data > 1)
    bad(
        fmt::format("parallelism.data is \"none\", but of {} ranks tensor={} x domain={} leave dp={}; "
                    "expected \"fsdp2\" or "
                    "\"ddp\", or {} rank{}",
                    ranks, p.tensor, p.domain, data, others, others == 1 ? "" : "s"));
  return data;
}

void check_device(const ProcessGroup& group, Device device) {
  const Traits& traits = group.traits();
  const Device moved = traits.device ? Device{DeviceKind::cuda, traits.device_index} : Device{};
  if (device != moved)
    bad(fmt::format("device is {}, but the group's transport, {}, moves memory of {}", to_string(device),
                    group.backend(), to_string(moved)));
}

}  // namespace

ParallelMesh build_device_mesh(ProcessGroup& group, const Parallelism& parallelism, Device device) {
  check(parallelism);
  const int data = data_ranks(parallelism, group.size());
  check_device(group, device);
  ParallelMesh built;
  if (group.size() == 1) return built;
  built.mesh = DeviceMesh(group, {{"dp", data}, {"tp", parallelism.tensor}, {"domain", parallelism.domain}});
  for (const MeshAxis& axis : built.mesh.shape().axes()) {
    if (axis.size > 1) built.axes.emplace(axis.name, built.mesh[axis.name]);
  }
  return built;
}

std::optional<DeviceMesh> get_tp_mesh(const DeviceMesh& mesh) {
  if (!mesh || !mesh.has("tp") || mesh.size("tp") == 1) return std::nullopt;
  return mesh["tp"];
}

bool has_dp_mesh(const DeviceMesh& mesh) {
  return mesh && std::any_of(kDataAxes.begin(), kDataAxes.end(),
                             [&](const char* axis) { return mesh.has(axis) && mesh.size(axis) > 1; });
}

DeviceMesh get_dp_mesh(const DeviceMesh& mesh) {
  if (!mesh) bad("get_dp_mesh: mesh is an empty DeviceMesh, made by default or moved from");
  if (mesh.has("dp_replicate") && mesh.has("dp_shard")) return mesh[{"dp_replicate", "dp_shard"}];
  for (const char* axis : kDataAxes) {
    if (mesh.has(axis)) return mesh[axis];
  }
  bad(
      fmt::format("get_dp_mesh: {} has none of the axes \"dp\", \"dp_replicate\" and \"dp_shard\"; call "
                  "has_dp_mesh() first",
                  to_string(mesh.shape())));
}

}  // namespace weft
