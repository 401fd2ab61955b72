#include "weft/dp/averaging.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::int64_t kAlignment = 16;  // elements: each gradient begins a cache line of its bucket
constexpr std::size_t kNowhere = ~std::size_t{0};
enum Kind : std::int64_t {
  kUnknown = -1,
  kSum = 0,
  kAvg = 1
};  // what a rank knows of a gradient's placement

Kind kind_of(const Placement& placement) {
  if (placement == Placement(Partial{ReduceOp::sum})) return kSum;
  if (placement == Placement(Partial{ReduceOp::avg})) return kAvg;
  return kUnknown;
}

ReduceOp reduction(std::int64_t kind) { return kind == kAvg ? ReduceOp::avg : ReduceOp::sum; }

}  // namespace

struct GradientAverager::Slot {
  Parameter* parameter = nullptr;
  int listener = 0;
  Kind kind = kUnknown;           // sum or avg, once seen
  std::size_t bucket = kNowhere;  // where its gradient lives
  std::int64_t offset = 0;
  bool seen = false;   // final in any pass so far
  bool final = false;  // in this pass

  Tensor gradient_in(const Tensor& memory) const {
    return memory.slice_flat(offset, parameter->local_shape());
  }
};

struct GradientAverager::Bucket {
  Kind kind = kSum;
  std::int64_t count = 0;    // elements, gaps for alignment included
  std::int64_t members = 0;  // gradients in it
  std::int64_t pending = 0;  // of them, those not final in this pass
  Tensor memory;             // (count), shared
  Work work;
};

GradientAverager::GradientAverager(std::vector<Parameter*> parameters, DeviceMesh axis, Options options)
    : axis_(std::move(axis)), options_(options) {
  axis_.root_axis();  // throws for a mesh of several axes
  if (options_.bucket_bytes < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("averager: bucket_bytes is {}; expected at least 1", options_.bucket_bytes));
  slots_.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    slots_[i].parameter = parameters[i];
    slots_[i].listener = parameters[i]->listen([this, i](Parameter&) { became_final(i); });
  }
}

GradientAverager::~GradientAverager() {
  for (const Slot& slot : slots_) slot.parameter->stop_listening(slot.listener);
}

void GradientAverager::expect_partial(std::size_t index) {
  Slot& slot = slots_[index];
  if (axis_.size() == 1) return;
  const std::string what = fmt::format("averager: the gradient of \"{}\"", slot.parameter->path());
  const Placement placement = placement_on(slot.parameter->gradient(), axis_, what);
  const Kind kind = kind_of(placement);
  if (kind == kUnknown)
    throw Error(
        ErrorCode::layout,
        fmt::format("{} is {} on {}={}; expected Partial(sum), or Partial(avg): there is nothing to reduce",
                    what, to_string(placement), axis_.name(), axis_.size()));
  if (slot.kind != kUnknown && slot.kind != kind)
    throw Error(ErrorCode::layout,
                fmt::format("{} is {} on {}={}; in the passes before it was Partial({})", what,
                            to_string(placement), axis_.name(), axis_.size(), name(reduction(slot.kind))));
  slot.kind = kind;
}

void GradientAverager::became_final(std::size_t index) {
  if (finishing_) return;  // zeros that finish() itself put in the place of a gradient
  Slot& slot = slots_[index];
  expect_partial(index);
  if (!slot.seen) {
    slot.seen = true;
    final_order_.push_back(index);
  }
  if (!sync_) return;
  if (slot.final)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("averager: the gradient of \"{}\" became final twice; several backward passes before "
                    "finish() need set_sync(false) for all but the last",
                    slot.parameter->path()));
  slot.final = true;
  if (buckets_.empty()) return;
  --buckets_[slot.bucket].pending;
  const std::size_t before = posted_;
  post_ready();
  posted_early_ += static_cast<std::int64_t>(posted_ - before);
  while (done_ < posted_ && buckets_[done_].work.done()) ++done_;
}

void GradientAverager::post_ready() {
  for (; posted_ < buckets_.size() && buckets_[posted_].pending == 0; ++posted_) {
    Bucket& bucket = buckets_[posted_];
    bucket.work = axis_.group().all_reduce(bucket.memory, bucket.memory, {.op = reduction(bucket.kind)});
  }
}

// What every rank must agree on before buckets can be cut: for each parameter its place in the order of the
// first pass, its kind and its size. Each rank tells all three; the first rank's order holds, and a kind that
// one rank does not know (it did not use the parameter) is taken from one that does.
GradientAverager::Agreement GradientAverager::agree() {
  std::vector<std::size_t> order = final_order_;
  for (std::size_t i = slots_.size(); i-- > 0;)
    if (!slots_[i].seen) order.push_back(i);
  std::vector<std::int64_t> own;
  for (const std::size_t index : order) own.push_back(static_cast<std::int64_t>(index));
  for (const Slot& slot : slots_) own.push_back(slot.kind);
  for (const Slot& slot : slots_) own.push_back(slot.parameter->value().count());
  std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(axis_.size()));
  axis_.group().all_gather(view(own), view(all)).wait();

  const std::size_t n = slots_.size();
  Agreement agreed;
  for (std::size_t i = 0; i < n; ++i) agreed.order.push_back(static_cast<std::size_t>(all[i]));
  agreed.kinds.assign(n, kUnknown);
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(axis_.size()); ++rank) {
    const std::int64_t* const kinds = all.data() + rank * own.size() + n;
    const std::int64_t* const counts = kinds + n;
    for (std::size_t i = 0; i < n; ++i) {
      const std::string& path = slots_[i].parameter->path();
      if (counts[i] != all[2 * n + i])
        throw Error(
            Failure{ErrorCode::mismatch,
                    fmt::format("averager: parameter {} (\"{}\" here) has {} elements on {} rank {}, {} on "
                                "rank 0",
                                i, path, counts[i], axis_.name(), rank, all[2 * n + i]),
                    Op::none,
                    kNoCall,
                    {0, static_cast<int>(rank)}});
      if (kinds[i] != kUnknown && agreed.kinds[i] != kUnknown && kinds[i] != agreed.kinds[i])
        throw Error(
            Failure{ErrorCode::mismatch,
                    fmt::format("averager: the gradient of \"{}\" is Partial({}) on {} rank {}, not on a "
                                "rank before it",
                                path, name(reduction(kinds[i])), axis_.name(), rank),
                    Op::none,
                    kNoCall,
                    {static_cast<int>(rank)}});
      if (kinds[i] != kUnknown) agreed.kinds[i] = kinds[i];
    }
  }
  return agreed;
}

