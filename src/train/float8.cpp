#include "weft/train/float8.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "base/hash.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "train/float8_conversion.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

constexpr std::int64_t kMultiple = 16;

[[noreturn]] void refuse_apply(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "apply_float8: " + text);
}

struct FoundLinear {
  Linear* layer;
  std::string path;
};

// The Linear layers below `root`, and the paths of all modules.
struct FoundModules {
  std::vector<FoundLinear> linears;
  std::vector<std::string> paths;
};

FoundModules modules_of(Module& root) {
  FoundModules found;
  const std::size_t above = root.path().empty() ? 0 : root.path().size() + 1;
  root.visit([&](Module& module) {
    found.paths.push_back(module.path().substr(std::min(above, module.path().size())));
    if (auto* const layer = dynamic_cast<Linear*>(&module))
      found.linears.push_back({layer, found.paths.back()});
  });
  return found;
}

// The first of `names` that is a name in the path; empty: none.
std::string name_in(const std::vector<std::string>& names, const std::string& path) {
  const std::string dotted = "." + path + ".";
  for (const std::string& name : names)
    if (dotted.find("." + name + ".") != std::string::npos) return name;
  return {};
}

std::string why_not(const FoundLinear& found, const Float8Filter& filter) {
  const auto any = [&](const std::vector<std::string>& patterns, auto match) {
    return std::ranges::any_of(patterns, [&](const std::string& p) { return match(p, found.path); });
  };
  if (!filter.only.empty() && !any(filter.only, matches_part)) return "no pattern of `only` matches it";
  if (any(filter.except, matches_part)) return "a pattern of `except` matches it";
  if (!any(filter.only, matches))
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
    if (std::ranges::none_of(paths, [&](const std::string& path) { return matches(pattern, path); }))
      refuse_apply(fmt::format("filter.{}: \"{}\" matches no module", what, pattern));
}

// The report of a conversion, which it does not begin.
Float8Report planned(const FoundModules& found, Float8Recipe recipe, const Float8Filter& filter) {
  expect_patterns("only", filter.only, found.paths);
  expect_patterns("except", filter.except, found.paths);
  Float8Report report{recipe, {}};
  for (const FoundLinear& f : found.linears)
    report.layers.push_back({f.path, f.layer->weight->global_shape(), why_not(f, filter)});
  if (report.converted() == 0) refuse_all(report);
  for (std::size_t i = 0; i < found.linears.size(); ++i)
    if (const char* const by = found.linears[i].layer->weight->layout_fixed_by();
        by != nullptr && report.layers[i].why_not.empty())
      refuse_apply(
          fmt::format("the weight of \"{}\" was laid out by {} already; expected apply_float8 before "
                      "{}, which may then gather codes",
                      found.linears[i].path, by, by));
  return report;
}

// DeviceMesh::arithmetic() has no group.
bool communicates(const DeviceMesh& mesh) {
  try {
    mesh.group();
    return true;
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported) throw;
    return false;
  }
}

// Throws mismatch, with one text on all ranks that names the option, if the ranks were given different ones.
// `fault`: what is wrong with this rank's, if anything; it is then thrown on all ranks.
void expect_same_float8(const DeviceMesh& mesh, Float8Recipe recipe, const Float8Options& options,
                        const std::optional<Error>& fault) {
  const auto quoted = [](const std::vector<std::string>& texts) {
    std::string all;
    for (const std::string& text : texts) all += fmt::format("{}\"{}\"", all.empty() ? "" : ", ", text);
    return all.empty() ? std::string("empty") : all;
  };
  const Float8Filter& filter = options.filter;
  const std::pair<const char*, std::string> given[] = {
      {"the recipe", std::string(name(recipe))},
      {"options.filter.only", quoted(filter.only)},
      {"options.filter.except", quoted(filter.except)},
      {"options.filter.left_out", quoted(filter.left_out)},
      {"options.filter.least_elements", std::to_string(filter.least_elements)},
      {"options.scales", options.scales == Float8Scales::own ? "own" : "whole"},
      {"options.not_finite", options.not_finite == Float8NotFinite::error ? "error" : "propagate"}};
  const std::string is = " is ";
  const auto text = [&](std::size_t i) { return given[i].first + is + given[i].second; };
  const auto digest_of_option = [&](std::size_t i) { return hash_of(text(i)); };
  ListDigest digest;
  for (std::size_t i = 0; i < std::size(given); ++i) digest.add(digest_of_option(i));
  const auto difference = [&](std::string_view first, std::string_view second, int other) {
    return fmt::format("{} on {}, but {} on {}", first, name_axis_rank(mesh, 0),
                       second.substr(second.find(is) + is.size()), name_axis_rank(mesh, other));
  };
  gather_with_list(
      "apply_float8", mesh, digest, {},
      [&] {
        return ListEntries{"option", std::size(given), digest_of_option, text, difference};
      },
      fault);
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

std::unique_ptr<Float8Model> convert_linears(Module& model, Float8Recipe recipe, const Float8Options& options,
                                             const std::function<bool(const std::string& path)>& here) {
  const FoundModules found = modules_of(model);
  Float8Report report = planned(found, recipe, options.filter);
  std::unique_ptr<Float8Model> made(new Float8Model);
  made->linears_ =
      std::make_shared<Float8Linears>(Float8LinearOptions{recipe, options.scales, options.not_finite});
  for (std::size_t i = 0; i < found.linears.size(); ++i)
    if (report.layers[i].why_not.empty() && (!here || here(found.linears[i].layer->path())))
      Float8Linears::convert(made->linears_, *found.linears[i].layer);
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

std::unique_ptr<Float8Model> apply_float8(Module& model, Float8Recipe recipe, const Float8Options& options) {
  const std::optional<Error> fault = fault_of([&] { planned(modules_of(model), recipe, options.filter); });
  DeviceMesh mesh;
  for (const Parameter* p : model.parameters())
    if (p->layout() != nullptr) mesh = p->layout()->mesh().root();
  if (mesh && communicates(mesh)) expect_same_float8(mesh, recipe, options, fault);
  return convert_linears(model, recipe, options);
}

}  // namespace weft
