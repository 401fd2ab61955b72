#include "train/fully_shard/block.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/mutant.hpp"
#include "mesh/axis_ranks.hpp"
#include "nn/history.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/float8_linear.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// The compute of a device, on whose stream calls and copies are ordered; on the host its threads copy.
Compute* compute_of(const std::vector<Parameter*>& parameters) {
  return parameters.empty() ? nullptr : &parameters[0]->compute();
}

void clear(const Tensor& t, Compute& compute) {
  kernels::fill(kernels_of(compute), t.data_ptr<float>(), 0.0F, t.count());
}

constexpr std::int64_t kLine = 64;  // a buffer of whole tensors consists of this many bytes, several times

// Part r of n of a buffer of whole tensors, in bytes.
Chunk part_of_buffer(std::int64_t bytes, int n, int r) {
  const Chunk c = chunk_of(bytes / kLine, n, r);
  return {c.offset * kLine, c.size * kLine};
}

}  // namespace

ShardBlock::ShardBlock(Module& module, std::vector<Parameter*> parameters, const ShardAxes& axes,
                       const FullyShardOptions& options, int reshard_ranks, const void* owner)
    : module_(module),
      parameters_(std::move(parameters)),
      axes_(axes),
      precision_(options.precision),
      float8_(options.float8),
      unused_(options.unused),
      reshard_ranks_(reshard_ranks),
      owner_(owner) {
  // A module that runs again inside the backward pass of its block needs the codes of both passes at once.
  bool runs_again = false;
  module.visit([&](const Module& m) { runs_again = runs_again || m.recompute(); });
  const bool codes = float8_ && (float8_->one_set_of_codes() || !runs_again);
  // A weight that was tied to a float8 layer's after the conversion has holders that cannot read codes.
  for (const Parameter* p : parameters_) {
    wholes_.push_back(p->layout() != nullptr ? p->layout()
                                             : replicated_layout(axes.shard, p->global_shape()));
    as_codes_.push_back(codes && p->holders() == 1 ? float8_->layer_of(*p) : std::nullopt);
    two_sets_ = two_sets_ || (as_codes_.back() && !float8_->one_set_of_codes());
  }
}

void ShardBlock::shard() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = *parameters_[i];
    const LayoutRef shard = cuts() ? wholes_[i]->shard_inside(axes_.shard, 0) : wholes_[i];
    if (!p.materialised()) {
      p.set_layout(shard);
      continue;
    }
    const Tensor whole = p.master();
    if (!cuts()) {
      p.set_master(whole.with_layout(shard));
      continue;
    }
    const Tensor part = p.compute().make(shard->local_shape(), DType::f32, whole.storage().memory());
    const bool has_values = p.has_values();
    const ShardedParameters one(axes_.shard, {{p.path(), wholes_[i]}}, {.compute = &p.compute()});
    one.reshard(std::vector<ConstTensorView>{whole}, std::vector<TensorView>{part});
    p.set_master(part.with_layout(shard));
    if (!has_values) p.forget_values();
  }
}

ShardedParameters& ShardBlock::values() {
  if (!values_) {
    std::vector<ShardEntry> entries;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      entries.push_back(
          {parameters_[i]->path(), wholes_[i], as_codes_[i] ? DType::f8e4m3 : parameters_[i]->dtype()});
    values_.emplace(axes_.shard, std::move(entries),
                    ShardedParametersOptions{.compute = compute_of(parameters_)});
  }
  return *values_;
}

// The reducer for the parameters that are trained now.
ShardedParameters& ShardBlock::reducer() {
  std::vector<Parameter*> trained;
  for (Parameter* p : parameters_)
    if (p->trainable()) trained.push_back(p);
  if (reducer_ && trained == trained_) return *reducer_;
  if (gradients_ && unreduced_)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "fully_shard: what is trained of \"{}\" changed while gradients wait to be reduced; finish() or "
            "discard() comes first",
            module_.path()));
  std::vector<ShardEntry> entries;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = *parameters_[i];
    if (!p.trainable()) continue;
    p.claim_gradient(owner_);  // one that was frozen before
    entries.push_back({p.path(), wholes_[i], DType::f32});
  }
  trained_ = std::move(trained);
  aside_.assign(trained_.size(), {});
  used_.assign(trained_.size(), nullptr);
  ShardedParametersOptions options;
  options.replicate = axes_.replicate;
  options.reduce = precision_.reduce;
  options.compute = compute_of(parameters_);
  reducer_.emplace(axes_.shard, std::move(entries), options);
  return *reducer_;
}

