#include "weft/train/fully_shard.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/floating.hpp"
#include "mesh/axis_ranks.hpp"
#include "train/fully_shard/passes.hpp"
#include "train/masters.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/float8_linear.hpp"
#include "weft/tp/plan.hpp"

namespace weft {
namespace {

[[noreturn]] void bad(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "fully_shard: " + text);
}

// Parameters by block; the root's parameters come first.
struct Grouped {
  Module* module;
  std::vector<Parameter*> parameters;
};

std::string below(const std::string& root, const std::string& path) {
  return root.empty() ? path : path.size() > root.size() ? path.substr(root.size() + 1) : "";
}

bool cut_along(const Parameter& p, const DeviceMesh& axis) {
  return axis && p.layout() != nullptr && p.layout()->mesh() == axis.root() && axis.size() > 1 &&
         is_shard(p.layout()->on(axis));
}

std::vector<Grouped> grouped(Module& root, const std::vector<std::string>& patterns, const DeviceMesh& cut,
                             const std::vector<std::string>& only) {
  std::vector<Grouped> groups{{&root, {}}};
  std::vector<bool> matched(patterns.size(), false);
  std::vector<std::pair<Parameter*, std::size_t>> found;  // in which group each place is
  // `cut_alike`: the parameters of the group are all cut along `cut`
  const std::function<void(Module&, std::size_t, bool)> look = [&](Module& module, std::size_t group,
                                                                   bool cut_alike) {
    for (std::size_t i = 0; &module != &root && i < patterns.size(); ++i)
      if (matches(patterns[i], below(root.path(), module.path()))) {
        matched[i] = true;
        if (groups.back().module == &module) continue;
        group = groups.size();
        groups.push_back({&module, {}});
      }
    // The outermost module of which all is cut, since its own pass may run those below it; or one that has
    // more, which is refused.
    const auto is_cut = [&](const Parameter* p) { return cut_along(*p, cut); };
    const std::vector<Parameter*> all = module.parameters();
    const bool all_cut = !all.empty() && std::ranges::all_of(all, is_cut);
    if (&module != &root && !cut_alike && groups.back().module != &module &&
        (all_cut || std::ranges::any_of(module.own_parameters(),
                                        [&](const auto& own) { return is_cut(own.second.get()); }))) {
      group = groups.size();
      groups.push_back({&module, {}});
    }
    for (const auto& [name, parameter] : module.own_parameters()) found.emplace_back(parameter.get(), group);
    for (const auto& [name, child] : module.children()) look(*child, group, cut_alike || all_cut);
  };
  if (only.empty()) look(root, 0, false);
  for (const std::string& path : only) look(root.get(path), 0, false);
  for (std::size_t i = 0; i < patterns.size(); ++i)
    if (!matched[i]) bad(fmt::format("options.blocks: \"{}\" matches no module below the root", patterns[i]));
  for (Parameter* p : root.parameters()) {
    std::optional<std::size_t> in;
    for (const auto& [parameter, group] : found)
      if (parameter == p) in = in && *in != group ? 0 : group;  // one that blocks share is the root's
    if (in) groups[*in].parameters.push_back(p);
  }
  if (!only.empty() && !groups[0].parameters.empty())
    bad(fmt::format("options.only: \"{}\" is in no block, and the root is not run",
                    groups[0].parameters[0]->path()));
  return groups;
}

void expect_axes(const ShardAxes& axes) {
  given_mesh("fully_shard", axes.shard, "axes.shard");
  if (!axes.replicate) return;
  if (!(axes.replicate.root() == axes.shard.root()))
    bad(fmt::format("axes.replicate is {} of another mesh than {}", axes.replicate.name(),
                    axes.shard.name()));
  for (const int a : axes.shard.root_axes())
    if (std::ranges::count(axes.replicate.root_axes(), a) > 0)
      bad(fmt::format("axes.replicate is {}, of which {} is to be cut; expected other axes",
                      axes.replicate.name(), axes.shard.root().shape().name(a)));
}

// The axes over which a block's parameters are divided.
ShardAxes axes_of(const Grouped& g, const ShardAxes& axes, const DeviceMesh& cut) {
  const bool any = std::ranges::any_of(g.parameters, [&](const Parameter* p) { return cut_along(*p, cut); });
  if (!any) return axes;
  for (const Parameter* p : g.parameters)
    if (!cut_along(*p, cut))
      bad(fmt::format(
          "\"{}\" is cut along {}={} and \"{}\" of the same block is not; expected modules of their "
          "own",
          g.parameters[0] == p ? g.parameters.back()->path() : g.parameters[0]->path(), cut.name(),
          cut.size(), p->path()));
  std::vector<std::string> rest;
  for (const DeviceMesh& axis : axes.shard.each_axis())
    if (!(axis == cut)) rest.push_back(axis.name());
  ShardAxes others = axes;
  others.shard = axes.shard.root().submesh(rest);
  return others;
}

void expect_cut_already(const ShardAxes& axes, const DeviceMesh& cut) {
  if (!cut) return;
  const std::vector<DeviceMesh> each = axes.shard.each_axis();
  if (each.size() < 2 || std::ranges::find(each, cut) == each.end())
    bad(fmt::format("options.cut_already is {}; expected one of several axes of axes.shard, {}", cut.name(),
                    axes.shard.name()));
}

void expect_fit(const Parameter& p, const ShardAxes& axes, DType dtype, const DeviceMesh& cut) {
  if (p.global_shape().rank() == 0)
    bad(fmt::format("\"{}\" is a scalar; it has no dimension to cut", p.path()));
  if (p.has_gradient()) bad(fmt::format("\"{}\" has a gradient; expected none yet", p.path()));
  if (p.materialised() && p.dtype() != dtype)
    bad(fmt::format("\"{}\" has memory as {}; precision.param is {}", p.path(), name(p.dtype()),
                    name(dtype)));
  if (p.layout() == nullptr) return;
  if (!(p.layout()->mesh() == axes.shard.root()))
    throw Error(ErrorCode::layout, fmt::format("fully_shard: \"{}\" lies over {}, the axes {} belong to {}: "
                                               "not the same DeviceMesh; use one for both",
                                               p.path(), to_string(p.layout()->mesh_shape()),
                                               axes.shard.name(), to_string(axes.shard.root().shape())));
  for (const DeviceMesh* each : {&axes.shard, &axes.replicate})
    if (*each)
      for (const DeviceMesh& axis : each->each_axis())
        if (axis.size() > 1 && !is_replicate(p.layout()->on(axis)) && !(axis == cut && cut_along(p, cut)))
          throw Error(ErrorCode::layout,
                      fmt::format("fully_shard: \"{}\" is {} on {}={}; expected Replicate", p.path(),
                                  to_string(p.layout()->on(axis)), axis.name(), axis.size()));
}

void expect_options(const FullyShardOptions& options, int ranks) {
  expect_precision(options.precision, "fully_shard: options.precision");
  reshard_ranks(options.reshard_after_forward, ranks);
}

// Codes that belong to no parameter would be gathered nowhere.
void expect_float8(const std::vector<Parameter*>& parameters, const Float8Linears& float8) {
  if (std::ranges::any_of(parameters, [&](const Parameter* p) { return float8.layer_of(*p).has_value(); }))
    return;
  if (float8.layers().empty()) bad("options.float8 has no layers; expected a Float8Model that still exists");
  bad(
      fmt::format("options.float8: \"{}\" and its other layers are not of this model; expected "
                  "Float8Model::linears() of the model that is sharded",
                  float8.layers()[0]->path()));
}

}  // namespace

