#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <vector>

#include "rank/agreement.hpp"
#include "weft/base/clock.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::check {
namespace {

std::string other_than(const char* what, double got, double expected) {
  if (std::abs(got - expected) <= 1e-6 * std::abs(expected)) return {};
  return fmt::format("{} is {}; expected {}", what, got, expected);
}

std::string norm(const Step& s, ProcessGroup& group) {
  const int n = group.size();
  const DeviceMesh mesh(group, {{"y", n}});
  const LayoutRef layout = make_layout(mesh, {Shard{0}}, {4 * n});
  std::vector<float> part(4, 1);
  const Gradient gradient = make_gradient("w", part.data(), layout);
  const double was = clip_grad_norm({&gradient, 1}, s.differs ? 0.25 : 0.5);
  if (const std::string wrong = other_than("the squared norm", was * was, 4 * n); !wrong.empty())
    return wrong;
  return other_than("a clipped element", part[0], 0.5 / was);
}

// A folder for the ranks of a group, named by the first rank, which also removes it.
class Folder {
 public:
  explicit Folder(ProcessGroup& group) : group_(group) {
    std::int64_t token = static_cast<std::int64_t>(Clock::now().time_since_epoch().count());
    group.broadcast(view(&token, 1), 0).wait();
    path_ = std::filesystem::temp_directory_path() / fmt::format("weft-check-{}", token);
  }
  ~Folder() {
    std::error_code ignored;
    if (group_.rank() == 0) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::filesystem::path sub(const char* name) const { return path_ / name; }

 private:
  ProcessGroup& group_;
  std::filesystem::path path_;
};

// A tensor of two elements per rank, sharded over the ranks.
struct Cut {
  explicit Cut(ProcessGroup& group, float of)
      : mesh(group, {{"y", group.size()}}),
        layout(make_layout(mesh, {Shard{0}}, {2 * group.size()})),
        part(2, of + static_cast<float>(group.rank())) {}
  NamedView read() const { return {"x", view(part.data(), {2}), layout}; }
  MutableNamedView write() { return {"x", view(part.data(), {2}), layout}; }
  DeviceMesh mesh;
  LayoutRef layout;
  std::vector<float> part;
};

std::string save(const Step& s, ProcessGroup& group) {
  const Folder folder(group);
  const Cut x(group, 100);
  const NamedView tensor = x.read();
  save_checkpoint(folder.sub("a"), x.mesh, s.differs ? 8 : 7, {&tensor, 1});
  Cut y(group, 0);
  const MutableNamedView read = y.write();
  const CheckpointInfo info = load_checkpoint(folder.sub("a"), y.mesh, {&read, 1});
  group.barrier().wait();
  if (const std::string wrong = other_than("the step", static_cast<double>(info.step), 7); !wrong.empty())
    return wrong;
  return other_than("an element", y.part[0], x.part[0]);
}

std::string load(const Step& s, ProcessGroup& group) {
  const Folder folder(group);
  for (const int step : {1, 2}) {
    const Cut x(group, 100.0f * static_cast<float>(step));
    const NamedView tensor = x.read();
    save_checkpoint(folder.sub(step == 1 ? "a" : "b"), x.mesh, step, {&tensor, 1});
  }
  Cut y(group, 0);
  const MutableNamedView read = y.write();
  const CheckpointInfo info = load_checkpoint(folder.sub(s.differs ? "b" : "a"), y.mesh, {&read, 1});
  std::int64_t least = info.step, most = info.step;
  group.all_reduce(view(&least, 1), {.op = ReduceOp::min}).wait();
  group.all_reduce(view(&most, 1), {.op = ReduceOp::max}).wait();
  if (least != most) return fmt::format("ranks have loaded steps from {} to {}", least, most);
  return other_than("an element", y.part[0], 100.0 * static_cast<double>(info.step) + group.rank());
}

}  // namespace

std::string agree_on_saved(const Step& s, ProcessGroup& group) {
  if (s.value == Value::max_norm) return norm(s, group);
  return s.value == Value::saved ? save(s, group) : load(s, group);
}

}  // namespace weft::check