std::uint64_t ShardBlock::version() const {
  std::uint64_t sum = 0;
  for (const Parameter* p : parameters_) sum += p->master_version();
  return sum;
}

void ShardBlock::start_gather(ProcessGroup* neighbours, Use use) {
  if (!cuts() || gathered_ || gathering_) return;
  use_ = use;
  if (part_ && version_ != version()) part_ = {};  // the optimizer has been there
  version_ = version();
  if (part_ && neighbours != nullptr) {
    whole_ = from_neighbours(*neighbours);
    gathering_.emplace(whole_);
    return;
  }
  std::vector<Tensor> parts;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parts.push_back(as_codes_[i] ? float8_->weight_codes(*as_codes_[i], use) : parameters_[i]->weight());
  const std::vector<ConstTensorView> shards(parts.begin(), parts.end());
  // No rank can see the parts of others, so the ranks compare the history of these parts. First they compare
  // the seeds, then the optimizers' steps.
  values().set_history(compared_ ? history_of(parameters_, is_trained)
                                 : history_of_first_values(parameters_));
  gathering_.emplace(values().start_unshard(shards));
  if (std::exchange(compared_, true)) return;
  for (const Parameter* p : parameters_) set_history(*p, 0);
}

// Gathers the whole tensors from the parts that this rank and its neighbours kept.
Tensor ShardBlock::from_neighbours(ProcessGroup& neighbours) {
  const Tensor whole = values().make_whole();
  const std::int64_t bytes = values().whole_bytes();
  std::vector<std::int64_t> counts, offsets;
  for (int r = 0; r < neighbours.size(); ++r) {
    const Chunk c = part_of_buffer(bytes, neighbours.size(), r);
    counts.push_back(c.size);
    offsets.push_back(c.offset);
  }
  const auto own = static_cast<std::size_t>(neighbours.rank());
  const Tensor place = whole.slice_flat(offsets[own], {counts[own]});
  Compute& compute = *compute_of(parameters_);
  if (counts[own] > 0) copy(compute.context(), part_, place, compute.stream());
  CallOptions options;
  options.stream = compute.stream();
  part_gathering_ = neighbours.all_gather_v(place.view(), whole.view(), Blocks{counts, offsets}, options);
  return whole;
}

void ShardBlock::gather(ProcessGroup* neighbours, Use use) {
  if (!cuts()) return;
  const bool current = version_ == version() && (!two_sets_ || use_ == use);
  if (gathered_ && current) return;
  if (gathering_ && !current) {  // begun before the optimizer's step, or for the other pass
    gathering_->finish();
    gathering_.reset();
    if (part_gathering_.valid()) part_gathering_.wait();
    whole_ = {};
  }
  if (gathered_) drop(false);
  start_gather(neighbours, use);
  Transfer transfer = std::move(*gathering_);
  gathering_.reset();
  whole_ = transfer.finish();
  if (part_gathering_.valid()) {
    if (Compute& compute = *compute_of(parameters_); compute.device() != Device{})
      part_gathering_.wait_on(compute.stream());
    else
      part_gathering_.wait();
  }
  part_ = {};
  place_whole();
}

void ShardBlock::place_whole() {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    parameters_[i]->place_weight(values().whole(i, whole_), owner_);
  for (const std::optional<std::size_t>& layer : as_codes_)
    if (layer) float8_->state_codes(*layer, use_);
  gathered_ = true;
}

void ShardBlock::drop(bool after_forward) {
  if (two_sets_) after_forward = false;  // backward needs other codes
  if (after_forward && reshard_ranks_ == 1) return;
  if (!gathered_) return;
  if (after_forward && reshard_ranks_ > 1) keep_part();
  for (Parameter* p : parameters_) p->drop_weight();
  whole_ = {};
  gathered_ = false;
}

