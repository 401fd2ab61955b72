#include "weft/dp/bucket_reducer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "base/hash.hpp"
#include "dp/axis_ranks.hpp"
#include "dp/missing.hpp"
#include "dp/same_list.hpp"
#include "dp/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: each gradient begins a cache line of its bucket

[[noreturn]] void bad(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "bucket_reducer: " + text);
}

struct Bucket {
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  std::int64_t bytes = 0;            // gaps for alignment included
  std::vector<std::size_t> members;  // gradients in it
  std::size_t pending = 0;           // of them, those that are not ready
  std::byte* in_place = nullptr;     // not null: its one gradient is reduced where the caller has it
  Tensor memory;                     // (bytes / element), shared
  Work work;
};

struct Slot {
  std::size_t bucket = 0;
  std::int64_t offset = 0;     // bytes
  std::byte* bound = nullptr;  // the caller's memory
  bool ready = false;
};

// The number of a reducer among those alive that would share a group, from 0: the same on all ranks that make and
// destroy them in the same order.
class Ordinal {
 public:
  explicit Ordinal(const DeviceMesh& axes) : key_(key_of(axes)) {
    const std::lock_guard lock(mutex());
    std::set<int>& taken = all()[key_];
    while (taken.count(value_) != 0) ++value_;
    taken.insert(value_);
  }
  ~Ordinal() {
    const std::lock_guard lock(mutex());
    const auto entry = all().find(key_);
    entry->second.erase(value_);
    if (entry->second.empty()) all().erase(entry);
  }
  Ordinal(const Ordinal&) = delete;
  Ordinal& operator=(const Ordinal&) = delete;
  int value() const noexcept { return value_; }

 private:
  // What has one group: the mesh and its axes of several ranks; or, of all ranks, the group that meshes were made
  // of, whichever mesh. Nothing is sent, and neither goes away before the reducer.
  using Key = std::pair<const void*, std::vector<int>>;
  static Key key_of(const DeviceMesh& axes) {
    const std::vector<int> ranks = axes.ranks();
    const bool all_in_order = axes.size() == axes.root().size() && std::is_sorted(ranks.begin(), ranks.end());
    try {
      if (all_in_order) return {&axes.group(), {}};
    } catch (const Error&) {  // a mesh of arithmetic alone
    }
    const MeshShape root = axes.root().shape();
    Key key(&axes.state(), {});
    for (const int a : axes.root_axes())
      if (root.size(a) > 1) key.second.push_back(a);
    return key;
  }
  static std::mutex& mutex() {
    static std::mutex& lives = *new std::mutex;
    return lives;
  }
  static std::map<Key, std::set<int>>& all() {
    static auto& lives = *new std::map<Key, std::set<int>>;
    return lives;
  }
  Key key_;
  int value_ = 0;
};

}  // namespace

struct BucketReducer::Impl {
  Impl(DeviceMesh axes_in, std::vector<BucketEntry> entries_in, const BucketOptions& options_in)
      : axes(dp::given_mesh("bucket_reducer", axes_in)),
        entries(std::move(entries_in)),
        options(options_in),
        slots(entries.size()),
        ordinal(axes) {
    if (options.bucket_bytes < 1)
      bad(fmt::format("options.bucket_bytes is {}; expected 1 or more", options.bucket_bytes));
    for (const BucketEntry& e : entries) {
      if (e.count < 0) bad(fmt::format("\"{}\" has count {}; expected 0 or more", e.name, e.count));
      if (!(e.op == ReduceOp::sum) && !(e.op == ReduceOp::avg))
        bad(fmt::format("\"{}\" has op {}{}; expected sum or avg", e.name, name(e.op),
                        e.op.scale == 1 ? "" : fmt::format(" with scale {}", e.op.scale)));
      if (!is_floating(e.dtype))
        bad(fmt::format("\"{}\" is {}; expected f64, f32, bf16 or f16", e.name, name(e.dtype)));
    }
    make_buckets();
  }

