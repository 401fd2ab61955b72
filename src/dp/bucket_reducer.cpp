#include "weft/dp/bucket_reducer.hpp"

#include <fmt/format.h>

#include <optional>

#include "base/errors/caught.hpp"
#include "base/mutant.hpp"
#include "dp/bucket_agreement.hpp"
#include "dp/bucket_plan.hpp"
#include "dp/history.hpp"
#include "dp/missing.hpp"
#include "dp/parts.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/mesh_state.hpp"
#include "mesh/same_list.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

[[noreturn]] void bad(const std::string& text) { dp::refuse_bucket(text); }

struct Bucket {
  dp::PlannedBucket plan;
  std::size_t pending = 0;        // the number of its gradients that are not ready
  std::byte* in_place = nullptr;  // not null: its single gradient is reduced in the caller's memory
  Tensor memory;                  // (bytes / element), shared
  Work work;
};

struct Slot {
  dp::Place place;
  std::byte* bound = nullptr;  // the caller's memory
  bool ready = false;
  bool accumulated = false;  // has a value of a pass inside no_sync()
};

}  // namespace

struct BucketReducer::Impl {
  Impl(DeviceMesh axes_in, std::vector<BucketEntry> entries_in, const BucketOptions& options_in)
      : axes(given_mesh("bucket_reducer", axes_in)),
        entries(std::move(entries_in)),
        options(options_in),
        device(dp::stream_of(options.compute).device),
        slots(entries.size()),
        user(
            detail::MeshAccess::state(axes).users_along({axes.root_axes().begin(), axes.root_axes().end()})) {
    if (const std::optional<Error> fault = fault_of([&] { make_buckets(); })) tell_all(*fault);
  }

  void make_buckets() {
    dp::BucketPlan plan = dp::plan_buckets(entries, options);
    for (std::size_t i = 0; i < entries.size(); ++i) slots[i].place = plan.places[i];
    for (dp::PlannedBucket& planned : plan.buckets) {
      Bucket& b = buckets.emplace_back();
      b.plan = std::move(planned);
      b.pending = b.plan.members.size();
      b.memory = Tensor::zeros(axes.context(), {b.plan.bytes / size_bytes(b.plan.dtype)}, b.plan.dtype,
                               Memory::shared, stream());
    }
  }

  // Throws the fault of this rank. Before the first step the other ranks learn of the fault in the comparison
  // with which their step begins. This rank takes part in that comparison here.
  [[noreturn]] void tell_all(const Error& fault) const {
    if (compared) throw Error(fault);
    throw_told("bucket_reducer", axes, fault);
  }

  std::size_t checked(std::size_t i) const {
    if (i >= entries.size()) bad(fmt::format("i is {}; expected less than {}", i, entries.size()));
    return i;
  }

  // Memory bound to gradient i must belong to no other gradient.
  void expect_apart(std::size_t i, const TensorView& data) const {
    for (const Bucket& b : buckets)
      if (b.memory.data() != nullptr && overlap(data, b.memory.view()))
        bad(fmt::format("bind of \"{}\": data lies in the reducer's own memory, where slot() points to",
                        entries[i].name));
    for (std::size_t k = 0; k < entries.size(); ++k)
      if (k != i && slots[k].bound != nullptr &&
          overlap(data,
                  {slots[k].bound, entries[k].dtype, device, Dims::line(entries[k].count), Dims::line(1)}))
        bad(fmt::format("bind of \"{}\": data overlaps the data of \"{}\"", entries[i].name,
                        entries[k].name));
  }

