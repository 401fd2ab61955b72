// Gradients and samples in C. Comments in weft/c/gradients.h say which functions block.
#include <algorithm>
#include <cstddef>
#include <memory>

#include "capi/call_out.hpp"
#include "capi/mesh_handles.hpp"
#include "weft/dp/bucket_reducer.hpp"
#include "weft/dp/grad_norm.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/dp/sampler.hpp"

using weft::DeviceMesh;
using weft::ErrorCode;
using weft::Gradient;
namespace capi = weft::capi;

struct weft_reducer : capi::Handle<weft_reducer> {
  static constexpr const char* kKind = "weft_reducer";
  weft_reducer(capi::MeshOwner owner_in, weft::BucketReducer reducer_in)
      : owner(std::move(owner_in)), reducer(std::move(reducer_in)) {}
  capi::MeshOwner owner;
  weft::BucketReducer reducer;
  std::vector<weft::NoSync> off;  // those begun and not ended
};

struct weft_sampler : capi::Handle<weft_sampler> {
  static constexpr const char* kKind = "weft_sampler";
  explicit weft_sampler(weft::Sampler sampler_in) : sampler(std::move(sampler_in)) {}
  weft::Sampler sampler;
};

namespace {

constexpr std::size_t kReduceOptionsFirstBytes = 24;
static_assert(sizeof(weft_reduce_options) == kReduceOptionsFirstBytes);
constexpr std::size_t kSyncOptionsFirstBytes = 16;
static_assert(sizeof(weft_sync_options) == kSyncOptionsFirstBytes);
constexpr std::size_t kClipOptionsFirstBytes = 16;
static_assert(sizeof(weft_clip_options) == kClipOptionsFirstBytes);
constexpr std::size_t kReducerOptionsFirstBytes = 16;
static_assert(offsetof(weft_reducer_options, hook) == kReducerOptionsFirstBytes);
static_assert(sizeof(weft_reducer_options) == 56);
static_assert(sizeof(weft_ready_bucket) == 48);   // has no struct_size: it stays as it is
static_assert(sizeof(weft_reducer_entry) == 24);  // has no struct_size: it stays as it is

static_assert(static_cast<int>(weft::OnDrift::error) == WEFT_DRIFT_ERROR);
static_assert(static_cast<int>(weft::OnDrift::average) == WEFT_DRIFT_AVERAGE);
static_assert(static_cast<int>(weft::NonFinite::error) == WEFT_NON_FINITE_ERROR);
static_assert(static_cast<int>(weft::NonFinite::skip) == WEFT_NON_FINITE_SKIP);
static_assert(static_cast<int>(weft::Unused::error) == WEFT_UNUSED_ERROR);
static_assert(static_cast<int>(weft::Unused::zeros) == WEFT_UNUSED_ZEROS);

// An enum of two values.
void expect_0_or_1(const char* function, std::int32_t value, const char* field, const char* first,
                   const char* second) {
  if (value != 0 && value != 1)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->{} is {}; expected {} or {}", field, value, first, second));
}

// The common fields of both structs of options. To is weft::ReduceOptions or weft::SyncOptions.
template <class To, class From>
To drift_options(const char* function, const From& o) {
  expect_0_or_1(function, o.on_drift, "on_drift", "0 (WEFT_DRIFT_ERROR)", "1 (WEFT_DRIFT_AVERAGE)");
  To to;
  to.on_drift = static_cast<weft::OnDrift>(o.on_drift);
  if (o.tolerance == WEFT_EXACT)
    to.tolerance = 0;
  else if (o.tolerance != 0)
    to.tolerance = o.tolerance;
  return to;
}

weft::ReduceOptions reduce_options(const char* function, const weft_reduce_options* options) {
  const weft_reduce_options o = capi::read(function, options, weft_reduce_options WEFT_REDUCE_OPTIONS_INIT,
                                           kReduceOptionsFirstBytes, "WEFT_REDUCE_OPTIONS_INIT");
  weft::ReduceOptions to = drift_options<weft::ReduceOptions>(function, o);
  if (o.data_axes != nullptr) to.data_axes = capi::mesh_of(function, o.data_axes, "options->data_axes");
  return to;
}

weft::SyncOptions sync_options(const char* function, const weft_sync_options* options) {
  return drift_options<weft::SyncOptions>(
      function, capi::read(function, options, weft_sync_options WEFT_SYNC_OPTIONS_INIT,
                           kSyncOptionsFirstBytes, "WEFT_SYNC_OPTIONS_INIT"));
}

// The status of a function of the program's own, as an Error of the call in which it was called.
void expect_ok(const char* what, weft_status status, const weft_error& error) {
  if (status == WEFT_OK) return;
  throw weft::Error(weft::error_code(status),
                    fmt::format("{}: {}", what, error.text[0] != 0 ? error.text : "it says nothing more"));
}

weft::BucketHook hook_of(const char* function, const weft_bucket_hook& hook) {
  if (hook.begin == nullptr && hook.end == nullptr)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("options->hook.begin and .end of \"{}\" are NULL; expected one of them", hook.name));
  struct HookState {
    weft_bucket_hook hook;
    std::vector<std::int32_t> members;
  };
  const auto state = std::make_shared<HookState>(HookState{hook, {}});
  const auto call = [state](weft_status (*step)(void*, const weft_ready_bucket*, weft_error*),
                            const char* what, const weft::ReadyBucket& b) {
    if (step == nullptr) return;
    state->members.assign(b.members.begin(), b.members.end());
    const weft_ready_bucket bucket = {
        {b.data.data, b.data.count(), static_cast<weft_dtype>(b.data.dtype), WEFT_CPU},
        state->members.data(),
        static_cast<std::int32_t>(state->members.size()),
        static_cast<std::int32_t>(b.number),
        b.op == weft::ReduceOp::sum ? WEFT_SUM : WEFT_AVG};
    weft_error error = WEFT_ERROR_INIT;
    const capi::CallOut out;
    if (!out) throw weft::Error(ErrorCode::system, fmt::format("{}: {}", what, capi::kEnded));
    expect_ok(what, step(state->hook.data, &bucket, &error), error);
  };
  return {.name = hook.name,
          .start =
              [state, call](const weft::ReadyBucket& b) {
                call(state->hook.begin, "begin", b);
                return weft::Work();
              },
          .finish = [state, call](const weft::ReadyBucket& b) { call(state->hook.end, "end", b); }};
}

