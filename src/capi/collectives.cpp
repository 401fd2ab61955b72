// Collectives and Works in C: each fills a Call and submits it, nothing more.
#include <limits>

#include "capi/handles.hpp"

using weft::Buffer;
using weft::Call;
using weft::CallOptions;
using weft::DType;
using weft::ErrorCode;
using weft::ReduceOp;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kCallOptionsFirstBytes = 32;
static_assert(sizeof(weft_call_options) == kCallOptionsFirstBytes);
static_assert(sizeof(weft_buffer) == 24);  // has no struct_size: it stays as it is

constexpr bool same(DType a, weft_dtype b) { return static_cast<weft_dtype>(a) == b; }
static_assert(same(DType::f64, WEFT_F64) && same(DType::f32, WEFT_F32) && same(DType::f16, WEFT_F16));
static_assert(same(DType::bf16, WEFT_BF16) && same(DType::i8, WEFT_I8) && same(DType::i16, WEFT_I16));
static_assert(same(DType::i32, WEFT_I32) && same(DType::i64, WEFT_I64) && same(DType::u8, WEFT_U8));
static_assert(same(DType::u16, WEFT_U16) && same(DType::u32, WEFT_U32) && same(DType::u64, WEFT_U64));
static_assert(same(DType::boolean, WEFT_BOOL) && same(DType::f8e4m3, WEFT_F8E4M3));
static_assert(same(DType::f8e5m2, WEFT_F8E5M2) && same(DType::c64, WEFT_C64) && same(DType::c128, WEFT_C128));
static_assert(weft::kDTypeCount == WEFT_C128 + 1);

using Kind = ReduceOp::Kind;
constexpr bool same(Kind a, weft_reduce_op b) { return static_cast<weft_reduce_op>(a) == b; }
static_assert(same(Kind::sum, WEFT_SUM) && same(Kind::avg, WEFT_AVG) && same(Kind::min, WEFT_MIN));
static_assert(same(Kind::max, WEFT_MAX) && same(Kind::prod, WEFT_PROD));
static_assert(same(Kind::premul_sum, WEFT_PREMUL_SUM) && same(Kind::bit_and, WEFT_BIT_AND));
static_assert(same(Kind::bit_or, WEFT_BIT_OR) && same(Kind::bit_xor, WEFT_BIT_XOR));
static_assert(same(Kind::logical_and, WEFT_LOGICAL_AND) && same(Kind::logical_or, WEFT_LOGICAL_OR));
static_assert(same(Kind::logical_xor, WEFT_LOGICAL_XOR));
static_assert(weft::kReduceKindCount ==
              WEFT_LOGICAL_XOR + 2);  // and user functions, which C does not have yet

static_assert(static_cast<weft_order>(weft::Order::native) == WEFT_ORDER_NATIVE);
static_assert(static_cast<weft_order>(weft::Order::canonical) == WEFT_ORDER_CANONICAL);

Buffer buffer_of(const char* function, const weft_buffer* buffer, const char* which) {
  const weft_buffer& b = capi::given(function, buffer, which);
  const auto wrong = [&](const char* field, std::int64_t value, const char* expected) {
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("{}->{} is {}; expected {}", which, field, value, expected));
  };
  if (b.count < 0) wrong("count", b.count, "0 or more");
  if (b.dtype < WEFT_F64 || b.dtype > WEFT_C128) wrong("dtype", b.dtype, "0 (WEFT_F64) to 16 (WEFT_C128)");
  constexpr int kDevices = std::numeric_limits<decltype(weft::Device::index)>::max();
  if (b.device < WEFT_CPU || b.device > kDevices) wrong("device", b.device, "WEFT_CPU or WEFT_CUDA(index)");
  weft::Device device;
  if (b.device != WEFT_CPU)
    device = {weft::DeviceKind::cuda, static_cast<std::int16_t>(b.device - WEFT_CUDA(0))};
  return {b.data, b.count, static_cast<DType>(b.dtype), device};
}