  // In the order of the entries; a bucket of each (dtype, reduction) is open at a time.
  void make_buckets() {
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const BucketEntry& e = entries[i];
      auto at = std::find_if(open.begin(), open.end(), [&](std::size_t b) {
        return buckets[b].dtype == e.dtype && buckets[b].op == e.op;
      });
      if (at == open.end()) {
        at = open.insert(open.end(), buckets.size());
        Bucket bucket;
        bucket.dtype = e.dtype;
        bucket.op = e.op;
        buckets.push_back(std::move(bucket));
      }
      Bucket& bucket = buckets[*at];
      slots[i].bucket = *at;
      slots[i].offset = bucket.bytes;
      std::int64_t bytes = 0, padded = 0;
      if (__builtin_mul_overflow(e.count, std::int64_t{size_bytes(e.dtype)}, &bytes) ||
          __builtin_add_overflow(bytes, kAlignment - 1, &padded) ||
          __builtin_add_overflow(bucket.bytes, padded / kAlignment * kAlignment, &bucket.bytes))
        bad(fmt::format("\"{}\" has count {}; the bytes of its bucket do not fit 64 bits", e.name, e.count));
      bucket.members.push_back(i);
      if (bucket.bytes >= options.bucket_bytes) open.erase(at);
    }
    for (Bucket& b : buckets) {
      b.pending = b.members.size();
      b.memory = Tensor::zeros(axes.context(), {b.bytes / size_bytes(b.dtype)}, b.dtype, Memory::shared);
    }
  }

  std::size_t checked(std::size_t i) const {
    if (i >= entries.size()) bad(fmt::format("i is {}; expected less than {}", i, entries.size()));
    return i;
  }

  // Memory bound to gradient i is no other's.
  void expect_apart(std::size_t i, const TensorView& data) const {
    for (const Bucket& b : buckets)
      if (b.memory.data() != nullptr && overlap(data, b.memory.view()))
        bad(fmt::format("bind of \"{}\": data lies in the reducer's own memory, where slot() points to",
                        entries[i].name));
    for (std::size_t k = 0; k < entries.size(); ++k)
      if (k != i && slots[k].bound != nullptr &&
          overlap(data, {slots[k].bound, entries[k].dtype, {}, Dims::line(entries[k].count), Dims::line(1)}))
        bad(fmt::format("bind of \"{}\": data overlaps the data of \"{}\"", entries[i].name,
                        entries[k].name));
  }

  // Where gradient i lies in its bucket. A bucket that is reduced in the caller's memory lies there.
  std::byte* place(std::size_t i) const {
    const Bucket& b = buckets[slots[i].bucket];
    return b.in_place != nullptr ? b.in_place : b.memory.data() + slots[i].offset;
  }
  std::size_t bytes_of(std::size_t i) const {
    return static_cast<std::size_t>(entries[i].count * size_bytes(entries[i].dtype));
  }
  bool is_copied(std::size_t i) const { return slots[i].bound != nullptr && slots[i].bound != place(i); }

  // Once.
  void compare() {
    if (compared || axes.size() == 1) return;
    const auto in_place = [&](std::size_t i) { return buckets[slots[i].bucket].in_place != nullptr; };
    const auto digest = [&](std::size_t i) {
      const BucketEntry& e = entries[i];
      return digest_of(hash_of(e.name), e.count, static_cast<int>(e.dtype), static_cast<int>(e.op.kind),
                       in_place(i));
    };
    const auto text = [&](std::size_t i) {
      const BucketEntry& e = entries[i];
      return fmt::format("\"{}\" ({} x{} {}{})", e.name, name(e.dtype), e.count, name(e.op),
                         in_place(i) ? ", bound" : "");
    };
    dp::expect_same_list("bucket_reducer", axes, {entries.size(), digest, text});
    expect_same_options();
    if (ordinal.value() > 0) own_group = axes.group().duplicate();
    compared = true;
  }

  void expect_same_options() const {
    const std::vector<std::int64_t> own = {options.bucket_bytes, static_cast<std::int64_t>(options.unused),
                                           ordinal.value()};
    std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(axes.size()));
    axes.group().all_gather(view(own), view(all)).wait();
    const auto told = [&](int rank) { return all.begin() + rank * static_cast<std::ptrdiff_t>(own.size()); };
    const auto text = [&](int rank) {
      return fmt::format("number {} with bucket_bytes {} and unused {} on {}", told(rank)[2], told(rank)[0],
                         told(rank)[1] == static_cast<std::int64_t>(Unused::error) ? "error" : "zeros",
                         dp::name_axis_rank(axes, rank));
    };
    for (int r = 1; r < axes.size(); ++r)
      if (!std::equal(told(0), told(1), told(r)))
        throw Error(Failure{ErrorCode::mismatch,
                            fmt::format("bucket_reducer: the reducer is {}, but {}", text(0), text(r)),
                            Op::none,
                            kNoCall,
                            {0, r}});
  }

  // Calls of several reducers over the same axes may come in another order on each rank: each has a group.
  ProcessGroup& group() const { return own_group ? own_group : axes.group(); }

  void start_step() {
    posted = done = 0;
    for (Bucket& b : buckets) b.pending = b.members.size();
    for (Slot& slot : slots) slot.ready = false;
  }

  // What communicates. After a failed reduction nothing can be reduced any more, and every later call tells of it.
  // After a failed comparison the step begins anew: it may be another reducer that failed on another rank, so that
  // both compare again.
  template <class Step>
  void communicate(const Step& step) {
    try {
      step();
    } catch (const Error& e) {
      if (compared)
        failure = e;
      else
        start_step();
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

  void post_ready() {
    for (; posted < buckets.size() && buckets[posted].pending == 0; ++posted) {
      Bucket& b = buckets[posted];
      if (axes.size() == 1 || b.bytes == 0) continue;
      compare();
      const TensorView memory =
          b.in_place == nullptr
              ? b.memory.view()
              : TensorView{b.in_place, b.dtype, {}, Dims::line(entries[b.members[0]].count), Dims::line(1)};
      b.work = group().all_reduce(memory, memory, {.op = b.op});
    }
  }

  // Throws on all ranks where one of them lacks a gradient.
  void expect_all_ready(const std::vector<std::size_t>& missing) {
    dp::MissingGradients found = dp::gather_missing(
        axes, entries.size(), missing, [&](std::size_t i) { return entries[i].name; },
        own_group ? &own_group : nullptr);
    if (found.text.empty()) return;
    throw Error(
        Failure{ErrorCode::bad_argument,
                fmt::format("bucket_reducer: nobody made ready {}; BucketOptions::unused = zeros lets "
                            "such ranks contribute zeros",
                            found.text),
                Op::none, kNoCall, std::move(found.ranks)});
  }

  DeviceMesh axes;
  mutable ProcessGroup own_group;  // empty: that of the axes
  std::vector<BucketEntry> entries;
  BucketOptions options;
  std::vector<Slot> slots;
  std::vector<Bucket> buckets;  // in the order they are posted
  std::size_t posted = 0;       // buckets posted in this step
  std::size_t done = 0;         // of them, those seen to be done
  std::int64_t posted_early = 0;
  bool compared = false;
  std::optional<Error> failure;  // of the first call that failed
  Ordinal ordinal;
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
  return {impl_->place(i), e.dtype, {}, Dims::line(e.count), Dims::line(1)};
}

Tensor BucketReducer::tensor(std::size_t i) const {
  const BucketEntry& e = entry(i);
  const Slot& slot = impl_->slots[i];
  if (slot.bound != nullptr)
    bad(fmt::format("tensor of \"{}\", which is bound to the caller's memory", e.name));
  return impl_->buckets[slot.bucket].memory.slice_flat(slot.offset / size_bytes(e.dtype), Shape{e.count});
}

void BucketReducer::bind(std::size_t i, const TensorView& data) {
  const BucketEntry& e = entry(i);
  Slot& slot = impl_->slots[i];
  if (slot.ready) bad(fmt::format("bind of \"{}\" between ready() and finish()", e.name));
  if (const std::string fault = memory_fault(data); !fault.empty())
    bad(fmt::format("bind of \"{}\": data {}", e.name, fault));
  if (data.dtype != e.dtype || data.count() != e.count)
    bad(fmt::format("bind of \"{}\": data is {} x{}; expected {} x{}, contiguous", e.name, name(data.dtype),
                    data.count(), name(e.dtype), e.count));
  if (data.device.kind != DeviceKind::cpu)
    bad(fmt::format("bind of \"{}\": data is on {}; expected cpu", e.name, to_string(data.device)));
  impl_->expect_apart(i, data);
  slot.bound = data.data;
  Bucket& bucket = impl_->buckets[slot.bucket];
  if (bucket.members.size() == 1 && bucket.bytes >= impl_->options.bucket_bytes) {
    bucket.in_place = data.data;
    bucket.memory = {};  // nobody needs it
  }
}

void BucketReducer::ready(std::size_t i) {
  impl_->checked(i);
  impl_->expect_sound();
  Slot& slot = impl_->slots[i];
  if (slot.ready)
    bad(fmt::format("\"{}\" is ready twice; finish() comes between two steps", impl_->entries[i].name));
  if (impl_->is_copied(i)) std::memcpy(impl_->place(i), slot.bound, impl_->bytes_of(i));
  slot.ready = true;
  --impl_->buckets[slot.bucket].pending;
  impl_->communicate([&] {
    const std::size_t before = impl_->posted;
    impl_->post_ready();
    for (std::size_t b = before; b < impl_->posted; ++b)
      impl_->posted_early += impl_->buckets[b].work.valid();
    for (; impl_->done < impl_->posted; ++impl_->done)
      if (Work& work = impl_->buckets[impl_->done].work; work.valid() && !work.done()) break;
  });
}

bool BucketReducer::is_ready(std::size_t i) const { return impl_->slots[impl_->checked(i)].ready; }

// All ranks post all buckets in any case, those with gradients that are missing too: a rank that threw at
// once would leave the others waiting. What is missing counts as zero until expect_all_ready() has compared the ranks.
void BucketReducer::finish() {
  impl_->expect_sound();
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < size(); ++i)
    if (!impl_->slots[i].ready) {
      missing.push_back(i);
      std::memset(impl_->place(i), 0, impl_->bytes_of(i));
    }
  impl_->communicate([&] {
    impl_->compare();
    for (Bucket& b : impl_->buckets) b.pending = 0;
    impl_->post_ready();
    for (Bucket& b : impl_->buckets)
      if (b.work.valid()) b.work.wait();
  });
  for (std::size_t i = 0; i < size(); ++i)
    if (impl_->is_copied(i)) std::memcpy(impl_->slots[i].bound, impl_->place(i), impl_->bytes_of(i));
  impl_->start_step();
  if (impl_->options.unused == Unused::error) impl_->expect_all_ready(missing);
}

std::vector<std::int64_t> BucketReducer::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const Bucket& b : impl_->buckets) bytes.push_back(b.bytes);
  return bytes;
}

std::int64_t BucketReducer::posted_early() const noexcept { return impl_->posted_early; }

}  // namespace weft