  void expect_bindable(std::size_t i, const TensorView& data) const {
    const BucketEntry& e = entries[checked(i)];
    if (slots[i].ready) bad(fmt::format("bind of \"{}\" between ready() and finish()", e.name));
    if (const std::string fault = memory_fault(data); !fault.empty())
      bad(fmt::format("bind of \"{}\": data {}", e.name, fault));
    if (data.dtype != e.dtype || data.count() != e.count)
      bad(fmt::format("bind of \"{}\": data is {} x{}; expected {} x{}, contiguous", e.name, name(data.dtype),
                      data.count(), name(e.dtype), e.count));
    if (const std::string fault = device_fault(data.device, options.compute); !fault.empty())
      bad(fmt::format("bind of \"{}\": data {}", e.name, fault));
    expect_apart(i, data);
  }

  // The place of gradient i in its bucket. A bucket that is reduced in the caller's memory lies in that
  // memory.
  std::byte* place(std::size_t i) const {
    const Bucket& b = buckets[slots[i].place.bucket];
    return b.in_place != nullptr ? b.in_place : b.memory.data() + slots[i].place.offset;
  }
  std::int64_t bytes_of(std::size_t i) const { return entries[i].count * size_bytes(entries[i].dtype); }
  Stream stream() const noexcept { return dp::stream_of(options.compute); }
  bool is_copied(std::size_t i) const { return slots[i].bound != nullptr && slots[i].bound != place(i); }

  bool in_place(std::size_t i) const { return buckets[slots[i].place.bucket].in_place != nullptr; }
  // Once, in one all-gather.
  void compare() {
    if (compared || axes.size() == 1 || WEFT_MUTANT("buckets_unseen")) return;
    dp::expect_same_reducers(axes,
                             {entries, options, user.value(), [this](std::size_t i) { return in_place(i); }});
    if (user.value() > 0) own_group = axes.group().duplicate();
    compared = true;
  }

  // Calls of several reducers over the same axes may come in a different order on each rank, so each reducer
  // has its own group.
  ProcessGroup& group() const { return own_group ? own_group : axes.group(); }

  bool is_sent(const Bucket& b) const { return axes.size() > 1 && b.plan.bytes > 0; }

  ReadyBucket as_ready(std::size_t number) const {
    const Bucket& b = buckets[number];
    const TensorView memory = b.in_place == nullptr
                                  ? b.memory.view()
                                  : TensorView{b.in_place, b.plan.dtype, device,
                                               Dims::line(entries[b.plan.members[0]].count), Dims::line(1)};
    return {number, memory, b.plan.op, b.plan.members, group(), stream()};
  }

  // Runs the program's own code. If that code throws, the other ranks would wait for this rank.
  template <class F>
  void run_hook(const F& step) const {
    try {
      step();
    } catch (...) {
      group().abort(
          fmt::format("bucket_reducer: the hook \"{}\" failed: {}", options.hook.name, caught_words()));
      throw;
    }
  }

  void post(std::size_t number) {
    Bucket& b = buckets[number];
    const ReadyBucket ready = as_ready(number);
    if (b.work.valid()) b.work.wait();
    if (options.hook.start)
      run_hook([&] { b.work = options.hook.start(ready); });
    else
      b.work = group().all_reduce(ready.data, ready.data,
                                  {.op = ready.op, .tag = dp::history_tag(history), .stream = ready.stream});
  }

  // On a device the stream waits, and the next step checks how the call ended.
  void wait(std::size_t number) {
    Bucket& b = buckets[number];
    if (b.work.valid()) {
      if (dp::on_device(options.compute))
        b.work.wait_on(stream());
      else
        b.work.wait();
    }
    if (options.hook.finish && is_sent(b)) run_hook([&] { options.hook.finish(as_ready(number)); });
  }

  // First ends reductions of a finished step for which only a stream has waited.
  ~Impl() {
    for (std::size_t b = posted; b < buckets.size(); ++b) try {
        if (buckets[b].work.valid()) buckets[b].work.wait();
      } catch (const std::exception& e) {  // no caller is left to throw to
        axes.context().log().write(LogLayer::dp, LogLevel::warning,
                                   fmt::format("bucket_reducer: {}", e.what()));
      }
  }