weft::BucketOptions reducer_options(const char* function, weft::Context& context,
                                    const weft_reducer_options* options) {
  const weft_reducer_options o = capi::read(function, options, weft_reducer_options WEFT_REDUCER_OPTIONS_INIT,
                                            kReducerOptionsFirstBytes, "WEFT_REDUCER_OPTIONS_INIT");
  expect_0_or_1(function, o.unused, "unused", "0 (WEFT_UNUSED_ERROR)", "1 (WEFT_UNUSED_ZEROS)");
  weft::BucketOptions to;
  to.unused = static_cast<weft::Unused>(o.unused);
  if (o.bucket_bytes != 0) to.bucket_bytes = o.bucket_bytes;
  expect_0_or_1(function, o.compression, "compression", "0 (WEFT_BUCKETS_AS_THEY_ARE)",
                "1 (WEFT_BUCKETS_BF16)");
  if (o.hook.name != nullptr && o.compression != WEFT_BUCKETS_AS_THEY_ARE)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->compression is 1 (WEFT_BUCKETS_BF16) together with the hook \"{}\"; "
                             "expected one of them",
                             o.hook.name));
  if (o.hook.name == nullptr && (o.hook.begin != nullptr || o.hook.end != nullptr))
    capi::refuse(ErrorCode::bad_argument, function, "options->hook.name is NULL; expected a name");
  if (o.hook.name != nullptr) to.hook = hook_of(function, o.hook);
  if (o.compression == WEFT_BUCKETS_BF16) to.hook = weft::bf16_hook(context);
  return to;
}