CallOptions call_options(const char* function, const weft_call_options* options) {
  const weft_call_options o = capi::read(function, options, weft_call_options WEFT_CALL_OPTIONS_INIT,
                                         kCallOptionsFirstBytes, "WEFT_CALL_OPTIONS_INIT");
  const auto wrong = [&](const std::string& text) { capi::refuse(ErrorCode::bad_argument, function, text); };
  if (o.reduce_op < WEFT_SUM || o.reduce_op > WEFT_LOGICAL_XOR)
    wrong(fmt::format("options->reduce_op is {}; expected 0 (WEFT_SUM) to {} (WEFT_LOGICAL_XOR)", o.reduce_op,
                      static_cast<int>(WEFT_LOGICAL_XOR)));
  if (o.order != WEFT_ORDER_NATIVE && o.order != WEFT_ORDER_CANONICAL)
    wrong(fmt::format("options->order is {}; expected WEFT_ORDER_NATIVE or WEFT_ORDER_CANONICAL", o.order));
  if (o.scale != 0 && o.reduce_op != WEFT_PREMUL_SUM)
    wrong(fmt::format("options->scale is {}; expected 0 unless reduce_op is WEFT_PREMUL_SUM", o.scale));
  CallOptions to;
  to.op.kind = static_cast<Kind>(o.reduce_op);
  if (to.op.kind == Kind::premul_sum) to.op.scale = o.scale;
  to.order = static_cast<weft::Order>(o.order);
  to.deadline = capi::limit(function, o.deadline_ns, "options->deadline_ns");
  return to;
}

// Where `work` is null, waits for the call; else *work becomes its handle.
void submit(weft_group& group, const Call& call, weft_work** work) {
  if (work == nullptr) {
    group.handle->group.submit(call).wait();
    return;
  }
  auto handle = std::make_unique<weft_work>(weft_work{group.handle, {}, {}});  // before anything is sent
  handle->work = group.handle->group.submit(call);
  *work = handle.release();
}

// Asks a Work. The handle keeps its final answer, and gives it again whenever it is asked.
template <class Ask>
void ask(weft_work& work, const Ask& ask) {
  if (work.failure) throw weft::Error(*work.failure);
  try {
    ask(work.work);
  } catch (const weft::Error& e) {
    work.failure = e;
    throw;
  }
}

}  // namespace

weft_status weft_all_reduce(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    submit(g,
           weft::call::all_reduce(buffer_of(function, in, "in"), buffer_of(function, out, "out"),
                                  call_options(function, options)),
           work);
  });
}

weft_status weft_all_gather(weft_group* group, const weft_buffer* in, const weft_buffer* out,
                            const weft_call_options* options, weft_work** work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    submit(g,
           weft::call::all_gather(buffer_of(function, in, "in"), buffer_of(function, out, "out"),
                                  call_options(function, options)),
           work);
  });
}

weft_status weft_barrier(weft_group* group, const weft_call_options* options, weft_work** work,
                         weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_group& g = capi::given(function, group, "group");
    submit(g, weft::call::barrier(call_options(function, options)), work);
  });
}

weft_status weft_work_wait(weft_work* work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    ask(capi::given(function, work, "work"), [](weft::Work& w) { w.wait(); });
  });
}

weft_status weft_work_wait_for(weft_work* work, int64_t limit_ns, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    bool& to = capi::given(function, done, "done");
    const weft::Duration limit = capi::limit(function, limit_ns, "limit_ns");
    ask(asked, [&](weft::Work& w) { to = w.wait_for(limit); });
  });
}

weft_status weft_work_done(weft_work* work, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    bool& to = capi::given(function, done, "done");
    ask(asked, [&](weft::Work& w) { to = w.done(); });
  });
}

void weft_work_destroy(weft_work* work) { delete work; }