  void start_step() {
    posted = done = 0;
    for (Bucket& b : buckets) b.pending = b.plan.members.size();
    for (Slot& slot : slots) slot.ready = slot.accumulated = false;
  }

  // Runs the functions that communicate. After a failed reduction nothing can be reduced any more, and every
  // later call throws this failure. After a failed comparison the step begins again: another reducer may have
  // failed on another rank, so both compare again.
  template <class F>
  void communicate(const F& step) {
    try {
      dp::in_history_words("bucket_reducer", step);
    } catch (const Error& e) {
      if (compared)
        failure = e;
      else
        start_step();
      throw;
    } catch (...) {  // of a hook
      failure.emplace(ErrorCode::aborted, caught_words());
      throw;
    }
  }
  void expect_sound() const {
    if (!failure) return;
    throw Error(Failure{failure->code(),
                        fmt::format("bucket_reducer: an earlier reduction failed: {}", failure->what()),
                        failure->op(),
                        kNoCall,
                        {failure->ranks().begin(), failure->ranks().end()}},
                failure->quiesced());
  }

  void copy_in(std::size_t i) const {
    dp::copy_all(options.compute, 1, [&](std::size_t) {
      return dp::Copied{slots[i].bound, place(i), is_copied(i) ? bytes_of(i) : 0};
    });
  }
  void copy_all_back() const {
    dp::copy_all(options.compute, entries.size(), [&](std::size_t i) {
      return dp::Copied{place(i), slots[i].bound, is_copied(i) ? bytes_of(i) : 0};
    });
  }
  void clear(std::size_t i) const {
    if (bytes_of(i) > 0)
      axes.context().device(device).fill(place(i), 0, {static_cast<std::size_t>(bytes_of(i))}, stream());
  }

  void mark_ready(std::size_t i) {
    Slot& slot = slots[i];
    copy_in(i);
    slot.ready = true;
    --buckets[slot.place.bucket].pending;
  }

  void post_ready() {
    const std::size_t most = WEFT_MUTANT("bucket_early") ? 1 : 0;
    for (; posted < buckets.size() && buckets[posted].pending <= most; ++posted) {
      if (!is_sent(buckets[posted])) continue;
      compare();
      post(posted);
    }
  }

  DeviceMesh axes;
  mutable ProcessGroup own_group;  // empty: that of the axes
  std::vector<BucketEntry> entries;
  BucketOptions options;
  const Device device;  // the device of buckets and gradients
  std::vector<Slot> slots;
  std::vector<Bucket> buckets;  // in the order they are posted
  std::size_t posted = 0;       // buckets posted in this step
  std::size_t done = 0;         // the number of them that are known to be done
  std::int64_t posted_early = 0;
  std::uint64_t history = 0;
  bool compared = false;
  std::optional<Error> failure;                                    // of the first call that failed
  const std::shared_ptr<int> no_syncs = std::make_shared<int>(0);  // existing ones
  // The number of this reducer among the existing reducers that would share a group. It is equal on all
  // ranks, which make and destroy reducers in the same order.
  UserNumbers::Taken user;
};

BucketReducer::BucketReducer(DeviceMesh axes, std::vector<BucketEntry> entries, const BucketOptions& options)
    : impl_(std::make_unique<Impl>(std::move(axes), std::move(entries), options)) {}
BucketReducer::~BucketReducer() = default;
BucketReducer::BucketReducer(BucketReducer&&) noexcept = default;
BucketReducer& BucketReducer::operator=(BucketReducer&&) noexcept = default;

std::size_t BucketReducer::size() const noexcept { return impl_->entries.size(); }
const BucketEntry& BucketReducer::entry(std::size_t i) const { return impl_->entries[impl_->checked(i)]; }

TensorView BucketReducer::slot(std::size_t i) const {
  const BucketEntry& e = entry(i);
  return {impl_->place(i), e.dtype, impl_->device, Dims::line(e.count), Dims::line(1)};
}

