#include "weft/dp/bucket_reducer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/hash.hpp"
#include "dp/missing.hpp"
#include "dp/same_list.hpp"
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

}  // namespace

struct BucketReducer::Impl {
  Impl(DeviceMesh axes_in, std::vector<BucketEntry> entries_in, const BucketOptions& options_in)
      : axes(std::move(axes_in)), entries(std::move(entries_in)), options(options_in), slots(entries.size()) {
    if (options.bucket_bytes < 1)
      bad(fmt::format("options.bucket_bytes is {}; expected 1 or more", options.bucket_bytes));
    for (const BucketEntry& e : entries) {
      if (e.count < 0) bad(fmt::format("\"{}\" has count {}; expected 0 or more", e.name, e.count));
      if (!(e.op == ReduceOp::sum) && !(e.op == ReduceOp::avg))
        bad(fmt::format("\"{}\" has op {}; expected sum or avg", e.name, name(e.op)));
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
      bucket.bytes += (e.count * size_bytes(e.dtype) + kAlignment - 1) / kAlignment * kAlignment;
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
    compared = true;
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
      b.work = axes.group().all_reduce(memory, memory, {.op = b.op});
    }
  }

  // Throws on all ranks where one of them lacks a gradient.
  void expect_all_ready(const std::vector<std::size_t>& missing) {
    dp::MissingGradients found =
        dp::gather_missing(axes, entries.size(), missing, [&](std::size_t i) { return entries[i].name; });
    if (found.text.empty()) return;
    throw Error(
        Failure{ErrorCode::bad_argument,
                fmt::format("bucket_reducer: nobody made ready {}; BucketOptions::unused = zeros lets "
                            "such ranks contribute zeros",
                            found.text),
                Op::none, kNoCall, std::move(found.ranks)});
  }

  DeviceMesh axes;
  std::vector<BucketEntry> entries;
  BucketOptions options;
  std::vector<Slot> slots;
  std::vector<Bucket> buckets;  // in the order they are posted
  std::size_t posted = 0;       // buckets posted in this step
  std::size_t done = 0;         // of them, those seen to be done
  std::int64_t posted_early = 0;
  bool compared = false;
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
  if (data.dtype != e.dtype || data.count() != e.count || !data.contiguous())
    bad(fmt::format("bind of \"{}\": data is {} x{}{}; expected {} x{}, contiguous", e.name, name(data.dtype),
                    data.count(), data.contiguous() ? "" : ", not contiguous", name(e.dtype), e.count));
  if (data.device.kind != DeviceKind::cpu)
    bad(fmt::format("bind of \"{}\": data is on {}; expected cpu", e.name, to_string(data.device)));
  slot.bound = data.data;
  Bucket& bucket = impl_->buckets[slot.bucket];
  if (bucket.members.size() == 1 && bucket.bytes >= impl_->options.bucket_bytes) {
    bucket.in_place = data.data;
    bucket.memory = {};  // nobody needs it
  }
}

void BucketReducer::ready(std::size_t i) {
  impl_->checked(i);
  Slot& slot = impl_->slots[i];
  if (slot.ready)
    bad(fmt::format("\"{}\" is ready twice; finish() comes between two steps", impl_->entries[i].name));
  if (impl_->is_copied(i)) std::memcpy(impl_->place(i), slot.bound, impl_->bytes_of(i));
  slot.ready = true;
  --impl_->buckets[slot.bucket].pending;
  const std::size_t before = impl_->posted;
  impl_->post_ready();
  for (std::size_t b = before; b < impl_->posted; ++b) impl_->posted_early += impl_->buckets[b].work.valid();
  for (; impl_->done < impl_->posted; ++impl_->done)
    if (Work& work = impl_->buckets[impl_->done].work; work.valid() && !work.done()) break;
}

bool BucketReducer::is_ready(std::size_t i) const { return impl_->slots[impl_->checked(i)].ready; }

// All ranks post all buckets in any case, those with gradients that are missing too: a rank that threw at
// once would leave the others waiting. What is missing counts as zero until expect_all_ready() has compared the ranks.
void BucketReducer::finish() {
  std::vector<std::size_t> missing;
  for (std::size_t i = 0; i < size(); ++i)
    if (!impl_->slots[i].ready) {
      missing.push_back(i);
      std::memset(impl_->place(i), 0, impl_->bytes_of(i));
    }
  impl_->compare();
  for (Bucket& b : impl_->buckets) b.pending = 0;
  impl_->post_ready();
  for (Bucket& b : impl_->buckets)
    if (b.work.valid()) b.work.wait();
  impl_->posted = impl_->done = 0;
  for (Bucket& b : impl_->buckets) b.pending = b.members.size();
  for (std::size_t i = 0; i < size(); ++i) {
    if (impl_->is_copied(i)) std::memcpy(impl_->slots[i].bound, impl_->place(i), impl_->bytes_of(i));
    impl_->slots[i].ready = false;
  }
  if (impl_->options.unused == Unused::error) impl_->expect_all_ready(missing);
}

std::vector<std::int64_t> BucketReducer::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const Bucket& b : impl_->buckets) bytes.push_back(b.bytes);
  return bytes;
}

std::int64_t BucketReducer::posted_early() const noexcept { return impl_->posted_early; }

}  // namespace weft
