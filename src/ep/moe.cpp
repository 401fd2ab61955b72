#include "weft/ep/moe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/hash.hpp"
#include "ep/tokens.hpp"
#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/group/process_group.hpp"
#include "weft/mesh/boundary.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// The first expert of each rank, and the number of experts.
std::vector<std::int64_t> first_experts(std::int64_t experts, int ranks) {
  std::vector<std::int64_t> first;
  for (int r = 0; r < ranks; ++r) first.push_back(chunk_of(experts, ranks, r).offset);
  first.push_back(experts);
  return first;
}

// x as rows of tokens, with its memory.
Tensor as_rows(const Tensor& x) {
  const std::int64_t width = x.shape().back();
  return x.reshape({width == 0 ? 0 : x.count() / width, width});
}

// `like` with Partial on the axes that split the hidden features of the experts, where results of experts are
// contributions. In exact mode they are sums already.
LayoutRef contributions(const LayoutRef& like, const Experts& experts, const Frame& frame) {
  const LayoutRef& weight = experts.up_proj->layout();
  if (like == nullptr || weight == nullptr || frame.exact()) return like;
  Placements placements = like->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_shard(weight->placements[axis], 1)) placements[axis] = Partial{};
  return like->with(std::move(placements));
}

// The sum over the ranks that split the hidden features; t itself if none do.
Tensor summed_over_hidden(const Tensor& t, const LayoutRef& whole, const Experts& experts,
                          const Frame& frame) {
  const LayoutRef partial = contributions(whole, experts, frame);
  if (partial == whole) return t.with_layout(whole);
  return redistribute(t.with_layout(partial), whole);
}

// The layout of a number for each choice of a token, seen as (first dimension, the rest).
LayoutRef layout_of_choices(const LayoutRef& x, const Shape& global) {
  if (x == nullptr) return nullptr;
  return x->segmented(0, {})->with_global(global);
}

// Says that other ranks read a tensor where it lies: the module on its one side then writes it to shared
// memory (Module::out_memory). The tensor passes as it is.
class ReadInPlace final : public Boundary {
 public:
  Transfer start_forward(const Tensor& x, const TensorName&) const override { return Transfer(x); }
  Transfer start_backward(const Tensor& dy, const TensorName&) const override { return Transfer(dy); }
  LayoutRef out_layout(const LayoutRef& in, const TensorName&) const override { return in; }
};

}  // namespace

void MoEConfig::check() const {
  for (const auto& [name, size, least] : {std::tuple{"dim", dim, 1},
                                          {"hidden", hidden, 1},
                                          {"experts", experts, 1},
                                          {"shared_hidden", shared_hidden, 0}})
    if (size < least)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("moe: {} is {}; expected at least {}", name, size, least));
}

namespace {
const MoEConfig& checked(const MoEConfig& config) {
  config.check();
  return config;
}
}  // namespace

MoE::MoE(const MoEConfig& config) : MoE(checked(config), std::unique_ptr<ExpertModules>()) {}

namespace {
// `hidden` is of packed experts: any number will do for modules.
MoEConfig of_modules(MoEConfig config) {
  if (config.hidden != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("moe: hidden is {} with make_expert; expected 0: the modules know their sizes",
                            config.hidden));
  config.hidden = 1;
  return config;
}
}  // namespace

MoE::MoE(const MoEConfig& config, MakeExpert make_expert)
    : MoE(checked(of_modules(config)),
          std::make_unique<ExpertModules>(config.experts, std::move(make_expert))) {}

MoE::MoE(const MoEConfig& config, std::unique_ptr<ExpertModules> modules)
    : router(config.dim, config.experts, config.router, config.init),
      experts(config.experts, config.dim, config.hidden, config.kind, config.init, config.down_init),
      expert_modules(std::move(modules)),
      config_(config) {
  add("router", router);
  if (expert_modules)
    add("experts", *expert_modules);
  else
    add("experts", experts);
  if (config.shared_hidden > 0) {
    shared_expert = std::make_unique<SwiGLU>(config.dim, config.shared_hidden, config.init, config.down_init);
    add("shared_expert", *shared_expert);
  }
}
MoE::~MoE() = default;