void GradientAverager::make_buckets() {
  if (slots_.empty()) return;
  const Agreement agreed = agree();
  std::size_t open[] = {kNowhere, kNowhere};  // by kind
  for (const std::size_t index : agreed.order) {
    Slot& slot = slots_[index];
    slot.kind = agreed.kinds[index] == kAvg ? kAvg : kSum;
    std::size_t& at = open[slot.kind];
    if (at == kNowhere) {
      at = buckets_.size();
      buckets_.emplace_back();
      buckets_.back().kind = slot.kind;
    }
    Bucket& bucket = buckets_[at];
    slot.bucket = at;
    slot.offset = bucket.count;
    bucket.count += (slot.parameter->value().count() + kAlignment - 1) / kAlignment * kAlignment;
    ++bucket.members;
    if (bucket.count * size_bytes(DType::f32) >= options_.bucket_bytes) at = kNowhere;
  }
  for (Bucket& bucket : buckets_)
    bucket.memory = Tensor::zeros(axis_.context(), {bucket.count}, DType::f32, Memory::shared);
  for (const Slot& slot : slots_)
    slot.parameter->place_gradient(slot.gradient_in(buckets_[slot.bucket].memory));
}

std::vector<std::size_t> GradientAverager::unused_here() const {
  std::vector<std::size_t> unused;
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (!slots_[i].parameter->has_gradient()) unused.push_back(i);
  return unused;
}

// This rank's gradient of a parameter that it did not use: zeros, of the layout its uses would have given.
void GradientAverager::put_zeros(std::size_t index) {
  Parameter& parameter = *slots_[index].parameter;
  LayoutRef layout = parameter.value().layout();
  if (axis_.size() > 1) layout = layout->with(axis_, Partial{reduction(slots_[index].kind)});
  for (int use = 0; use < parameter.uses(); ++use)
    parameter.accumulate(layout, [](const Tensor& into, bool) {
      std::memset(into.data(), 0, static_cast<std::size_t>(into.bytes()));
    });
}

// One bit per parameter from every rank; throws on all of them where any is set.
void GradientAverager::expect_all_used(const std::vector<std::size_t>& unused) {
  const std::size_t words = (slots_.size() + 63) / 64;
  std::vector<std::int64_t> own(words), all(words * static_cast<std::size_t>(axis_.size()));
  for (const std::size_t i : unused) own[i / 64] |= std::int64_t{1} << (i % 64);
  if (axis_.size() == 1)
    all = own;
  else if (words > 0)
    axis_.group().all_gather(view(own), view(all)).wait();
  std::vector<std::string> found;
  std::vector<int> ranks;
  for (int rank = 0; rank < axis_.size(); ++rank) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if ((all[static_cast<std::size_t>(rank) * words + i / 64] >> (i % 64) & 1) != 0)
        names.push_back('"' + slots_[i].parameter->path() + '"');
    if (names.empty()) continue;
    ranks.push_back(rank);
    found.push_back(fmt::format("{} on {} rank {}", fmt::join(names, ", "), axis_.name(), rank));
  }
  if (!found.empty())
    throw Error(
        Failure{ErrorCode::bad_argument,
                fmt::format("averager: no backward pass used {}; AveragerOptions::unused = zeros lets such "
                            "ranks contribute zeros",
                            fmt::join(found, "; ")),
                Op::none, kNoCall, ranks});
}

// All ranks post all buckets in any case, those with gradients that are missing too: a rank that threw at
// once would leave the others waiting. What is missing counts as zero until the verdict.
void GradientAverager::finish() {
  for (std::size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].parameter->has_gradient()) expect_partial(i);
  if (axis_.size() > 1 && buckets_.empty()) make_buckets();
  const std::vector<std::size_t> unused = unused_here();
  finishing_ = true;
  for (const std::size_t i : unused) put_zeros(i);
  finishing_ = false;

  for (Bucket& bucket : buckets_) bucket.pending = 0;
  post_ready();
  for (; done_ < posted_; ++done_)
    if (buckets_[done_].work.valid()) buckets_[done_].work.wait();
  posted_ = done_ = 0;
  for (Bucket& bucket : buckets_) bucket.pending = bucket.members;
  for (Slot& slot : slots_) slot.final = false;

  if (options_.unused == Unused::error) {
    try {
      expect_all_used(unused);
    } catch (...) {
      for (const std::size_t i : unused) slots_[i].parameter->zero_gradient();
      throw;
    }
  }
  for (const Slot& slot : slots_)
    if (const LayoutRef layout = slot.parameter->gradient_layout(); layout != nullptr)
      slot.parameter->set_gradient_layout(layout->with(axis_, Replicate{}));
}

std::vector<std::int64_t> GradientAverager::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const Bucket& bucket : buckets_) bytes.push_back(bucket.memory.bytes());
  return bytes;
}

}  // namespace weft
