#include "weft/train/gradient_reducer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "dp/missing.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/replica_bits.hpp"
#include "mesh/same_list.hpp"
#include "mesh/view_memory.hpp"
#include "nn/history.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

constexpr std::size_t kNoSet = ~std::size_t{0};  // nothing to reduce

// Returns whether the parameter itself is sharded along that axis: then each of its ranks has gradients of
// its own elements.
bool is_cut(const Parameter& parameter, const DeviceMesh& axis) {
  return parameter.layout() && parameter.layout()->mesh() == axis.root() &&
         is_shard(parameter.layout()->on(axis));
}

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

// Throws on all ranks of `axes` if the passes of one of them have failed.
void expect_none_failed(const DeviceMesh& axes, bool failed) {
  if (axes.size() == 1) return;
  std::vector<std::uint64_t> own{failed ? 1u : 0u}, all(static_cast<std::size_t>(axes.size()));
  gather_on_host(axes.group(), view(own), view(all));
  const auto first = std::ranges::find(all, std::uint64_t{1});
  if (first == all.end()) return;
  const int rank = static_cast<int>(first - all.begin());
  throw Error(Failure{ErrorCode::bad_argument,
                      fmt::format("gradient_reducer: the passes of {} have failed; its own error says why",
                                  name_axis_rank(axes, rank)),
                      Op::none,
                      kNoCall,
                      {rank}});
}

bool is_sum_or_avg(const Placement& p) {
  return p == Placement(Partial{ReduceOp::sum}) || p == Placement(Partial{ReduceOp::avg});
}

}  // namespace

struct GradientReducer::Slot {
  Parameter* parameter = nullptr;
  int listener = 0;
  LayoutRef use = nullptr;     // the layout that backward gave the gradient
  std::optional<ReduceOp> op;  // sum or avg, once seen
  std::size_t set = kNoSet;    // of axes, among reduced_
  std::size_t entry = 0;       // in its reducer
  bool seen = false;           // final in any pass so far
  bool final = false;          // in this pass
};

// The gradients that are reduced over one set of axes: the axes along which their parameters are not sharded.
struct GradientReducer::Reduced {
  std::vector<std::string> axes;
  std::vector<BucketEntry> entries;
  std::unique_ptr<BucketReducer> reducer;
};

// The facts about the parameters that all ranks know before gradients are divided into buckets.
struct GradientReducer::Agreement {
  std::vector<std::size_t> order;                 // as the first rank saw gradients become final
  std::vector<std::vector<std::int64_t>> places;  // by parameter and axis of the root: a placement's number
  std::vector<int> told_by;                       // by parameter: the first rank that knew
};

GradientReducer::GradientReducer(std::vector<Parameter*> parameters, DeviceMesh axes, Options options)
    : axes_(given_mesh("gradient_reducer", axes)), options_(options) {
  if (options_.bucket_bytes < 1)
    throw_told("gradient_reducer", axes_,
               Error(ErrorCode::bad_argument,
                     fmt::format("gradient_reducer: options.bucket_bytes is {}; expected 1 or more",
                                 options_.bucket_bytes)));
  for (DeviceMesh& axis : axes_.each_axis())
    if (axis.size() > 1) each_axis_.push_back(std::move(axis));
  for (const Parameter* p : parameters)
    if (!p->trainable()) frozen_.push_back(p);
  std::erase_if(parameters, [](const Parameter* p) { return !p->trainable(); });
  slots_.resize(parameters.size());
  trained_ = parameters;
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
    if (const Error* const fault = dynamic_cast<const Error*>(&e))
      throw_told("gradient_reducer", axes_, *fault);
    throw;
  }
}

GradientReducer::~GradientReducer() {
  for (const Slot& slot : slots_) {
    slot.parameter->stop_listening(slot.listener);
    slot.parameter->release_gradient(this);
  }
}

