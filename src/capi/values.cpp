// Arguments of weft.h as C++ values, and the enumerators of both compared.
#include "capi/values.hpp"

#include <cstddef>
#include <limits>

#include "capi/call_handles.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kCallOptionsFirstBytes = 32;
static_assert(offsetof(weft_call_options, tag) == kCallOptionsFirstBytes);
static_assert(sizeof(weft_call_options) == 64);
static_assert(sizeof(weft_buffer) == 24);  // these have no struct_size: they stay as they are
static_assert(sizeof(weft_blocks) == 24 && sizeof(weft_stream) == 16);

constexpr bool same(DType a, weft_dtype b) { return static_cast<weft_dtype>(a) == b; }
static_assert(same(DType::f64, WEFT_F64) && same(DType::f32, WEFT_F32) && same(DType::f16, WEFT_F16));
static_assert(same(DType::bf16, WEFT_BF16) && same(DType::i8, WEFT_I8) && same(DType::i16, WEFT_I16));
static_assert(same(DType::i32, WEFT_I32) && same(DType::i64, WEFT_I64) && same(DType::u8, WEFT_U8));
static_assert(same(DType::u16, WEFT_U16) && same(DType::u32, WEFT_U32) && same(DType::u64, WEFT_U64));
static_assert(same(DType::boolean, WEFT_BOOL) && same(DType::f8e4m3, WEFT_F8E4M3));
static_assert(same(DType::f8e5m2, WEFT_F8E5M2) && same(DType::c64, WEFT_C64) && same(DType::c128, WEFT_C128));
static_assert(kDTypeCount == WEFT_C128 + 1);

using Kind = ReduceOp::Kind;
constexpr bool same(Kind a, weft_reduce_op b) { return static_cast<weft_reduce_op>(a) == b; }
static_assert(same(Kind::sum, WEFT_SUM) && same(Kind::avg, WEFT_AVG) && same(Kind::min, WEFT_MIN));
static_assert(same(Kind::max, WEFT_MAX) && same(Kind::prod, WEFT_PROD));
static_assert(same(Kind::premul_sum, WEFT_PREMUL_SUM) && same(Kind::bit_and, WEFT_BIT_AND));
static_assert(same(Kind::bit_or, WEFT_BIT_OR) && same(Kind::bit_xor, WEFT_BIT_XOR));
static_assert(same(Kind::logical_and, WEFT_LOGICAL_AND) && same(Kind::logical_or, WEFT_LOGICAL_OR));
static_assert(same(Kind::logical_xor, WEFT_LOGICAL_XOR));
static_assert(same(Kind::user, WEFT_USER) && kReduceKindCount == WEFT_USER + 1);

static_assert(static_cast<weft_order>(Order::native) == WEFT_ORDER_NATIVE);
static_assert(static_cast<weft_order>(Order::canonical) == WEFT_ORDER_CANONICAL);

}  // namespace

DType dtype_of(const char* function, weft_dtype dtype, const char* which) {
  if (dtype < WEFT_F64 || dtype > WEFT_C128)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{} is {}; expected 0 (WEFT_F64) to 16 (WEFT_C128)", which, dtype));
  return static_cast<DType>(dtype);
}

Device device_of(const char* function, weft_device device, const char* which) {
  constexpr int kDevices = std::numeric_limits<decltype(Device::index)>::max();
  if (device < WEFT_CPU || device > kDevices)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{} is {}; expected WEFT_CPU or WEFT_CUDA(index)", which, device));
  if (device == WEFT_CPU) return {};
  return {DeviceKind::cuda, static_cast<std::int16_t>(device - WEFT_CUDA(0))};
}

Stream stream_of(const char* function, const weft_stream& stream, const char* which) {
  if (stream.device == WEFT_CPU && stream.handle == nullptr) return {};
  return {device_of(function, stream.device, fmt::format("{}.device", which).c_str()), stream.handle};
}

Buffer buffer_of(const char* function, const weft_buffer& b, const char* which, const char* of) {
  if (b.count < 0) [[unlikely]]
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}{}count is {}; expected 0 or more", which, of, b.count));
  if (b.dtype < WEFT_F64 || b.dtype > WEFT_C128) [[unlikely]]
    dtype_of(function, b.dtype, fmt::format("{}{}dtype", which, of).c_str());
  if (b.device == WEFT_CPU) [[likely]]
    return {b.data, b.count, static_cast<DType>(b.dtype)};
  return {b.data, b.count, static_cast<DType>(b.dtype),
          device_of(function, b.device, fmt::format("{}{}device", which, of).c_str())};
}

