#include "weft/train/averaging.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/hash.hpp"
#include "dp/missing.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/replicas/same_list.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

std::string axis_text(const DeviceMesh& axis) { return fmt::format("{}={}", axis.name(), axis.size()); }

// A placement as a number that ranks exchange, and back.
constexpr std::int64_t kUnknown = -1, kReplicate = 0, kShard = 1, kPartial = 1000;
std::int64_t encode(const Placement& p) {
  if (const Shard* s = std::get_if<Shard>(&p)) return kShard + s->dim;
  if (const Partial* q = std::get_if<Partial>(&p)) return kPartial + static_cast<std::int64_t>(q->op.kind);
  return kReplicate;
}
Placement decode(std::int64_t code) {
  if (code >= kPartial) return Partial{ReduceOp{static_cast<ReduceOp::Kind>(code - kPartial)}};
  if (code >= kShard) return Shard{static_cast<int>(code - kShard)};
  return Replicate{};
}

bool is_sum_or_avg(const Placement& p) {
  return p == Placement(Partial{ReduceOp::sum}) || p == Placement(Partial{ReduceOp::avg});
}

}  // namespace

struct GradientAverager::Slot {
  Parameter* parameter = nullptr;
  int listener = 0;
  LayoutRef use = nullptr;     // the layout that backward gave the gradient
  std::optional<ReduceOp> op;  // sum or avg, once seen
  std::size_t entry = 0;       // in the reducer
  bool seen = false;           // final in any pass so far
  bool final = false;          // in this pass
};

// What all ranks know of the parameters before buckets are cut.
struct GradientAverager::Agreement {
  std::vector<std::size_t> order;                 // as the first rank saw gradients become final
  std::vector<std::vector<std::int64_t>> places;  // by parameter and axis of the root: a placement's number
  std::vector<int> told_by;                       // by parameter: the first rank that knew
};

GradientAverager::GradientAverager(std::vector<Parameter*> parameters, DeviceMesh axes, Options options)
    : axes_(given_mesh("averager", axes)), options_(options) {
  if (options_.bucket_bytes < 1)
    throw_told(
        "averager", axes_,
        Error(ErrorCode::bad_argument, fmt::format("averager: options.bucket_bytes is {}; expected 1 or more",
                                                   options_.bucket_bytes)));
  for (DeviceMesh& axis : axes_.each_axis())
    if (axis.size() > 1) each_axis_.push_back(std::move(axis));
  std::erase_if(parameters, [](const Parameter* p) { return !p->trainable(); });
  slots_.resize(parameters.size());
  try {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i]->claim_gradient(this);
      slots_[i].parameter = parameters[i];
      slots_[i].listener = parameters[i]->listen([this, i](Parameter&) { became_final(i); });
    }
  } catch (const std::exception& e) {
    for (const Slot& slot : slots_)
      if (slot.parameter != nullptr) {
        slot.parameter->stop_listening(slot.listener);
        slot.parameter->release_gradient(this);
      }
    if (const Error* const fault = dynamic_cast<const Error*>(&e)) throw_told("averager", axes_, *fault);
    throw;
  }
}

GradientAverager::~GradientAverager() {
  for (const Slot& slot : slots_) {
    slot.parameter->stop_listening(slot.listener);
    slot.parameter->release_gradient(this);
  }
}

void GradientAverager::expect_partial(std::size_t index) {
  Slot& slot = slots_[index];
  slot.use = slot.parameter->gradient_layout();
  for (const DeviceMesh& axis : each_axis_) {
    const TensorName what = TensorName::of("averager: the gradient of ", slot.parameter->path());
    const Placement placement = placement_on(slot.parameter->gradient(), axis, what);
    if (!is_sum_or_avg(placement))
      throw Error(
          ErrorCode::layout,
          fmt::format("{} is {} on {}; expected Partial(sum), or Partial(avg): there is nothing to reduce",
                      what.text(), to_string(placement), axis_text(axis)));
    const ReduceOp op = std::get<Partial>(placement).op;
    if (slot.op && !(*slot.op == op))
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; in the passes before, or on another axis, it was Partial({})",
                              what.text(), to_string(placement), axis_text(axis), name(*slot.op)));
    slot.op = op;
  }
}