// Rows of eight bits are made in shared memory; then nobody else reads x.
void MoE::set_expert_axis(DeviceMesh axis) {
  expert_axis_ = std::move(axis);
  if (!expert_axis_ || expert_axis_.size() == 1) return;
  const auto in_place = std::make_shared<const ReadInPlace>();
  if (makes_x_ != nullptr && !config_.float8_dispatch) makes_x_->add_after(in_place);
  if (makes_dy_ != nullptr) makes_dy_->add_before(in_place);
}

OwnPlan MoE::class_plan() const {
  if (expert_modules) return {};
  return {.styles = {{"experts", "fed_column"}}};
}

std::vector<Parameter*> MoE::expert_parameters() const {
  return expert_modules ? expert_modules->parameters() : experts.parameters();
}

// The experts, ready for a pass with the tokens x.
Module& MoE::expert_layer(const Tensor& x) {
  const Memory memory = expert_axis_ && expert_axis_.size() > 1 ? Memory::shared : Memory::local;
  const auto prepared = [&](auto& layer) -> Module& {
    layer.set_tokens_layout(x.layout());
    layer.set_rows_memory(memory);
    return layer;
  };
  return expert_modules ? prepared(*expert_modules) : prepared(experts);
}

// The choices of the ranks of the expert axis: experts, weights, and tokens of each rank.
Tensors MoE::choices_of_ranks(const Tensor& x, const Tensor& chosen, const Tensor& weights,
                              Frame& frame) const {
  Compute& compute = frame.compute();
  if (!expert_axis_ || expert_axis_.size() == 1) {
    const Tensor tokens = compute.make({1}, DType::i64);
    tokens.as<std::int64_t>()[0] = chosen.size(0);
    return {chosen.reshape({chosen.count()}), weights.reshape({weights.count()}), tokens};
  }
  const std::vector<int> ranks = expert_axis_.ranks();
  std::vector<std::int64_t> counts;
  for (const int rank : ranks) {
    const Shape local = x.layout()->local_shape(rank);
    counts.push_back(local.back() == 0 ? 0 : local.count() / local.back());
  }
  const ExpertChoices all =
      gather_choices(compute, expert_axis_.group(), chosen.view(), weights.view(), std::move(counts));
  const Tensor tokens = compute.make({static_cast<std::int64_t>(all.tokens.size())}, DType::i64);
  std::ranges::copy(all.tokens, tokens.as<std::int64_t>().begin());
  return {all.experts, all.weights, tokens};
}

TokenRoutes MoE::routes(const Tensor& chosen, const Tensor& weights, const Tensor& tokens) const {
  const auto counts = tokens.as<std::int64_t>();
  const ExpertChoices choices{chosen, weights, {counts.begin(), counts.end()}};
  return TokenRoutes(choices, expert_axis_ ? expert_axis_.rank() : 0, router.options().top_k,
                     first_experts(config_.experts, static_cast<int>(counts.size())));
}

// By which each weight is multiplied where results are used; null: by nothing.
Tensor MoE::load_scales(const Tensor& chosen, Frame& frame) const {
  if (!config_.scale_outputs_by_load || !frame.pass().training) return {};
  const Tensor scales = frame.compute().make(chosen.shape());
  const RouterReport& report = router.report();
  const double mean = static_cast<double>(report.assignments) / static_cast<double>(config_.experts);
  for (std::size_t i = 0; i < scales.f32().size(); ++i) {
    const auto e = static_cast<std::size_t>(ep::expert_of(chosen.as<std::int32_t>()[i]));
    scales.f32()[i] = static_cast<float>(mean / static_cast<double>(report.counts[e]));
  }
  return scales;
}

