#include "weft/pp/stage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "weft/base/error.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

[[noreturn]] void bad_stages(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "pipeline stages: " + text);
}

// Modules that give a parameter a path.
class Named : public Module {
 public:
  Named(std::string_view path, const ParameterRef& parameter) {
    const std::size_t dot = path.find('.');
    if (dot == std::string_view::npos) {
      add(std::string(path), parameter);
      return;
    }
    below_ = std::make_unique<Named>(path.substr(dot + 1), parameter);
    add(std::string(path.substr(0, dot)), *below_);
  }

 private:
  Tensors do_forward(Inputs, Frame&) override { return {}; }
  Tensors do_backward(Inputs, Frame&) override { return {}; }
  std::unique_ptr<Named> below_;
};

// A Parameter like `p`, without a gradient of its own yet.
ParameterRef twin_of(const Parameter& p) {
  auto twin = std::make_shared<Parameter>(p.global_shape(), p.init());
  const Named named(p.path(), twin);
  twin->set_dtype(p.dtype());
  twin->set_decays(p.decays());
  twin->set_trainable(p.trainable());
  if (p.layout() != nullptr) twin->set_layout(p.layout());
  twin->fix_layout(p.layout_fixed_by());
  return twin;
}

}  // namespace

bool is_inside(std::string_view path, std::string_view module) noexcept {
  return module.empty() || path == module ||
         (path.starts_with(module) && path.size() > module.size() && path[module.size()] == '.');
}

PipelineStage::PipelineStage(Module& model, std::span<const std::string> paths) {
  for (const std::string& path : paths) modules_.push_back(&model.get(path));
}

Tensors PipelineStage::forward(Inputs x, Frame& frame) const {
  Tensors y(x.begin(), x.end());
  for (Module* module : modules_) y = module->forward(y, frame);
  return y;
}

Tensors PipelineStage::backward(Inputs dy, Frame& frame) const {
  Tensors dx(dy.begin(), dy.end());
  for (auto module = modules_.rbegin(); module != modules_.rend(); ++module)
    dx = (*module)->backward(dx, frame);
  return dx;
}

Tensors PipelineStage::backward(Inputs dy, Frame& frame, LeftOver& left_over) const {
  const Frame::Leaving leaving(frame, left_over);
  return backward(dy, frame);
}

std::vector<Parameter*> PipelineStage::parameters() const {
  std::vector<Parameter*> all;
  for (const Module* module : modules_)
    for (Parameter* p : module->parameters())
      if (std::ranges::count(all, p) == 0) all.push_back(p);
  return all;
}

std::vector<ModuleBuffer*> PipelineStage::buffers() const {
  std::vector<ModuleBuffer*> all;
  for (const Module* module : modules_)
    for (ModuleBuffer* b : module->buffers()) all.push_back(b);
  return all;
}

std::vector<TiedWeight> untie(Module& model) {
  struct Use {
    Module* module;
    ParameterRef weight;
  };
  std::vector<std::vector<Use>> all;  // of each parameter
  model.visit([&](Module& m) {
    for (const auto& [name, p] : m.own_parameters()) {
      auto found = std::ranges::find_if(all, [&, &p = p](const auto& uses) { return uses[0].weight == p; });
      if (found == all.end()) found = all.insert(all.end(), std::vector<Use>());
      const bool made = p->path() == (m.path().empty() ? name : fmt::format("{}.{}", m.path(), name));
      found->insert(made ? found->begin() : found->end(), Use{&m, p});
    }
  });
  std::erase_if(all, [](const auto& uses) { return uses.size() < 2; });
  for (const std::vector<Use>& uses : all) {
    const Parameter& weight = *uses[0].weight;
    if (weight.materialised())
      bad_stages(fmt::format("\"{}\" has memory; expected a tied weight without", weight.path()));
    for (std::size_t i = 1; i < uses.size(); ++i)
      if (dynamic_cast<Linear*>(uses[i].module) == nullptr)
        bad_stages(fmt::format("\"{}\" shares the weight \"{}\" and is no Linear; expected a Linear",
                               uses[i].module->path(), weight.path()));
  }
  std::vector<TiedWeight> tied;
  for (const std::vector<Use>& uses : all) {
    TiedWeight weight{{uses[0].weight}, {uses[0].module->path()}};
    for (std::size_t i = 1; i < uses.size(); ++i) {
      weight.uses.push_back(twin_of(*uses[0].weight));
      weight.modules.push_back(uses[i].module->path());
      dynamic_cast<Linear&>(*uses[i].module).tie_weight(weight.uses[i]);
    }
    tied.push_back(std::move(weight));
  }
  return tied;
}