Blocks blocks_of(const char* function, const weft_blocks& b, const char* which) {
  if (b.size < 0)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->size is {}; expected the group's size", which, b.size));
  if (b.counts == nullptr && b.size > 0)
    refuse(ErrorCode::bad_argument, function, fmt::format("{}->counts is NULL", which));
  const auto size = static_cast<std::size_t>(b.size);
  return {.counts = {b.counts, size},
          .offsets = b.offsets == nullptr ? std::span<const std::int64_t>{} : std::span{b.offsets, size}};
}

CallOptions read_call_options(const char* function, const weft_call_options& options) {
  const weft_call_options o = read(function, &options, weft_call_options WEFT_CALL_OPTIONS_INIT,
                                   kCallOptionsFirstBytes, "WEFT_CALL_OPTIONS_INIT");
  const auto wrong = [&](const std::string& text) { refuse(ErrorCode::bad_argument, function, text); };
  if (o.reduce_op < WEFT_SUM || o.reduce_op > WEFT_USER)
    wrong(fmt::format("options->reduce_op is {}; expected 0 (WEFT_SUM) to {} (WEFT_USER)", o.reduce_op,
                      static_cast<int>(WEFT_USER)));
  if (o.order != WEFT_ORDER_NATIVE && o.order != WEFT_ORDER_CANONICAL)
    wrong(fmt::format("options->order is {}; expected WEFT_ORDER_NATIVE or WEFT_ORDER_CANONICAL", o.order));
  if (o.scale != 0 && o.reduce_op != WEFT_PREMUL_SUM)
    wrong(fmt::format("options->scale is {}; expected 0 unless reduce_op is WEFT_PREMUL_SUM", o.scale));
  if (o.reserved != 0) wrong(fmt::format("options->reserved is {}; expected 0", o.reserved));
  if (o.reduction != nullptr && o.reduce_op != WEFT_USER)
    wrong("options->reduction is set; expected NULL unless reduce_op is WEFT_USER");
  if (o.reduction == nullptr && o.reduce_op == WEFT_USER)
    wrong(
        "options->reduction is NULL; expected a result of weft_reduction_create, since reduce_op is "
        "WEFT_USER");
  CallOptions to;
  to.op.kind = static_cast<Kind>(o.reduce_op);
  if (to.op.kind == Kind::premul_sum) to.op.scale = o.scale;
  if (o.reduction != nullptr)
    to.op.user = &given(function, o.reduction, "options->reduction").reduction->user();
  to.order = static_cast<Order>(o.order);
  to.deadline = limit(function, o.deadline_ns, "options->deadline_ns");
  to.tag = o.tag;
  to.stream = stream_of(function, o.stream, "options->stream");
  return to;
}

}  // namespace weft::capi

namespace capi = weft::capi;

int64_t weft_dtype_size(weft_dtype dtype) {
  if (dtype < WEFT_F64 || dtype > WEFT_C128) return 0;
  return weft::size_bytes(static_cast<weft::DType>(dtype));
}

const char* weft_dtype_name(weft_dtype dtype) {
  if (dtype < WEFT_F64 || dtype > WEFT_C128) return "?";
  return weft::name(static_cast<weft::DType>(dtype)).data();  // literals, so they end in a zero
}

weft_status weft_dtype_from_name(const char* name, weft_dtype* dtype, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char& text = capi::given(function, name, "name");
    weft_dtype& to = capi::given(function, dtype, "dtype");
    to = static_cast<weft_dtype>(weft::dtype_from_name(&text));
  });
}

const char* weft_reduce_op_name(weft_reduce_op op) {
  if (op < WEFT_SUM || op > WEFT_USER) return "?";
  return weft::name(static_cast<weft::ReduceOp::Kind>(op)).data();
}

weft_status weft_buffer_overlap(const weft_buffer* a, const weft_buffer* b, bool* overlap,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Buffer x = capi::buffer_of(function, a, "a"), y = capi::buffer_of(function, b, "b");
    bool& to = capi::given(function, overlap, "overlap");
    const auto bytes = [&](const weft::Buffer& of, const char* which) {
      std::int64_t n = 0;
      if (__builtin_mul_overflow(of.count, std::int64_t{weft::size_bytes(of.dtype)}, &n))
        capi::refuse(weft::ErrorCode::bad_argument, function,
                     fmt::format("{} has {} elements; their bytes do not fit 64 bits", which, of.count));
      return n;
    };
    const auto first = reinterpret_cast<std::uintptr_t>(x.data),
               second = reinterpret_cast<std::uintptr_t>(y.data);
    const auto of_x = static_cast<std::uintptr_t>(bytes(x, "a")),
               of_y = static_cast<std::uintptr_t>(bytes(y, "b"));
    to = x.device == y.device && of_x > 0 && of_y > 0 &&
         (first <= second ? second - first < of_x : first - second < of_y);
  });
}