// For each expert of this rank, the rows of each block of samples: (experts, blocks + 1) row numbers.
Tensor MoE::sample_blocks(const Tensor& x, const TokenRoutes& routes, Frame& frame) const {
  const auto refuse = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("exact: \"{}\": {}", path(), text));
  };
  const DeviceMesh axes = ep::sample_axes(x.layout());
  int groups = axes ? axes.size() : 1;  // of ranks that exchange tokens
  if (expert_axis_ && expert_axis_.size() > 1) {
    groups /= expert_axis_.size();
    if (!(axes.each_axis().back() == expert_axis_))
      refuse(fmt::format("samples are split over {}; expected {} as the last axis", axes.name(),
                         expert_axis_.name()));
  }
  if (kExactBlocks % groups != 0)
    refuse(fmt::format("{} data ranks do not divide {} blocks", groups, kExactBlocks));
  const int blocks = kExactBlocks / groups;
  const std::int64_t samples = layouts::global_shape(x)[0] / groups,
                     of_sample = x.size(0) == 0 ? 0 : x.count() / (x.size(0) * config_.dim);
  const auto count = static_cast<std::int64_t>(routes.offsets().size()) - 1;
  const Tensor offsets = frame.compute().make({count, blocks + 1}, DType::i64);
  const auto tokens = routes.row_tokens();
  for (std::int64_t e = 0; e < count; ++e) {
    const auto begin = tokens.begin() + routes.offsets()[static_cast<std::size_t>(e)],
               end = tokens.begin() + routes.offsets()[static_cast<std::size_t>(e) + 1];
    for (int b = 0; b <= blocks; ++b) {
      const std::int64_t first = b == blocks ? samples : exact_block(samples, blocks, b).offset;
      offsets.as<std::int64_t>()[static_cast<std::size_t>(e * (blocks + 1) + b)] =
          std::lower_bound(begin, end, first * of_sample) - tokens.begin();
    }
  }
  return offsets;
}

Tensors MoE::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor x = layouts::beside(*this, "x", inputs[0], *router.gate.weight);
  if (x.shape().rank() < 2 || x.shape().back() != config_.dim)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (…, {})", layouts::named(*this, "x").text(),
                            to_string(x.shape()), config_.dim));
  const bool travels = expert_axis_ && expert_axis_.size() > 1;
  if (travels)
    expect_layout(x, expert_axis_, Shard{0}, TensorName(path(), "x, whose samples the expert ranks divide,"));
  const Tensors routed = router.forward(x, frame);
  // Experts, weights and tokens of all expert ranks; this rank's weights; and what these were multiplied by.
  const Tensors choices = frame.once(path(), [&] {
    const Tensor scales = load_scales(routed[0], frame);
    Tensor weights = routed[1];
    if (scales) {
      weights = weights.clone(frame.compute().context());
      for (std::size_t i = 0; i < weights.f32().size(); ++i) weights.f32()[i] *= scales.f32()[i];
    }
    Tensors all = choices_of_ranks(x, routed[0], weights, frame);
    all.push_back(weights);
    if (scales) all.push_back(scales);
    return all;
  });
  const Tensor& weights = choices[3];
  const TokenRoutes routes = this->routes(choices[0], choices[1], choices[2]);
  ProcessGroup* const group = travels ? &expert_axis_.group() : nullptr;

  const bool as_codes = config_.float8_dispatch;
  Transfer dispatch = routes.start_dispatch(
      frame.compute(), group,
      as_codes ? to_float8_rows(frame.compute(), as_rows(x), travels ? Memory::shared : Memory::local)
               : as_rows(x));
  const Tensor shared = shared_expert ? shared_expert->forward(x, frame)[0] : Tensor();
  const Tensor offsets =
      frame.compute().make({static_cast<std::int64_t>(routes.offsets().size())}, DType::i64);
  std::ranges::copy(routes.offsets(), offsets.as<std::int64_t>().begin());
  const Tensor came = dispatch.finish();
  const Tensor rows = as_codes ? from_float8_rows(frame.compute(), came, x.dtype()) : came;
  Tensors of_experts{rows, offsets};
  if (frame.exact()) of_experts.push_back(sample_blocks(x, routes, frame));
  const Tensor computed = expert_layer(x).forward(of_experts, frame)[0];
  const Tensor results = routes.start_combine(frame.compute(), group, computed).finish();
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), shared_expert ? Memory::local : out_memory());
  routes.weighted_sum(results, weights.view(), as_rows(y).view());
  Tensors kept{results, x};
  kept.insert(kept.end(), choices.begin(), choices.end());
  frame.push(*this, std::move(kept));
  const Tensor whole = summed_over_hidden(y, x.layout(), experts, frame);
  if (!shared_expert) return {whole};
  return {add_tensors(whole, shared, frame.compute(), layouts::named(*this, "experts + shared expert"),
                      out_memory())};
}