std::vector<std::string> pipeline_path(Module& model, std::span<const std::string> patterns) {
  std::vector<std::string> paths;
  for (const std::string& pattern : patterns) {
    const std::size_t before = paths.size();
    model.visit([&](Module& m) {
      if (matches(pattern, m.path()) && (!m.path().empty() || pattern.empty())) paths.push_back(m.path());
    });
    if (paths.size() == before) bad_stages(fmt::format("no module matches \"{}\"", pattern));
  }
  for (std::size_t i = 0; i < paths.size(); ++i)
    for (std::size_t j = 0; j < paths.size(); ++j)
      if (i != j && is_inside(paths[i], paths[j]))
        bad_stages(paths[i] == paths[j] ? fmt::format("\"{}\" is there twice", paths[i])
                                        : fmt::format("\"{}\" lies inside of \"{}\"; expected one of them",
                                                      paths[i], paths[j]));
  const auto expect_covered = [&](const std::string& path, const char* what) {
    if (std::ranges::none_of(paths, [&](const std::string& module) { return is_inside(path, module); }))
      bad_stages(fmt::format("{} \"{}\" lies in no module of the stages", what, path));
  };
  for (const Parameter* p : model.parameters()) expect_covered(p->path(), "parameter");
  for (const ModuleBuffer* b : model.buffers()) expect_covered(b->path(), "buffer");
  model.visit([&](Module& m) {
    const bool around = std::ranges::any_of(
        paths, [&](const std::string& module) { return module != m.path() && is_inside(module, m.path()); });
    if (around && (!m.before().empty() || !m.after().empty()))
      bad_stages(fmt::format("\"{}\" has boundaries of its own, which no stage would cross", m.path()));
  });
  return paths;
}

// least[k][i]: the weight of the heaviest stage if the modules from i on are cut into k stages.
std::vector<std::vector<std::string>> split_stages(std::span<const std::string> modules, int stages,
                                                   std::span<const double> weights) {
  const std::size_t n = modules.size();
  if (stages < 1 || static_cast<std::size_t>(stages) > n)
    bad_stages(fmt::format("{} stages of {} modules; expected 1 to {}", stages, n, n));
  if (!weights.empty() && weights.size() != n)
    bad_stages(fmt::format("{} weights for {} modules", weights.size(), n));
  std::vector<double> sums{0};  // of the weights of the first modules
  for (std::size_t i = 0; i < n; ++i) {
    const double weight = weights.empty() ? 1 : weights[i];
    if (!(weight >= 0 && weight < std::numeric_limits<double>::infinity()))
      bad_stages(fmt::format("the weight of \"{}\" is {}; expected a finite number of 0 or more", modules[i],
                             weight));
    sums.push_back(sums.back() + weight);
  }
  const auto k_most = static_cast<std::size_t>(stages);
  std::vector<std::vector<double>> least(k_most + 1,
                                         std::vector<double>(n + 1, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<std::size_t>> ends(k_most + 1, std::vector<std::size_t>(n + 1));
  least[0][n] = 0;
  for (std::size_t k = 1; k <= k_most; ++k)
    for (std::size_t i = 0; i + k <= n; ++i)
      for (std::size_t end = n - k + 1; end > i; --end)  // from the largest first stage on
        if (const double heaviest = std::max(sums[end] - sums[i], least[k - 1][end]);
            heaviest < least[k][i]) {
          least[k][i] = heaviest;
          ends[k][i] = end;
        }
  std::vector<std::vector<std::string>> cut;
  for (std::size_t k = k_most, i = 0; k > 0; --k) {
    const std::size_t end = ends[k][i];
    cut.emplace_back(modules.begin() + static_cast<std::ptrdiff_t>(i),
                     modules.begin() + static_cast<std::ptrdiff_t>(end));
    i = end;
  }
  return cut;
}

}  // namespace weft