void ShardBlock::keep_part() {
  const Chunk c = part_of_buffer(values().whole_bytes(), reshard_ranks_, axes_.shard.rank() % reshard_ranks_);
  Compute& compute = *compute_of(parameters_);
  part_ = compute.make({c.size}, DType::u8);
  if (c.size > 0) copy(compute.context(), whole_.slice_flat(c.offset, {c.size}), part_, compute.stream());
}

void ShardBlock::poll() {
  if (gathering_) gathering_->done();
  if (reducing_) reducing_->done();
}

// Returns whether the parameter's gradient was already reduced.
bool ShardBlock::is_shard_gradient(const Parameter& p) const {
  if (!p.has_gradient() || p.gradient_layout() == nullptr) return false;
  const auto reduced_on = [&](const DeviceMesh& axes) {
    if (!axes) return true;
    for (const DeviceMesh& axis : axes.each_axis())
      if (axis.size() > 1 && is_partial(p.gradient_layout()->on(axis))) return false;
    return true;
  };
  return reduced_on(axes_.shard) && reduced_on(axes_.replicate);
}

void ShardBlock::begin_gradients() {
  if (!reduces()) return;
  reducer();
  if (trained_.empty() || reducing_) {
    if (reducing_) finish_reduce();  // the module is used a second time in this pass
    if (trained_.empty()) return;
  }
  bool kept = false;
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    Parameter& p = *trained_[i];
    if (is_shard_gradient(p)) aside_[i] = p.take_gradient(owner_);
    kept = kept || p.has_gradient();
  }
  if (precision_.reduce != DType::f32) return;  // gradients are converted on their way
  if (!kept) gradients_ = reducer().make_gradients();
  for (std::size_t i = 0; i < trained_.size(); ++i)
    trained_[i]->place_gradient(reducer().gradient(i, gradients_));
}

ReduceOp ShardBlock::expect_partial(const Parameter& p) {
  const TensorName what = TensorName::of("fully_shard: the gradient of ", p.path());
  std::optional<ReduceOp> op;
  for (const DeviceMesh* axes : {&axes_.shard, &axes_.replicate}) {
    if (!*axes) continue;
    for (const DeviceMesh& axis : axes->each_axis()) {
      if (axis.size() == 1) continue;
      const Placement placement = placement_on(p.gradient(), axis, what);
      const bool good =
          placement == Placement(Partial{ReduceOp::sum}) || placement == Placement(Partial{ReduceOp::avg});
      if (!good)
        throw Error(
            ErrorCode::layout,
            fmt::format("{} is {} on {}; expected Partial(sum), or Partial(avg): there is nothing to reduce",
                        what.text(), to_string(placement), axis_text(axis)));
      const ReduceOp its = std::get<Partial>(placement).op;
      if ((op && !(*op == its)) || (op_ && !(*op_ == its)))
        throw Error(ErrorCode::layout,
                    fmt::format("{} is {} on {}; others of its block, or on another axis, are not",
                                what.text(), to_string(placement), axis_text(axis)));
      op = its;
    }
  }
  return *op;
}

// If ranks may lack gradients, a rank that has no gradient of a block does not know whether the others'
// gradients are Partial(sum) or Partial(avg). So all ranks reduce by sum, and a gradient to be averaged is
// divided before.
void ShardBlock::scale_average(const Tensor& gradient) const {
  if (unused_ != Unused::zeros || op_ != ReduceOp(ReduceOp::avg)) return;
  const int ranks = axes_.shard.size() * (axes_.replicate ? axes_.replicate.size() : 1);
  kernels::scale(kernels_of(*compute_of(parameters_)), gradient.data_ptr<float>(),
                 1.0F / static_cast<float>(ranks), gradient.count());
}