void GradientAverager::became_final(std::size_t index) {
  Slot& slot = slots_[index];
  expect_partial(index);
  if (!slot.seen) {
    slot.seen = true;
    final_order_.push_back(index);
  }
  if (*no_syncs_ > 0) return;
  if (slot.final)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("averager: the gradient of \"{}\" became final twice; several backward passes before "
                    "finish() need no_sync() around all but the last",
                    slot.parameter->path()));
  slot.final = true;
  if (!reducer_) return;
  const std::int64_t before = reducer_->posted_early();
  reducer_->ready(slot.entry);
  posted_early_ += reducer_->posted_early() - before;
}

NoSync GradientAverager::no_sync() {
  for (const Slot& slot : slots_)
    if (slot.final)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("averager: no_sync() after the gradient of \"{}\" became final; finish() comes first",
                      slot.parameter->path()));
  return NoSync(no_syncs_);
}

// What every rank tells of the parameters: for each its place in the order of the first pass, and its gradient's
// placements, with a digest of the list of paths and sizes. The first rank's order holds, and placements that one
// rank does not know (it did not use the parameter) are taken from one that does.
GradientAverager::Agreement GradientAverager::agree(const std::optional<Error>& fault) {
  const std::size_t n = slots_.size();
  const auto axis_count = static_cast<std::size_t>(axes_.root().shape().axis_count());
  std::vector<std::uint64_t> own(final_order_.begin(), final_order_.end());
  for (std::size_t i = n; i-- > 0;)
    if (!slots_[i].seen) own.push_back(i);
  for (const Slot& slot : slots_)
    for (std::size_t a = 0; a < axis_count; ++a)
      own.push_back(static_cast<std::uint64_t>(
          slot.seen && slot.use != nullptr ? encode(slot.use->placements[a]) : kUnknown));
  const auto digest = [this](std::size_t i) {
    return digest_of(hash_of(slots_[i].parameter->path()), slots_[i].parameter->master().count());
  };
  const auto text = [this](std::size_t i) {
    return fmt::format("\"{}\" (x{})", slots_[i].parameter->path(), slots_[i].parameter->master().count());
  };
  ListDigest list;
  for (std::size_t i = 0; i < n; ++i) list.add(digest(i));
  const std::vector<std::uint64_t> all = gather_with_list(
      "averager", axes_, list, own,
      [&] {
        return ListEntries{"parameter", n, digest, text};
      },
      fault);

  Agreement agreed;
  for (std::size_t i = 0; i < n; ++i) agreed.order.push_back(static_cast<std::size_t>(all[i]));
  agreed.told_by.assign(n, 0);
  agreed.places.assign(n, std::vector<std::int64_t>(axis_count, kUnknown));
  for (int rank = 0; rank < axes_.size(); ++rank)
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t a = 0; a < axis_count; ++a)
        agree_on_place(agreed, i, a, rank,
                       static_cast<std::int64_t>(
                           all[static_cast<std::size_t>(rank) * own.size() + n + i * axis_count + a]));
  return agreed;
}

// `place`: what `rank` says. Those before it agreed.
void GradientAverager::agree_on_place(Agreement& agreed, std::size_t i, std::size_t axis, int rank,
                                      std::int64_t place) const {
  std::int64_t& known = agreed.places[i][axis];
  if (place == kUnknown || place == known) return;
  if (known == kUnknown) {
    known = place;
    agreed.told_by[i] = rank;
    return;
  }
  throw Error(Failure{
      ErrorCode::mismatch,
      fmt::format("averager: the gradient of \"{}\" is {} on {} for {}, but {} for {}",
                  slots_[i].parameter->path(), to_string(decode(known)),
                  axes_.root().shape().name(static_cast<int>(axis)), name_axis_rank(axes_, agreed.told_by[i]),
                  to_string(decode(place)), name_axis_rank(axes_, rank)),
      Op::none,
      kNoCall,
      {agreed.told_by[i], rank}});
}