std::vector<weft::BucketEntry> entries_of(const char* function, const weft_reducer_entry* entries,
                                          std::int32_t count) {
  std::vector<weft::BucketEntry> list;
  for (const weft_reducer_entry& e : capi::list_of(function, entries, count, "entries", "count")) {
    const std::string entry = fmt::format("entries[{}]", list.size());
    const char* const name = capi::text_of(function, e.name, (entry + ".name").c_str());
    const weft::DType dtype = capi::dtype_of(function, e.dtype, (entry + ".dtype").c_str());
    if (e.op != WEFT_SUM && e.op != WEFT_AVG)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("{}.op is {}; expected 0 (WEFT_SUM) or 1 (WEFT_AVG)", entry, e.op));
    list.push_back({name, e.count, dtype, e.op == WEFT_SUM ? weft::ReduceOp::sum : weft::ReduceOp::avg});
  }
  return list;
}

template <class Reducer>
auto& reducer_of(const char* function, Reducer* reducer) {
  return capi::given(function, reducer, "reducer").reducer;
}

std::size_t checked(const char* function, std::int32_t i, std::size_t size, const char* what) {
  if (i < 0 || static_cast<std::size_t>(i) >= size)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("{} is {}; expected {}", what, i,
                             size == 0 ? "none, as there are none" : fmt::format("0 to {}", size - 1)));
  return static_cast<std::size_t>(i);
}

}  // namespace

weft_status weft_reduce_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                  const weft_reduce_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    std::vector<Gradient> list = capi::gradients_of(function, gradients, count);
    const DeviceMesh& over = capi::mesh_of(function, axes, "axes");
    weft::reduce_gradients(list, over, reduce_options(function, options));
  });
}

weft_status weft_average_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    std::vector<Gradient> list = capi::gradients_of(function, gradients, count);
    weft::average_gradients(list, capi::mesh_of(function, axes, "axes"));
  });
}

weft_status weft_sync_replicated_gradients(const weft_tensor* gradients, int32_t count, const weft_mesh* axes,
                                           const weft_sync_options* options, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    std::vector<Gradient> list = capi::gradients_of(function, gradients, count);
    const DeviceMesh& over = capi::mesh_of(function, axes, "axes");
    weft::sync_replicated_gradients(list, over, sync_options(function, options));
  });
}

weft_status weft_grad_norm(const weft_tensor* gradients, int32_t count, double p, double* norm,
                           weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<Gradient> list = capi::gradients_of(function, gradients, count);
    double& to = capi::given(function, norm, "norm");
    to = weft::grad_norm(list, p);
  });
}

weft_status weft_clip_grad_norm(const weft_tensor* gradients, int32_t count, double max_norm,
                                const weft_clip_options* options, double* norm, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<Gradient> list = capi::gradients_of(function, gradients, count);
    const weft_clip_options o = capi::read(function, options, weft_clip_options WEFT_CLIP_OPTIONS_INIT,
                                           kClipOptionsFirstBytes, "WEFT_CLIP_OPTIONS_INIT");
    expect_0_or_1(function, o.non_finite, "non_finite", "0 (WEFT_NON_FINITE_ERROR)",
                  "1 (WEFT_NON_FINITE_SKIP)");
    const double before =
        weft::clip_grad_norm(list, max_norm, o.p == 0 ? 2 : o.p, static_cast<weft::NonFinite>(o.non_finite));
    if (norm != nullptr) *norm = before;
  });
}

weft_status weft_reducer_create(const weft_mesh* axes, const weft_reducer_entry* entries, int32_t count,
                                const weft_reducer_options* options, weft_reducer** reducer,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& over = capi::mesh_of(function, axes, "axes");
    std::vector<weft::BucketEntry> list = entries_of(function, entries, count);
    const weft::BucketOptions o = reducer_options(function, over.context(), options);
    weft_reducer*& to = capi::given(function, reducer, "reducer");
    to = new weft_reducer{axes->owner, weft::BucketReducer(over, std::move(list), o)};
  });
}

void weft_reducer_destroy(weft_reducer* reducer) { capi::destroy(__func__, reducer, "reducer"); }

