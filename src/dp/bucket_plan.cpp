#include "dp/bucket_plan.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/floating.hpp"

namespace weft::dp {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes: each gradient begins a cache line of its bucket

void check(const std::vector<BucketEntry>& entries, const BucketOptions& options) {
  if (options.bucket_bytes < 1)
    refuse_bucket(fmt::format("options.bucket_bytes is {}; expected 1 or more", options.bucket_bytes));
  if (options.hook.name.empty() != !options.hook.start)
    refuse_bucket(options.hook.start ? "options.hook has no name"
                                     : fmt::format("options.hook \"{}\" has no start", options.hook.name));
  for (const BucketEntry& e : entries) {
    if (e.count < 0) refuse_bucket(fmt::format("\"{}\" has count {}; expected 0 or more", e.name, e.count));
    if (!(e.op == ReduceOp::sum) && !(e.op == ReduceOp::avg))
      refuse_bucket(fmt::format("\"{}\" has op {}{}; expected sum or avg", e.name, name(e.op),
                                e.op.scale == 1 ? "" : fmt::format(" with scale {}", e.op.scale)));
    if (!is_floating(e.dtype))
      refuse_bucket(fmt::format("\"{}\" is {}; expected {}", e.name, name(e.dtype), kFloatingNames));
  }
}

}  // namespace

void refuse_bucket(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "bucket_reducer: " + text);
}

BucketPlan plan_buckets(const std::vector<BucketEntry>& entries, const BucketOptions& options) {
  check(entries, options);
  BucketPlan plan;
  plan.places.resize(entries.size());
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const BucketEntry& e = entries[i];
    auto at = std::find_if(open.begin(), open.end(), [&](std::size_t b) {
      return plan.buckets[b].dtype == e.dtype && plan.buckets[b].op == e.op;
    });
    if (at == open.end()) {
      at = open.insert(open.end(), plan.buckets.size());
      plan.buckets.push_back({e.dtype, e.op, 0, {}});
    }
    PlannedBucket& bucket = plan.buckets[*at];
    plan.places[i] = {*at, bucket.bytes};
    std::int64_t bytes = 0, padded = 0;
    if (__builtin_mul_overflow(e.count, std::int64_t{size_bytes(e.dtype)}, &bytes) ||
        __builtin_add_overflow(bytes, kAlignment - 1, &padded) ||
        __builtin_add_overflow(bucket.bytes, padded / kAlignment * kAlignment, &bucket.bytes))
      refuse_bucket(
          fmt::format("\"{}\" has count {}; the bytes of its bucket do not fit 64 bits", e.name, e.count));
    bucket.members.push_back(i);
    if (bucket.bytes >= options.bucket_bytes) open.erase(at);
  }
  return plan;
}

}  // namespace weft::dp