void GradientReducer::expect_partial(std::size_t index) {
  Slot& slot = slots_[index];
  slot.use = slot.parameter->gradient_layout();
  for (const DeviceMesh& axis : each_axis_) {
    const TensorName what = TensorName::of("gradient_reducer: the gradient of ", slot.parameter->path());
    const Placement placement = placement_on(slot.parameter->gradient(), axis, what);
    if (is_cut(*slot.parameter, axis)) {
      const Placement& expected = slot.parameter->layout()->on(axis);
      if (!(placement == expected))
        throw Error(ErrorCode::layout,
                    fmt::format("{} is {} on {}; expected {}, as the parameter is", what.text(),
                                to_string(placement), axis_text(axis), to_string(expected)));
      continue;
    }
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

void GradientReducer::became_final(std::size_t index) {
  Slot& slot = slots_[index];
  expect_partial(index);
  if (!slot.seen) {
    slot.seen = true;
    final_order_.push_back(index);
  }
  if (*no_syncs_ > 0) return;
  if (slot.final)
    throw Error(ErrorCode::bad_argument,
                fmt::format("gradient_reducer: the gradient of \"{}\" became final twice; several backward "
                            "passes before finish() need no_sync() around all but the last",
                            slot.parameter->path()));
  slot.final = true;
  if (slot.set == kNoSet) return;
  note_history();
  BucketReducer& reducer = *reduced_[slot.set]->reducer;
  const std::int64_t before = reducer.posted_early();
  reducer.ready(slot.entry);
  posted_early_ += reducer.posted_early() - before;
}

NoSync GradientReducer::no_sync() {
  for (const Slot& slot : slots_)
    if (slot.final)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format(
              "gradient_reducer: no_sync() after the gradient of \"{}\" became final; finish() comes first",
              slot.parameter->path()));
  return NoSync(no_syncs_);
}

// The message of every rank about the parameters: for each parameter its place in the order of the first pass
// and its gradient's placements; also a digest of the list of paths and sizes, and hashes of the values. The
// first rank's order is used. Placements that one rank does not know (it did not use the parameter) are taken
// from a rank that knows them.
GradientReducer::Agreement GradientReducer::agree(const std::optional<Error>& fault) {
  const std::size_t n = slots_.size();
  std::vector<const Parameter*> listed(trained_.begin(), trained_.end());
  listed.insert(listed.end(), frozen_.begin(), frozen_.end());
  const auto axis_count = static_cast<std::size_t>(axes_.root().shape().axis_count());
  std::vector<std::uint64_t> own(final_order_.begin(), final_order_.end());
  for (std::size_t i = n; i-- > 0;)
    if (!slots_[i].seen) own.push_back(i);
  for (const Slot& slot : slots_)
    for (std::size_t a = 0; a < axis_count; ++a)
      own.push_back(static_cast<std::uint64_t>(
          slot.seen && slot.use != nullptr ? encode(slot.use->placements[a]) : kUnknown));
  // Parts of a parameter that is sharded along the axes may differ in size.
  const auto size = [&](std::size_t i) {
    const Parameter& p = *listed[i];
    const bool cut =
        std::any_of(each_axis_.begin(), each_axis_.end(), [&](const DeviceMesh& a) { return is_cut(p, a); });
    return cut || !p.materialised() ? p.global_shape().count() : p.master().count();
  };
  // The axes along which a parameter is sharded: its values are not compared over these axes.
  const auto cut_along = [&](std::size_t i) {
    std::string axes;
    for (const DeviceMesh& axis : each_axis_)
      if (is_cut(*listed[i], axis)) axes += (axes.empty() ? "" : ", ") + axis.name();
    return axes;
  };
  const auto digest = [&](std::size_t i) {
    return digest_of(hash_of(listed[i]->path()), size(i), listed[i]->has_values(), i < n,
                     hash_of(cut_along(i)));
  };
  const auto text = [&](std::size_t i) {
    const std::string axes = cut_along(i);
    return fmt::format("\"{}\" (x{}{}{}{})", listed[i]->path(), size(i),
                       axes.empty() ? "" : ", cut along " + axes,
                       listed[i]->has_values() ? ", with values" : "", i < n ? "" : ", frozen");
  };
  ListDigest list;
  ReplicaBits values(axes_, &slots_[0].parameter->compute());
  std::vector<const Parameter*> compared;
  for (std::size_t i = 0; i < listed.size(); ++i) {
    list.add(digest(i));
    const Parameter& p = *listed[i];
    std::vector<int> along;
    for (const DeviceMesh& axis : reduced_along(p)) along.push_back(axis.root_axes()[0]);
    if (along.empty() || fault || !p.has_values()) continue;
    values.add(p.master().view(), along);
    compared.push_back(&p);
  }
  const std::vector<std::uint64_t> all = values.compare(
      "gradient_reducer", list, own,
      [&] {
        return ListEntries{"parameter", listed.size(), digest, text};
      },
      fault);
  values.expect_same("gradient_reducer",
                     [&](std::size_t i) { return std::string_view(compared[i]->path()); });

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

// `place`: the placement that `rank` reports. The ranks before it agreed.
void GradientReducer::agree_on_place(Agreement& agreed, std::size_t i, std::size_t axis, int rank,
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
      fmt::format("gradient_reducer: the gradient of \"{}\" is {} on {} for {}, but {} for {}",
                  slots_[i].parameter->path(), to_string(decode(known)),
                  axes_.root().shape().name(static_cast<int>(axis)), name_axis_rank(axes_, agreed.told_by[i]),
                  to_string(decode(place)), name_axis_rank(axes_, rank)),
      Op::none,
      kNoCall,
      {agreed.told_by[i], rank}});
}