// Buckets lie where the gradients are. On a device they must be ordered on the stream of what writes them.
Compute* GradientAverager::compute_of_buckets() const {
  Compute& first = slots_[0].parameter->compute();
  Compute* const compute =
      options_.compute == nullptr && first.device() != Device{} ? &first : options_.compute;
  for (const Slot& slot : slots_) {
    const Compute& its = slot.parameter->compute();
    if (const std::string fault = device_fault(its.device(), compute); !fault.empty())
      throw Error(ErrorCode::bad_argument, fmt::format("averager: \"{}\" {}", slot.parameter->path(), fault));
    if (compute != nullptr && its.stream() != compute->stream())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("averager: \"{}\" was materialised with another Compute of {} than {}",
                              slot.parameter->path(), to_string(its.device()),
                              options_.compute == nullptr ? fmt::format("\"{}\"", slots_[0].parameter->path())
                                                          : "options.compute"));
  }
  return compute;
}

void GradientAverager::make_reducer() {
  Compute* compute = nullptr;
  const Agreement agreed = agree(fault_of([&] { compute = compute_of_buckets(); }));
  std::vector<BucketEntry> entries;
  for (const std::size_t index : agreed.order) {
    Slot& slot = slots_[index];
    Placements places;
    for (const std::int64_t place : agreed.places[index])
      places.push_back(place == kUnknown ? Placement(Partial{}) : decode(place));
    if (const LayoutRef layout = slot.parameter->layout(); layout != nullptr && slot.use == nullptr)
      slot.use = agreed.places[index][0] == kUnknown ? layout : layout->with(places);
    for (const DeviceMesh& axis : each_axis_)  // used by nobody: a sum of zeros
      if (!slot.op)
        slot.op = std::get<Partial>(is_sum_or_avg(places[static_cast<std::size_t>(axis.root_axes()[0])])
                                        ? places[static_cast<std::size_t>(axis.root_axes()[0])]
                                        : Placement(Partial{}))
                      .op;
    slot.entry = entries.size();
    entries.push_back({slot.parameter->path(), slot.parameter->master().count(), DType::f32,
                       slot.op.value_or(ReduceOp::sum)});
  }
  BucketOptions options = options_;
  options.compute = compute;
  options.unused = Unused::zeros;  // this class decides what is missing: it also knows earlier passes
  reducer_ = std::make_unique<BucketReducer>(axes_, std::move(entries), options);
  for (const Slot& slot : slots_)
    slot.parameter->place_gradient(reducer_->tensor(slot.entry).reshape(slot.parameter->local_shape()));
}

// All ranks reduce all gradients in any case, those that are missing too: a rank that threw at once would
// leave the others waiting. What is missing counts as zero until expect_none_missing() has compared the ranks.
void GradientAverager::finish() {
  if (*no_syncs_ > 0)
    throw Error(ErrorCode::bad_argument,
                "averager: finish() inside no_sync(); the last pass before it comes after that scope");
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].parameter->has_gradient()) expect_partial(i);
  if (!each_axis_.empty() && !reducer_ && !slots_.empty()) make_reducer();
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.parameter->has_gradient()) {
      if (reducer_ && !reducer_->is_ready(slot.entry)) reducer_->ready(slot.entry);
    } else {
      unused.push_back(i);
      slot.parameter->state_gradient(slot.use != nullptr ? slot.use : slot.parameter->layout());
      const Tensor& gradient = slot.parameter->gradient();
      kernels::fill(kernels_of(slot.parameter->compute()), gradient.data_ptr<float>(), 0.0f,
                    gradient.count());
    }
  }
  for (Slot& slot : slots_) slot.final = false;  // also where the reduction throws: the next step begins anew
  if (reducer_) reducer_->finish();

  if (options_.unused == Unused::error) {
    try {
      dp::expect_none_missing(
          {"averager: no backward pass used", "AveragerOptions"}, axes_, slots_.size(), unused,
          [this](std::size_t i) { return std::string_view(slots_[i].parameter->path()); });
    } catch (...) {
      for (const std::size_t i : unused) slots_[i].parameter->zero_gradient();
      throw;
    }
  }
  for (const Slot& slot : slots_)
    if (LayoutRef layout = slot.parameter->gradient_layout(); layout != nullptr) {
      layout = layout->with(axes_, Replicate{});
      slot.parameter->set_gradient_layout(layout);
    }
}

std::vector<std::int64_t> GradientAverager::bucket_bytes() const {
  return reducer_ ? reducer_->bucket_bytes() : std::vector<std::int64_t>{};
}

}  // namespace weft
