#include "weft/train/float8.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>

#include "weft/base/error.hpp"
#include "weft/tp/plan.hpp"

namespace weft {
namespace {

constexpr std::int64_t kMultiple = 16;

[[noreturn]] void refuse_apply(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "apply_float8: " + text);
}

struct FoundLinear {
  Linear* layer;
  std::string path;
  std::vector<std::string> above;  // paths of the modules around it, and its own
};

// The Linear layers below `root`, and the paths of all modules.
struct FoundModules {
  std::vector<FoundLinear> linears;
  std::vector<std::string> paths;
};

FoundModules modules_of(Module& root) {
  FoundModules found;
  std::vector<std::string> above;
  const std::function<void(Module&, const std::string&)> visit = [&](Module& module,
                                                                     const std::string& path) {
    found.paths.push_back(path);
    above.push_back(path);
    if (auto* const layer = dynamic_cast<Linear*>(&module)) found.linears.push_back({layer, path, above});
    for (const auto& [name, child] : module.children())
      visit(*child, path.empty() ? name : path + "." + name);
    above.pop_back();
  };
  visit(root, "");
  return found;
}

bool any_match(const std::vector<std::string>& patterns, const std::vector<std::string>& paths) {
  return std::ranges::any_of(patterns, [&](const std::string& pattern) {
    return std::ranges::any_of(paths, [&](const std::string& path) { return matches(pattern, path); });
  });
}

// The first of `names` that is a name in the path; empty: none.
std::string name_in(const std::vector<std::string>& names, const std::string& path) {
  const std::string dotted = "." + path + ".";
  for (const std::string& name : names)
    if (dotted.find("." + name + ".") != std::string::npos) return name;
  return {};
}

std::string why_not(const FoundLinear& found, const Float8Filter& filter) {
  if (!filter.only.empty() && !any_match(filter.only, found.above)) return "no pattern of `only` matches it";
  if (any_match(filter.except, found.above)) return "a pattern of `except` matches it";
  if (!any_match(filter.only, {found.path}))
    if (const std::string name = name_in(filter.left_out, found.path); !name.empty())
      return fmt::format("\"{}\" is left out unless `only` names the layer", name);
  if (std::string refused = Float8Linears::refusal(*found.layer); !refused.empty()) return refused;
  const Shape& shape = found.layer->weight->global_shape();
  if (shape[0] % kMultiple != 0 || shape[1] % kMultiple != 0)
    return fmt::format("its sizes are not multiples of {}", kMultiple);
  if (shape.count() < filter.least_elements)
    return fmt::format("it has {} elements; least_elements is {}", shape.count(), filter.least_elements);
  return {};
}

// The most frequent reason, in one line: what starts ranks may show the last line of an error alone.
[[noreturn]] void refuse_all(const Float8Report& report) {
  std::map<std::string, std::size_t> counts;
  std::string reason = "the model has none";
  for (const Float8Report::Layer& layer : report.layers)
    if (const std::size_t count = ++counts[layer.why_not]; !counts.contains(reason) || count > counts[reason])
      reason = layer.why_not;
  refuse_apply(fmt::format(
      "{}\nfloat8: nothing to convert; expected at least one linear layer; the reason of {} of {}: {}",
      report.text(), counts[reason], report.layers.size(), reason));
}

void expect_patterns(const char* what, const std::vector<std::string>& patterns,
                     const std::vector<std::string>& paths) {
  for (const std::string& pattern : patterns)
    if (!any_match({pattern}, paths))
      refuse_apply(fmt::format("filter.{}: \"{}\" matches no module", what, pattern));
}

}  // namespace

std::int64_t Float8Report::converted() const noexcept {
  return std::ranges::count_if(layers, [](const Layer& l) { return l.why_not.empty(); });
}

std::string Float8Report::text() const {
  std::string text =
      fmt::format("float8 {}: {} of {} linear layers", name(recipe), converted(), layers.size());
  for (const Layer& layer : layers)
    if (!layer.why_not.empty())
      text += fmt::format("\n  \"{}\" {} stays: {}", layer.path, to_string(layer.weight), layer.why_not);
  return text;
}

Float8Model::~Float8Model() { linears_->restore(); }

std::unique_ptr<Float8Model> apply_float8(Module& model, Float8Recipe recipe, const Float8Options& options) {
  const FoundModules found = modules_of(model);
  expect_patterns("only", options.filter.only, found.paths);
  expect_patterns("except", options.filter.except, found.paths);
  Float8Report report{recipe, {}};
  for (const FoundLinear& f : found.linears)
    report.layers.push_back({f.path, f.layer->weight->global_shape(), why_not(f, options.filter)});
  if (report.converted() == 0) refuse_all(report);
  for (std::size_t i = 0; i < found.linears.size(); ++i)
    if (const char* const by = found.linears[i].layer->weight->layout_fixed_by();
        by != nullptr && report.layers[i].why_not.empty())
      refuse_apply(
          fmt::format("the weight of \"{}\" was laid out by {} already; expected apply_float8 before "
                      "{}, which may then gather codes",
                      found.linears[i].path, by, by));

  std::unique_ptr<Float8Model> made(new Float8Model);
  made->linears_ =
      std::make_shared<Float8Linears>(Float8LinearOptions{recipe, options.scales, options.not_finite});
  for (std::size_t i = 0; i < found.linears.size(); ++i)
    if (report.layers[i].why_not.empty()) Float8Linears::convert(made->linears_, *found.linears[i].layer);
  made->report_ = std::move(report);
  // The scales come first in a pass, at the same point on all ranks, and before weights are gathered.
  const std::shared_ptr<Float8Linears> linears = made->linears_;
  made->hooks_.push_back(model.around_forward({[linears](Module&, Frame& frame) {
                                                 if (!frame.recomputing()) linears->begin_pass();
                                                 linears->update_scales();
                                               },
                                               nullptr}));
  made->hooks_.push_back(
      model.around_backward({[linears](Module&, Frame&) { linears->begin_pass(); }, nullptr}));
  for (const Module::HookPoint point : {Module::HookPoint::post_forward, Module::HookPoint::post_backward})
    made->hooks_.push_back(
        model.add_hook(point, [linears](Module&, Tensors&, Frame&) { linears->expect_finite(); }));
  return made;
}

}  // namespace weft