// Buckets lie on the device of the gradients. On a device they must be ordered on the stream of the code that
// writes them.
Compute* GradientReducer::compute_of_buckets() const {
  Compute& first = slots_[0].parameter->compute();
  Compute* const compute =
      options_.compute == nullptr && first.device() != Device{} ? &first : options_.compute;
  for (const Slot& slot : slots_) {
    const Compute& its = slot.parameter->compute();
    if (const std::string fault = device_fault(its.device(), compute); !fault.empty())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("gradient_reducer: \"{}\" {}", slot.parameter->path(), fault));
    if (compute != nullptr && its.stream() != compute->stream())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("gradient_reducer: \"{}\" was materialised with another Compute of {} than {}",
                              slot.parameter->path(), to_string(its.device()),
                              options_.compute == nullptr ? fmt::format("\"{}\"", slots_[0].parameter->path())
                                                          : "options.compute"));
  }
  return compute;
}

std::vector<DeviceMesh> GradientReducer::reduced_along(const Parameter& parameter) const {
  std::vector<DeviceMesh> along;
  for (const DeviceMesh& axis : each_axis_)
    if (!is_cut(parameter, axis)) along.push_back(axis);
  return along;
}

// The set of axes over which its gradient is reduced, by its place in reduced_; kNoSet: there is none.
std::size_t GradientReducer::set_of(const Slot& slot) {
  std::vector<std::string> axes;
  for (const DeviceMesh& axis : reduced_along(*slot.parameter)) axes.push_back(axis.name());
  if (axes.empty()) return kNoSet;
  for (std::size_t set = 0; set < reduced_.size(); ++set)
    if (reduced_[set]->axes == axes) return set;
  reduced_.push_back(std::make_unique<Reduced>(Reduced{std::move(axes), {}, nullptr}));
  return reduced_.size() - 1;
}

void GradientReducer::make_reducers() {
  Compute* compute = nullptr;
  const Agreement agreed = agree(fault_of([&] { compute = compute_of_buckets(); }));
  reduced_.clear();
  for (const std::size_t index : agreed.order) {
    Slot& slot = slots_[index];
    Placements places;
    for (const std::int64_t place : agreed.places[index])
      places.push_back(place == kUnknown ? Placement(Partial{}) : decode(place));
    if (const LayoutRef layout = slot.parameter->layout(); layout != nullptr && slot.use == nullptr)
      slot.use = agreed.places[index][0] == kUnknown ? layout : layout->with(places);
    for (const DeviceMesh& axis : reduced_along(*slot.parameter))  // used by no rank: a sum of zeros
      if (!slot.op)
        slot.op = std::get<Partial>(is_sum_or_avg(places[static_cast<std::size_t>(axis.root_axes()[0])])
                                        ? places[static_cast<std::size_t>(axis.root_axes()[0])]
                                        : Placement(Partial{}))
                      .op;
    slot.set = set_of(slot);
    if (slot.set == kNoSet) continue;
    std::vector<BucketEntry>& entries = reduced_[slot.set]->entries;
    slot.entry = entries.size();
    entries.push_back({slot.parameter->path(), slot.parameter->master().count(), DType::f32,
                       WEFT_MUTANT("gradients_averaged") ? ReduceOp::avg : slot.op.value_or(ReduceOp::sum)});
  }
  if (reduced_.size() > 1 && options_.hook.start) {  // layouts are the same on all ranks, which all throw
    for (Slot& slot : slots_) slot.set = kNoSet;
    const std::size_t sets = reduced_.size();
    reduced_.clear();
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "gradient_reducer: options.hook \"{}\" sees the buckets of one set of axes; parameters that are "
            "cut along some of {} are reduced over {} sets: give them a GradientReducer of their own",
            options_.hook.name, axes_.name(), sets));
  }
  BucketOptions options = options_;
  options.compute = compute;
  // this class decides which gradients are missing: it also knows earlier passes
  options.unused = Unused::zeros;
  for (const std::unique_ptr<Reduced>& r : reduced_)
    r->reducer = std::make_unique<BucketReducer>(
        r->axes.size() == each_axis_.size() ? axes_ : axes_.root().submesh(r->axes), std::move(r->entries),
        options);
  for (const Slot& slot : slots_)
    if (slot.set != kNoSet)
      slot.parameter->place_gradient(
          reduced_[slot.set]->reducer->tensor(slot.entry).reshape(slot.parameter->local_shape()));
  made_reducers_ = true;
  // The values are equal on all ranks; from here on the ranks compare the steps of the optimizers.
  for (const Parameter* p : trained_) set_history(*p, 0);
}