MixedPrecision default_mp_policy() noexcept { return {.param = DType::bf16}; }

struct FullySharded::Impl {
  Impl(Module& root, const ShardAxes& axes_in, const FullyShardOptions& options) : axes(axes_in) {
    expect_axes(axes);
    expect_options(options, axes.shard.size());
    expect_cut_already(axes, options.cut_already);
    const std::vector<Grouped> groups = grouped(root, options.blocks, options.cut_already, options.only);
    std::vector<Parameter*> parameters = root.parameters();
    std::erase_if(parameters, [&](Parameter* p) {
      return std::ranges::none_of(groups,
                                  [&](const Grouped& g) { return std::ranges::count(g.parameters, p) > 0; });
    });
    if (options.float8) expect_float8(parameters, *options.float8);
    for (const Parameter* p : parameters) expect_fit(*p, axes, options.precision.param, options.cut_already);
    const DeviceMesh both[] = {axes.shard, axes.replicate};
    expect_same_masters(parameters, both);  // of which parts are cut out
    const int reshard = reshard_ranks(options.reshard_after_forward, axes.shard.size());
    std::vector<std::unique_ptr<ShardBlock>> blocks;
    for (const Grouped& g : groups) {
      const ShardAxes of_block = axes_of(g, axes, options.cut_already);
      const bool all_axes = of_block.shard == axes.shard;  // parts are kept for neighbours on all axes alone
      blocks.push_back(std::make_unique<ShardBlock>(*g.module, g.parameters, of_block, options,
                                                    reshard > 1 && !all_axes ? 0 : reshard, this));
    }
    claim(parameters);  // throws if other code has claimed one, before anything changes
    for (Parameter* p : parameters) p->release_gradient(this);
    for (Parameter* p : parameters)
      if (!p->materialised()) p->set_dtype(options.precision.param);
    for (Parameter* p : parameters)
      if (cut_along(*p, options.cut_already)) were_cut.push_back(p);
    for (const auto& block : blocks) block->shard();
    claim(parameters);
    all = parameters;
    cut_already = options.cut_already;
    for (Parameter* p : all) p->fix_layout("fully_shard");
    for (ModuleBuffer* b : root.buffers())
      if (b->layout() == nullptr && !b->materialised())
        b->set_layout(replicated_layout(axes.shard, b->global_shape()));
    set_activations(root, options.precision);
    passes.emplace(std::move(blocks), axes, options);
    passes->listen();
  }
  ~Impl() {
    passes.reset();
    for (Parameter* p : all) {
      p->release_gradient(this);
      p->fix_layout(nullptr);
    }
  }
  void claim(const std::vector<Parameter*>& parameters) {
    try {
      for (Parameter* p : parameters)
        if (p->trainable()) p->claim_gradient(this);
    } catch (...) {
      for (Parameter* p : parameters) p->release_gradient(this);
      throw;
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const ShardAxes axes;
  std::vector<Parameter*> all;
  DeviceMesh cut_already;
  std::vector<Parameter*> were_cut;  // along that axis, before
  std::optional<ShardPasses> passes;
};

FullySharded::FullySharded(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
FullySharded::~FullySharded() = default;

const ShardAxes& FullySharded::axes() const noexcept { return impl_->axes; }
DeviceMesh FullySharded::mesh() const { return impl_->axes.shard.root(); }

NoSync FullySharded::no_sync() {
  if (impl_->axes.shard.size() > 1 || (impl_->axes.replicate && impl_->axes.replicate.size() > 1))
    for (const auto& block : impl_->passes->blocks())
      for (const Parameter* p : block->parameters())
        if (p->has_gradient() && !block->unreduced())
          bad(fmt::format("no_sync() while \"{}\" has a reduced gradient; expected zero_gradient() first",
                          p->path()));
  return NoSync(impl_->passes->no_syncs);
}

FullySharded::KeptWeights::KeptWeights(ShardPasses& passes) : passes_(&passes) { ++passes.keepers; }
void FullySharded::KeptWeights::end(ShardPasses& passes) noexcept {
  if (--passes.keepers == 0) passes.drop_kept();
}
FullySharded::KeptWeights FullySharded::keep_weights() { return KeptWeights(*impl_->passes); }

void FullySharded::finish() { impl_->passes->finish(); }
void FullySharded::discard() noexcept { impl_->passes->discard(); }

void FullySharded::set_trainable(Parameter& p, bool trainable) {
  if (std::ranges::count(impl_->all, &p) == 0)
    bad(fmt::format("set_trainable: \"{}\" is not of this model", p.path()));
  p.release_gradient(impl_.get());
  try {
    p.set_trainable(trainable);
  } catch (...) {
    if (p.trainable()) p.claim_gradient(impl_.get());
    throw;
  }
  if (trainable) p.claim_gradient(impl_.get());
}

ShardMemory FullySharded::memory() const {
  ShardMemory m;
  for (const Parameter* p : impl_->all) {
    const std::int64_t own = p->materialised() ? p->master().bytes() : p->local_shape().count() * 4;
    m.masters += own;
    if (p->dtype() == DType::bf16) m.rounded += own / 2;
    if (p->has_gradient()) m.gradients += p->gradient().bytes();
    LayoutRef whole = p->layout();
    for (const DeviceMesh& axis : impl_->axes.shard.each_axis())
      if (whole != nullptr && !(axis == impl_->cut_already && std::ranges::count(impl_->were_cut, p) > 0))
        whole = whole->with(axis, Replicate{});
    m.whole_model += (whole != nullptr ? whole->local_shape() : p->global_shape()).count() * 4;
  }
  m.whole_now = impl_->passes->whole_now();
  m.whole_peak = impl_->passes->whole_peak;
  return m;
}

std::int64_t FullySharded::prefetched() const noexcept { return impl_->passes->prefetched; }

int FullySharded::in_flight() const noexcept {
  int sum = 0;
  for (const auto& block : impl_->passes->blocks()) sum += block->on_its_way() + block->reducing();
  return sum;
}
int FullySharded::gathered_blocks() const noexcept {
  int sum = 0;
  for (const auto& block : impl_->passes->blocks()) sum += block->gathered();
  return sum;
}

std::int64_t FullySharded::gather_bytes() const {
  std::int64_t sum = 0;
  for (const auto& block : impl_->passes->blocks()) sum += block->values().unshard_bytes();
  return sum;
}
std::int64_t FullySharded::reduce_bytes() const {
  std::int64_t sum = 0;
  for (const auto& block : impl_->passes->blocks()) sum += block->reducer().reduce_bytes();
  return sum;
}

std::unique_ptr<FullySharded> fully_shard(Module& root, const ShardAxes& axes,
                                          const FullyShardOptions& options) {
  return std::unique_ptr<FullySharded>(
      new FullySharded(std::make_unique<FullySharded::Impl>(root, axes, options)));
}

std::unique_ptr<FullySharded> fully_shard(Module& root, ProcessGroup& group,
                                          const FullyShardOptions& options) {
  return fully_shard(root, DeviceMesh(group, {{"dp", group.size()}}), options);
}

}  // namespace weft
