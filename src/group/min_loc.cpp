// Each pair travels as 16 bytes: the value, widened to 8 bytes, and its index. The reduction of pairs takes
// the pair that is first in the order. The pairs are totally ordered, so the result does not depend on the
// order of reduction.
#include "weft/group/min_loc.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "group/callback.hpp"
#include "weft/base/tensor.hpp"

namespace weft {
namespace {

constexpr DType kPair = DType::c128;  // a dtype of the size of a pair

template <class Wide>
struct Pair {
  Wide value;
  std::int64_t index;
};
static_assert(sizeof(Pair<double>) == 16 && sizeof(Pair<std::int64_t>) == 16);

// Returns whether x comes before y, in the order of ReduceOp::min or max. A NaN comes first.
template <bool least, class Wide>
bool before(Wide x, Wide y) noexcept {
  if constexpr (std::is_floating_point_v<Wide>) {
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && !std::isnan(y);
    if (x == 0 && y == 0)
      return least ? std::signbit(x) && !std::signbit(y) : !std::signbit(x) && std::signbit(y);
  }
  return least ? x < y : y < x;
}

template <bool least, class Wide>
void combine(const void* left, const void* right, void* out, std::int64_t count, DType) {
  for (std::int64_t i = 0; i < count; ++i) {
    Pair<Wide> l, r;
    const auto at = static_cast<std::size_t>(i) * sizeof l;
    std::memcpy(&l, static_cast<const std::byte*>(left) + at, sizeof l);
    std::memcpy(&r, static_cast<const std::byte*>(right) + at, sizeof r);
    const bool takes_right =
        before<least>(r.value, l.value) || (!before<least>(l.value, r.value) && r.index < l.index);
    std::memcpy(static_cast<std::byte*>(out) + at, takes_right ? &r : &l, sizeof l);
  }
}

template <class Narrow, class Wide>
void pack(const std::byte* values, const std::byte* indices, std::byte* to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    Narrow value;
    Pair<Wide> pair;
    std::memcpy(&value, values + i * static_cast<std::int64_t>(sizeof value), sizeof value);
    std::memcpy(&pair.index, indices + i * 8, 8);
    pair.value = value;
    if constexpr (std::is_floating_point_v<Wide>)
      if (std::isnan(pair.value)) pair.value = std::numeric_limits<Wide>::quiet_NaN();
    std::memcpy(to + i * 16, &pair, sizeof pair);
  }
}

template <class Narrow, class Wide>
void unpack(const std::byte* from, std::byte* values, std::byte* indices, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    Pair<Wide> pair;
    std::memcpy(&pair, from + i * 16, sizeof pair);
    const auto value = static_cast<Narrow>(pair.value);
    std::memcpy(values + i * static_cast<std::int64_t>(sizeof value), &value, sizeof value);
    std::memcpy(indices + i * 8, &pair.index, 8);
  }
}

struct PairChecker {
  std::string_view function;
  const ProcessGroup& group;

  template <class... Args>
  [[noreturn]] void wrong(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) const {
    throw Error(code,
                fmt::format("{}: {} [group \"{}\", rank {}]", function,
                            fmt::format(text, std::forward<Args>(args)...), group.name(), group.rank()));
  }
  template <class Byte>
  void buffer(const BasicBuffer<Byte>& b, std::string_view which, std::int64_t count) const {
    if (b.fault) wrong(ErrorCode::bad_argument, "{} {}", which, b.fault.text());
    if (b.device.kind != DeviceKind::cpu)
      wrong(ErrorCode::unsupported, "{} is on {}; expected cpu memory", which, to_string(b.device));
    if (b.count < 0) wrong(ErrorCode::bad_argument, "{} has {} elements; expected 0 or more", which, b.count);
    if (b.count != count)
      wrong(ErrorCode::bad_argument, "{} has {} elements; expected {} (values)", which, b.count, count);
    if (b.count > std::numeric_limits<std::int64_t>::max() / 16)
      wrong(ErrorCode::bad_argument, "{} has {} elements; 16 bytes of each do not fit 64 bits", which,
            b.count);
    if (b.data == nullptr && b.count > 0)
      wrong(ErrorCode::bad_argument, "{} is null; expected {} elements", which, b.count);
  }
  void index_dtype(DType dtype, std::string_view which) const {
    if (dtype != DType::i64) wrong(ErrorCode::bad_argument, "{} is {}; expected i64", which, name(dtype));
  }
};

template <bool least, class Narrow, class Wide>
void locate(const PairChecker& check, ProcessGroup& group, const ConstBuffer& values,
            const ConstBuffer& indices, const Buffer& found, const Buffer& where,
            const CallOptions& options) {
  check_may_wait(group);
  const std::int64_t count = values.count;
  const Tensor pairs(group.context(), Shape{count}, kPair, Memory::shared);
  pack<Narrow, Wide>(values.data, indices.data, pairs.data(), count);
  const UserReduction reduction{fmt::format("{} of {}", check.function, name(values.dtype)),
                                combine<least, Wide>};
  const TensorView all = pairs;
  group.all_reduce(all, all, {.op = ReduceOp::of(reduction), .deadline = options.deadline}).wait();
  unpack<Narrow, Wide>(pairs.data(), found.data, where.data, count);
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.data < b.data + b.bytes() && b.data < a.data + a.bytes();
}

template <bool least>
void locate(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices, const Buffer& found,
            const Buffer& where, const CallOptions& options) {
  const PairChecker check{least ? "min_loc" : "max_loc", group};
  constexpr std::string_view kFound = least ? "least" : "largest";
  check.buffer(values, "values", values.count);
  check.buffer(indices, "indices", values.count);
  check.buffer(found, kFound, values.count);
  check.buffer(where, "where", values.count);
  check.index_dtype(indices.dtype, "indices");
  check.index_dtype(where.dtype, "where");
  if (found.dtype != values.dtype)
    check.wrong(ErrorCode::bad_argument, "{} is {}; expected {} (values)", kFound, name(found.dtype),
                name(values.dtype));
  if (overlap(found, where)) check.wrong(ErrorCode::bad_argument, "{} and where overlap", kFound);
  const auto go = [&]<class Narrow, class Wide>(Narrow, Wide) {
    locate<least, Narrow, Wide>(check, group, values, indices, found, where, options);
  };
  if (values.dtype == DType::f64) return go(double{}, double{});
  if (values.dtype == DType::f32) return go(float{}, double{});
  if (values.dtype == DType::i64) return go(std::int64_t{}, std::int64_t{});
  if (values.dtype == DType::i32) return go(std::int32_t{}, std::int64_t{});
  check.wrong(ErrorCode::unsupported, "values is {}; expected f64, f32, i64 or i32", name(values.dtype));
}

}  // namespace

void min_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices, const Buffer& least,
             const Buffer& where, const CallOptions& options) {
  locate<true>(group, values, indices, least, where, options);
}

void max_loc(ProcessGroup& group, const ConstBuffer& values, const ConstBuffer& indices,
             const Buffer& largest, const Buffer& where, const CallOptions& options) {
  locate<false>(group, values, indices, largest, where, options);
}

}  // namespace weft