weft_status weft_reducer_slot(const weft_reducer* reducer, int32_t i, weft_buffer* slot, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::BucketReducer& of = reducer_of(function, reducer);
    const weft::TensorView place = of.slot(checked(function, i, of.size(), "i"));
    weft_buffer& to = capi::given(function, slot, "slot");
    to = {place.data, place.count(), static_cast<weft_dtype>(place.dtype), WEFT_CPU};
  });
}

weft_status weft_reducer_bind(weft_reducer* reducer, int32_t i, const weft_buffer* data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::BucketReducer& of = reducer_of(function, reducer);
    const weft::Buffer memory = capi::buffer_of(function, data, "data");
    of.bind(checked(function, i, of.size(), "i"), capi::view_of(memory, weft::Dims::line(memory.count)));
  });
}

weft_status weft_reducer_ready(weft_reducer* reducer, int32_t i, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::BucketReducer& of = reducer_of(function, reducer);
    of.ready(checked(function, i, of.size(), "i"));
  });
}

weft_status weft_reducer_is_ready(const weft_reducer* reducer, int32_t i, bool* ready, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::BucketReducer& of = reducer_of(function, reducer);
    bool& to = capi::given(function, ready, "ready");
    to = of.is_ready(checked(function, i, of.size(), "i"));
  });
}

weft_status weft_reducer_begin_no_sync(weft_reducer* reducer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::BucketReducer& of = reducer_of(function, reducer);
    reducer->off.push_back(of.no_sync());
  });
}

weft_status weft_reducer_end_no_sync(weft_reducer* reducer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    reducer_of(function, reducer);
    if (reducer->off.empty())
      capi::refuse(ErrorCode::bad_argument, function, "no weft_reducer_begin_no_sync came before it");
    reducer->off.pop_back();
  });
}

weft_status weft_reducer_finish(weft_reducer* reducer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] { reducer_of(function, reducer).finish(); });
}

weft_status weft_reducer_bucket_count(const weft_reducer* reducer, int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::BucketReducer& of = reducer_of(function, reducer);
    capi::given(function, count, "count") = static_cast<int32_t>(of.bucket_bytes().size());
  });
}

weft_status weft_reducer_bucket_bytes(const weft_reducer* reducer, int32_t bucket, int64_t* bytes,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<std::int64_t> all = reducer_of(function, reducer).bucket_bytes();
    int64_t& to = capi::given(function, bytes, "bytes");
    to = all[checked(function, bucket, all.size(), "bucket")];
  });
}

weft_status weft_reducer_sent_early(const weft_reducer* reducer, int64_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::BucketReducer& of = reducer_of(function, reducer);
    capi::given(function, count, "count") = of.posted_early();
  });
}

weft_status weft_sampler_create(const weft_mesh* axis, int64_t population, int64_t global_batch,
                                uint64_t seed, weft_sampler** sampler, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const DeviceMesh& over = capi::mesh_of(function, axis, "axis");
    weft_sampler*& to = capi::given(function, sampler, "sampler");
    to = new weft_sampler{weft::Sampler(over, population, global_batch, seed)};
  });
}

void weft_sampler_destroy(weft_sampler* sampler) { capi::destroy(__func__, sampler, "sampler"); }

weft_status weft_sampler_part(const weft_sampler* sampler, int64_t* offset, int64_t* count,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Chunk part = capi::given(function, sampler, "sampler").sampler.part();
    int64_t &at = capi::given(function, offset, "offset"), &size = capi::given(function, count, "count");
    at = part.offset;
    size = part.size;
  });
}

weft_status weft_sampler_batch(const weft_sampler* sampler, int64_t step, int64_t* samples, int64_t room,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Sampler& of = capi::given(function, sampler, "sampler").sampler;
    int64_t& to = capi::given(function, samples, "samples");
    if (room < of.part().size)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("room is {}; samples needs {}", room, of.part().size));
    const std::vector<std::int64_t> batch = of.local_batch(step);
    std::copy(batch.begin(), batch.end(), &to);
  });
}