Tensor BucketReducer::tensor(std::size_t i) const {
  const BucketEntry& e = entry(i);
  const Slot& slot = impl_->slots[i];
  if (slot.bound != nullptr)
    bad(fmt::format("tensor of \"{}\", which is bound to the caller's memory", e.name));
  return impl_->buckets[slot.place.bucket].memory.slice_flat(slot.place.offset / size_bytes(e.dtype),
                                                             Shape{e.count});
}

void BucketReducer::bind(std::size_t i, const TensorView& data) {
  if (const std::optional<Error> fault = fault_of([&] { impl_->expect_bindable(i, data); }))
    impl_->tell_all(*fault);
  Slot& slot = impl_->slots[i];
  slot.bound = data.data;
  Bucket& bucket = impl_->buckets[slot.place.bucket];
  if (bucket.plan.members.size() == 1 && bucket.plan.bytes >= impl_->options.bucket_bytes) {
    bucket.in_place = data.data;
    bucket.memory = {};  // nobody needs it
  }
}

void BucketReducer::ready(std::size_t i) {
  impl_->checked(i);
  impl_->expect_sound();
  Slot& slot = impl_->slots[i];
  if (slot.ready)
    bad(fmt::format("\"{}\" is ready twice; call finish() between two steps", impl_->entries[i].name));
  if (*impl_->no_syncs > 0) {
    slot.accumulated = true;
    return;
  }
  impl_->mark_ready(i);
  impl_->communicate([&] {
    const std::size_t before = impl_->posted;
    impl_->post_ready();
    for (std::size_t b = before; b < impl_->posted; ++b)
      impl_->posted_early += impl_->is_sent(impl_->buckets[b]);
    for (; impl_->done < impl_->posted; ++impl_->done)
      if (Work& work = impl_->buckets[impl_->done].work; work.valid() && !work.done()) break;
  });
}

bool BucketReducer::is_ready(std::size_t i) const { return impl_->slots[impl_->checked(i)].ready; }

NoSync BucketReducer::no_sync() {
  for (std::size_t i = 0; i < size(); ++i)
    if (impl_->slots[i].ready)
      bad(fmt::format("no_sync() after \"{}\" became ready; call finish() first", impl_->entries[i].name));
  return NoSync(impl_->no_syncs);
}

// All ranks post all buckets in any case, even buckets with missing gradients. A rank that threw at once
// would leave the others waiting. A missing gradient counts as zero until expect_none_missing() has compared
// the ranks.
void BucketReducer::finish() {
  impl_->expect_sound();
  if (*impl_->no_syncs > 0) bad("finish() inside no_sync(); end that scope before the last pass");
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < size(); ++i)
    if (!impl_->slots[i].ready && impl_->slots[i].accumulated) {
      impl_->mark_ready(i);
    } else if (!impl_->slots[i].ready) {
      missing.push_back(i);
      impl_->clear(i);
    }
  impl_->communicate([&] {
    impl_->compare();
    for (Bucket& b : impl_->buckets) b.pending = 0;
    impl_->post_ready();
    for (std::size_t b = 0; b < impl_->buckets.size(); ++b) impl_->wait(b);
  });
  impl_->copy_all_back();
  impl_->start_step();
  if (impl_->options.unused == Unused::error)
    dp::expect_none_missing(
        {"bucket_reducer: ready() was not called for", "BucketOptions"}, impl_->axes, size(), missing,
        [this](std::size_t i) { return std::string_view(impl_->entries[i].name); },
        impl_->own_group ? &impl_->own_group : nullptr);
}

void BucketReducer::set_history(std::uint64_t digest) noexcept { impl_->history = digest; }

std::vector<std::int64_t> BucketReducer::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const Bucket& b : impl_->buckets) bytes.push_back(b.plan.bytes);
  return bytes;
}

std::int64_t BucketReducer::posted_early() const noexcept { return impl_->posted_early; }

}  // namespace weft