Tensors MoE::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Tensor &results = kept[0], &x = kept[1], &weights = kept[5], &dy = gradients[0];
  layouts::expect_same(layouts::named(*this, "dy"), dy.layout(), x.layout(), "as x");
  if (!(dy.shape() == x.shape()) || dy.dtype() != x.dtype())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {} {}; expected {} {}, as x", layouts::named(*this, "dy").text(),
                            name(dy.dtype()), to_string(dy.shape()), name(x.dtype()), to_string(x.shape())));
  const TokenRoutes routes = this->routes(kept[2], kept[3], kept[4]);
  const bool travels = expert_axis_ && expert_axis_.size() > 1;
  ProcessGroup* const group = travels ? &expert_axis_.group() : nullptr;
  Compute& compute = frame.compute();

  Transfer dispatch = routes.start_dispatch(compute, group, as_rows(dy));
  const Tensor dweights = compute.make(weights.shape());
  routes.row_products(results, as_rows(dy), dweights.view());
  const Tensor drows = dispatch.finish();
  const auto row_weights = routes.row_weights();
  const std::int64_t width = drows.size(1);
  for (std::size_t row = 0; row < row_weights.size(); ++row) {
    const float weight = row_weights[row];
    const std::size_t first = row * static_cast<std::size_t>(width),
                      end = first + static_cast<std::size_t>(width);
    if (drows.dtype() == DType::bf16)
      for (std::size_t i = first; i < end; ++i)
        drows.as<bf16>()[i] = bf16(weight * static_cast<float>(drows.as<bf16>()[i]));
    else
      for (std::size_t i = first; i < end; ++i) drows.f32()[i] *= weight;
  }
  const Tensor dcomputed = expert_layer(x).backward(drows, frame)[0];
  Transfer combine = routes.start_combine(compute, group, dcomputed);
  const Tensor through_shared = shared_expert ? shared_expert->backward(dy, frame)[0] : Tensor();

  if (kept.size() > 6)
    for (std::size_t i = 0; i < dweights.f32().size(); ++i) dweights.f32()[i] *= kept[6].f32()[i];
  const Shape of_choices{x.shape()[0], x.shape()[0] == 0 ? 0 : dweights.count() / x.shape()[0]};
  Shape global_choices = of_choices;
  if (x.layout()) global_choices[0] = x.layout()->global[0];
  const Tensor dscores = summed_over_hidden(dweights.reshape(of_choices),
                                            layout_of_choices(x.layout(), global_choices), experts, frame);
  const Tensor returned = combine.finish();
  const Tensor through_experts = compute.make(x.shape(), x.dtype());
  routes.weighted_sum(returned, {}, as_rows(through_experts).view());
  const Tensor of_rows = summed_over_hidden(through_experts, x.layout(), experts, frame);
  const Tensor through_router = router.backward(dscores.reshape(weights.shape()), frame)[0];
  const TensorName what = layouts::named(*this, "dx");
  const Tensor dx =
      add_tensors(of_rows, through_router, compute, what, shared_expert ? Memory::local : dx_memory());
  return {shared_expert ? add_tensors(dx, through_shared, compute, what, dx_memory()) : dx};
}

