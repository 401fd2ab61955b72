// apply_domain_parallel(): finds the rule of each layer, and does what the rule says.
#include <fmt/format.h>

#include <typeinfo>

#include "domain/rules.hpp"
#include "mesh/axis_ranks.hpp"
#include "nn/kind_of.hpp"
#include "weft/base/error.hpp"
#include "weft/domain/domain.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "apply_domain_parallel: " + text);
}

void expect_reach(const SpaceRule::Reach& r, const char* along, const std::string& path,
                  const Module& module) {
  if (r.kernel < 1 || r.stride < 1 || r.dilation < 1 || r.padding < 0)
    refuse(
        fmt::format("the rule of \"{}\" (kind {}) has kernel {}, stride {}, padding {}, dilation {} along "
                    "the {}; expected at least 1, and a padding of at least 0",
                    path, kind_of(module), r.kernel, r.stride, r.padding, r.dilation, along));
}

// The passes of a model's root, in addition to the root's own passes: they record that the model is split,
// and how.
class RootPasses final : public Passes {
 public:
  RootPasses(DomainManager manager_in, std::shared_ptr<const Passes> passes)
      : manager(std::move(manager_in)), passes_(std::move(passes)) {}
  Tensors forward(Module& module, Inputs x, Frame& frame) const override {
    return passes_ ? passes_->forward(module, x, frame) : own_forward(module, x, frame);
  }
  Tensors backward(Module& module, Inputs dy, Frame& frame) const override {
    return passes_ ? passes_->backward(module, dy, frame) : own_backward(module, dy, frame);
  }
  std::string exact_refusal() const override { return passes_ ? passes_->exact_refusal() : ""; }
  const DomainManager manager;

 private:
  std::shared_ptr<const Passes> passes_;
};

// Passes of a model that was split over axes of one rank, which changed nothing.
bool left_alone(const Module& model) {
  const DomainManager before = get_domain_manager(model);
  return before && before.size() == 1;
}

struct Found {
  Module* module;
  std::shared_ptr<const Passes> passes;
};

class Search {
 public:
  Search(const DeviceMesh& axes, const DomainOptions& options)
      : axes_(axes),
        options_(options),
        dims_(options.dims.begin(), options.dims.begin() + axes.shape().axis_count()) {}

  void visit(Module& module, const std::string& path) {
    const SpaceRule rule = rule_for(module);
    if (module.passes() != nullptr && !left_alone(module))
      refuse(fmt::format("\"{}\" has passes of other code already", path));
    switch (rule.kind) {
      case SpaceRule::Kind::refused:
        refuse(fmt::format("\"{}\" is of kind {}, which {}", path, kind_of(module), rule.why));
      case SpaceRule::Kind::window:
        expect_reach(rule.height, "height", path, module);
        expect_reach(rule.width, "width", path, module);
        found.push_back({&module, domain::window_passes(axes_, rule.height, rule.width)});
        take_pixelwise(rule, path);
        return;
      case SpaceRule::Kind::by_passes:  // whose passes handle the children, too
        if (rule.passes == nullptr)
          refuse(fmt::format("the rule of \"{}\" (kind {}) has no passes", path, kind_of(module)));
        found.push_back({&module, rule.passes});
        take_pixelwise(rule, path);
        return;
      case SpaceRule::Kind::unknown:
        refuse(fmt::format(
            "\"{}\" is of kind {}, which has no rule for maps that are cut in space. Give it one: "
            "space_rule() "
            "of the layer, or DomainOptions::rules; {}",
            path, kind_of(module),
            module.children().empty()
                ? "a layer that treats each pixel alone has the rule SpaceRule::Kind::any_part"
                : "one whose own code, between its children, treats each pixel alone (residual sums) has the "
                  "rule SpaceRule::Kind::any_part, and its children keep their own rules"));
      case SpaceRule::Kind::any_part: take_pixelwise(rule, path); break;
    }
    for (const auto& [name, child] : module.children())
      visit(*child, path.empty() ? name : path + "." + name);
  }
  std::vector<Found> found;
  struct Cut {
    Parameter* parameter;
    LayoutRef layout;
  };
  std::vector<Cut> cut;

 private:
  void take_pixelwise(const SpaceRule& rule, const std::string& path) {
    if (axes_.size() == 1) return;
    for (const SpaceRule::Pixelwise& p : rule.pixelwise) {
      if (p.parameter == nullptr || p.dims.size() != dims_.size())
        refuse(fmt::format(
            "the rule of \"{}\" names a pixelwise parameter with {} dims; expected a parameter, and {} "
            "dims, one for each axis of {}",
            path, p.dims.size(), dims_.size(), axes_.name()));
      if (p.parameter->materialised() || p.parameter->layout_fixed_by() != nullptr)
        refuse(fmt::format("\"{}\" is cut as the maps are, and it {}; expected before", p.parameter->path(),
                           p.parameter->materialised()
                               ? std::string("has memory already")
                               : fmt::format("was laid out by {} already", p.parameter->layout_fixed_by())));
      LayoutRef layout = p.parameter->layout() ? p.parameter->layout()
                                               : replicated_layout(axes_, p.parameter->global_shape());
      std::size_t i = 0;
      for (const DeviceMesh& axis : axes_.each_axis())
        if (const int dim = p.dims[i++]; dim >= 0) layout = layout->with(axis, Shard{dim});
      cut.push_back({p.parameter, std::move(layout)});
    }
  }

  SpaceRule rule_for(Module& module) const {
    if (const auto given = options_.rules.find(typeid(module)); given != options_.rules.end())
      return given->second(module);
    SpaceRule rule = module.space_rule(axes_, dims_);
    for (domain::RuleOfFile* const of_file :
         {domain::conv_rule, domain::conv_transpose_rule, domain::resampling_rule,
          domain::window_attention_rule, domain::sequence_rule})
      if (rule.kind == SpaceRule::Kind::unknown) rule = of_file(module, axes_);
    return rule;
  }
  const DeviceMesh& axes_;
  const DomainOptions& options_;
  std::vector<int> dims_;
};

}  // namespace

DomainManager::DomainManager(DeviceMesh axes, DomainOptions options)
    : axes_(std::move(axes)), options_(std::move(options)), plans_(domain::make_plans()) {
  given_mesh("apply_domain_parallel", axes_);
  const auto count = static_cast<std::size_t>(axes_.shape().axis_count());
  if (count > options_.dims.size())
    refuse(fmt::format("{} has {} axes; options.dims says what {} cut", axes_.name(), count,
                       options_.dims.size()));
  if (options_.data && !(options_.data.root() == axes_.root()))
    refuse(
        fmt::format("options.data {} belongs to another mesh than {}", options_.data.name(), axes_.name()));
}

DomainManager apply_domain_parallel(Module& model, const DeviceMesh& axes, const DomainOptions& options) {
  DomainManager manager(axes, options);
  Search search(axes, options);
  search.visit(model, "");
  std::shared_ptr<const Passes> of_root;
  if (axes.size() > 1)
    for (const Search::Cut& c : search.cut) c.parameter->set_layout(c.layout);
  if (axes.size() > 1)
    for (Found& f : search.found) {
      if (f.module == &model)
        of_root = f.passes;
      else
        f.module->set_passes(std::move(f.passes));
    }
  model.set_passes(std::make_shared<RootPasses>(manager, std::move(of_root)));
  return manager;
}

DomainManager get_domain_manager(const Module& model) {
  const auto* const root = dynamic_cast<const RootPasses*>(model.passes().get());
  return root == nullptr ? DomainManager() : root->manager;
}

}  // namespace weft