void ShardBlock::start_reduce() {
  unreduced_ = false;
  missing_.clear();
  if (!reduces()) {
    for (Parameter* p : parameters_)
      if (p->trainable() && !p->has_gradient()) missing_.push_back(p);
    return;
  }
  ShardedParameters& reducer = this->reducer();
  if (trained_.empty()) return;
  op_.reset();
  for (const Parameter* p : trained_)
    if (p->has_gradient()) op_ = expect_partial(*p);
  std::vector<Tensor> wholes;
  bool in_place = static_cast<bool>(gradients_);
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    Parameter& p = *trained_[i];
    if (p.has_gradient()) {
      used_[i] = p.gradient_layout();
      wholes.push_back(p.take_gradient(owner_));
      scale_average(wholes[i]);
      in_place =
          in_place && (wholes[i].count() == 0 || wholes[i].data() == reducer.gradient(i, gradients_).data());
      continue;
    }
    if (!aside_[i]) missing_.push_back(&p);
    wholes.push_back(gradients_ ? reducer.gradient(i, gradients_)
                                : p.compute().make(reducer.whole_layout(i)->local_shape()));
    clear(wholes[i], p.compute());
  }
  const ReduceOp op = WEFT_MUTANT("shards_averaged") ? ReduceOp::avg
                      : unused_ == Unused::zeros     ? ReduceOp::sum
                                                     : op_.value_or(ReduceOp::sum);
  if (in_place)
    reducing_.emplace(reducer.start_reduce_scatter(std::exchange(gradients_, {}), op));
  else
    reducing_.emplace(
        reducer.start_reduce_scatter(std::vector<ConstTensorView>(wholes.begin(), wholes.end()), op));
  reducing_bytes_ = reducer.gradient_bytes();
  gradients_ = {};
}

// The layout of the gradient to which a whole gradient is reduced.
LayoutRef ShardBlock::reduced_layout(const LayoutRef& whole) const {
  LayoutRef layout = whole;
  if (axes_.replicate)
    for (const DeviceMesh& axis : axes_.replicate.each_axis()) layout = layout->with(axis, Replicate{});
  if (cuts()) return layout->shard_inside(axes_.shard, 0);
  for (const DeviceMesh& axis : axes_.shard.each_axis()) layout = layout->with(axis, Replicate{});
  return layout;
}

void ShardBlock::finish_reduce() {
  if (!reducing_) return;
  Transfer transfer = std::move(*reducing_);
  reducing_.reset();
  const Tensor reduced = transfer.finish();
  for (std::size_t i = 0; i < trained_.size(); ++i) {
    Parameter& p = *trained_[i];
    Tensor gradient = reducer_->shard_gradient(i, reduced);
    gradient =
        gradient.with_layout(reduced_layout(used_[i] != nullptr ? used_[i] : reducer_->whole_layout(i)));
    if (Tensor before = std::exchange(aside_[i], {}); before) {
      layouts::expect_same(TensorName::of("fully_shard: the gradient of ", p.path()), gradient.layout(),
                           before.layout(), "as in the passes before");
      kernels::add(kernels_of(p.compute()), before.data_ptr<float>(), gradient.data_ptr<float>(),
                   before.data_ptr<float>(), before.count());
      gradient = std::move(before);
    }
    p.give_gradient(std::move(gradient), owner_);
  }
}

void ShardBlock::give_zeros(Parameter& p) const {
  const Tensor zeros = p.compute().zeros(p.local_shape());
  p.give_gradient(zeros.with_layout(p.layout()), owner_);
}

void ShardBlock::discard() noexcept {
  const auto quietly = [](const auto& wait) {
    try {
      wait();
    } catch (...) {}  // the failure was reported already
  };
  if (gathering_) quietly([this] { gathering_->finish(); });
  gathering_.reset();
  if (part_gathering_.valid()) quietly([this] { part_gathering_.wait(); });
  if (reducing_) quietly([this] { reducing_->finish(); });
  reducing_.reset();
  drop(false);
  whole_ = part_ = gradients_ = {};
  aside_.assign(aside_.size(), {});
  missing_.clear();
  unreduced_ = false;
  for (Parameter* p : parameters_) p->zero_gradient();
}

std::int64_t ShardBlock::whole_bytes() const noexcept {
  const auto held = [](const Tensor& t) { return t ? t.bytes() : 0; };  // an empty handle is a scalar
  const std::int64_t values = values_ && (gathered_ || gathering_) ? values_->whole_bytes() : held(part_);
  return values + held(gradients_) + (reducing_ ? reducing_bytes_ : 0);
}

}  // namespace weft