void apply_expert_parallel(Module& model, const DeviceMesh& axis, const ExpertParallelOptions& options) {
  given_mesh("apply_expert_parallel", axis, "axis");
  std::vector<MoE*> layers;
  model.visit([&](Module& m) {
    if (auto* const moe = dynamic_cast<MoE*>(&m)) layers.push_back(moe);
  });
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "apply_expert_parallel: " + text);
  };
  if (axis.root_axes().size() != 1)
    refuse(fmt::format("axis is {}; expected one axis", to_string(axis.shape())));
  if (layers.empty()) refuse("the model has no mixture of experts");
  for (MoE* moe : layers) {
    const std::int64_t count = moe->config().experts, ranks = axis.size();
    if (count < ranks)
      refuse(fmt::format("\"{}\" has {} experts; {} needs at least one for each rank", moe->path(), count,
                         axis_text(axis)));
    if (count % ranks != 0 && !options.uneven)
      refuse(
          fmt::format("\"{}\" has {} experts; they do not divide into {} ({} = {} x {} + {}); uneven = true "
                      "allows that",
                      moe->path(), count, axis_text(axis), count, ranks, count / ranks, count % ranks));
    if (moe->expert_axis()) refuse(fmt::format("\"{}\" is expert parallel already", moe->path()));
    for (const Parameter* p : moe->expert_parameters()) {
      if (p->materialised() || p->layout_fixed_by() != nullptr)
        refuse(fmt::format(
            "\"{}\" {} already; expected a call before data parallel and materialise()", p->path(),
            p->materialised() ? "has memory" : fmt::format("was laid out by {}", p->layout_fixed_by())));
      if (p->layout() && !(p->layout()->mesh() == axis.root()))
        refuse(fmt::format(
            "\"{}\" lies over {}, the axis {} belongs to {}: not the same DeviceMesh; use one for "
            "both",
            p->path(), to_string(p->layout()->mesh_shape()), axis_text(axis),
            to_string(axis.root().shape())));
      if (p->layout() && !is_replicate(p->layout()->on(axis)))
        refuse(fmt::format("\"{}\" is {} on {} already", p->path(), to_string(p->layout()->on(axis)),
                           axis_text(axis)));
    }
  }
  for (MoE* moe : layers) {
    moe->set_expert_axis(axis);
    for (Parameter* p : moe->expert_parameters())
      p->set_layout((p->layout() ? p->layout() : replicated_layout(axis.root(), p->global_shape()))
                        ->with(axis, Shard{0}));
  }
}

std::vector<LayerBalance> expert_balance(Module& model) {
  std::vector<LayerBalance> all;
  model.visit([&](Module& m) {
    if (auto* const moe = dynamic_cast<MoE*>(&m)) all.push_back({moe->path(), moe->router.report()});
  });
  return all;
}

std::uint64_t digest_of_mixtures(Module& model) {
  Fnv1a hash;
  bool found = false;
  model.visit([&](Module& m) {
    const auto* const moe = dynamic_cast<const MoE*>(&m);
    if (moe == nullptr) return;
    found = true;
    const MoEConfig& c = moe->config();
    const RouterOptions& r = c.router;
    for (const std::int64_t n :
         {c.dim, c.hidden, c.experts, c.shared_hidden, static_cast<std::int64_t>(c.kind),
          std::int64_t{c.scale_outputs_by_load}, std::int64_t{c.float8_dispatch}, std::int64_t{r.top_k},
          static_cast<std::int64_t>(r.scores), std::int64_t{r.normalise}, static_cast<std::int64_t>(r.bias),
          static_cast<std::int64_t>(r.capacity), static_cast<std::int64_t>(r.balance)})
      hash.add(static_cast<std::uint64_t>(n));
    for (const double x : {r.noise, r.capacity_factor, r.aux_loss, r.z_loss})
      hash.add(std::bit_cast<std::uint64_t>(x));
  });
  return found ? hash.value : 0;
}

void set_router_loss_scale(Module& model, double scale) {
  model.visit([&](Module& m) {
    if (auto* const router = dynamic_cast<Router*>(&m)) router->set_loss_scale(scale);
  });
}

}  // namespace weft