// Records, once in a step and before its first reduction, the origin of the values whose gradients are
// reduced.
void GradientReducer::note_history() {
  if (noted_history_ || reduced_.empty()) return;
  noted_history_ = true;
  const std::uint64_t history = history_of(trained_, is_trained);
  for (const std::unique_ptr<Reduced>& r : reduced_) r->reducer->set_history(history);
}

// All ranks reduce all gradients in any case, even missing ones: a rank that threw at once would leave the
// others waiting. A missing gradient counts as zero until expect_none_missing() has compared the ranks.
void GradientReducer::finish() { finish(false); }

void GradientReducer::give_up() noexcept {
  try {
    finish(true);
  } catch (...) {}
  for (const Slot& slot : slots_)
    if (slot.parameter->has_gradient()) slot.parameter->zero_gradient();
}

void GradientReducer::finish(bool failed) {
  if (*no_syncs_ > 0)
    throw Error(ErrorCode::bad_argument,
                "gradient_reducer: finish() inside no_sync(); end that scope before the last pass");
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].parameter->has_gradient() && !failed) expect_partial(i);
  if (!each_axis_.empty() && !made_reducers_ && !slots_.empty()) make_reducers();
  note_history();
  noted_history_ = false;  // the next step's calls come

  std::vector<std::vector<std::size_t>> given(reduced_.size());  // by set, on this rank
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.parameter->has_gradient()) {
      if (slot.set != kNoSet) given[slot.set].push_back(slot.entry);
      if (failed) unused.push_back(i);
    } else {
      unused.push_back(i);
      slot.parameter->state_gradient(slot.use != nullptr ? slot.use : slot.parameter->layout());
      const Tensor& gradient = slot.parameter->gradient();
      kernels::fill(kernels_of(slot.parameter->compute()), gradient.data_ptr<float>(), 0.0f,
                    gradient.count());
    }
  }
  // This is done even if the reduction throws: the next step begins again.
  for (Slot& slot : slots_) slot.final = false;
  // One set is reduced after the other: the first step compares ranks and makes groups, and all ranks must do
  // this in one order.
  std::exception_ptr first_failure;
  for (std::size_t set = 0; set < reduced_.size(); ++set) {
    BucketReducer& reducer = *reduced_[set]->reducer;
    try {
      for (const std::size_t entry : given[set])
        if (!reducer.is_ready(entry)) reducer.ready(entry);
      reducer.finish();
    } catch (...) {
      if (!first_failure) first_failure = std::current_exception();
    }
  }
  if (first_failure) std::rethrow_exception(first_failure);

  if (options_.unused == Unused::zeros) expect_none_failed(axes_, failed);
  if (options_.unused == Unused::error) {
    try {
      dp::expect_none_missing(
          {"gradient_reducer: no backward pass used", "GradientReducerOptions"}, axes_, slots_.size(), unused,
          [this](std::size_t i) { return std::string_view(slots_[i].parameter->path()); });
    } catch (...) {
      for (const std::size_t i : unused) slots_[i].parameter->zero_gradient();
      throw;
    }
  }
  for (const Slot& slot : slots_)
    if (LayoutRef layout = slot.parameter->gradient_layout(); layout != nullptr) {
      for (const DeviceMesh& axis : axes_.each_axis())
        if (!is_cut(*slot.parameter, axis)) layout = layout->with(axis, Replicate{});
      slot.parameter->set_gradient_layout(layout);
    }
}

void forget_history(const Parameter& parameter) { set_history(parameter, 0); }

std::vector<std::int64_t> GradientReducer::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const std::unique_ptr<Reduced>& r : reduced_)
    for (const std::int64_t of_bucket : r->reducer->bucket_bytes()) bytes.push_back(of_bucket);
  return bytes;
}

}  // namespace weft
