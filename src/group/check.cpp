#include "group/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "backends/compose/op_support.hpp"
#include "reduce/reduce.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Kernels read complete elements, so data must be aligned to the size of an element, at most to 8 bytes. An
// element of 16 bytes is a complex number, a pair of f64.
std::uintptr_t alignment(DType dtype) noexcept {
  return static_cast<std::uintptr_t>(std::min(size_bytes(dtype), 8));
}
bool aligned(const void* data, DType dtype) noexcept {
  return (reinterpret_cast<std::uintptr_t>(data) & (alignment(dtype) - 1)) == 0;
}

bool apart(const std::byte* a, std::int64_t a_bytes, const std::byte* b, std::int64_t b_bytes) noexcept {
  return a >= b + b_bytes || b >= a + a_bytes;
}

// Returns a value other than 0 if `value` is none of the `count` values of the enum. The function has no
// branch, so that the fast path can combine its result with another condition.
template <class Enum>
constexpr unsigned outside(Enum value, unsigned count) noexcept {
  const unsigned room = std::bit_ceil(count);
  return (static_cast<unsigned>(value) + (room - count)) / room;
}

struct Checker {
  const Call& call;
  const Traits& traits;
  int rank, size;
  std::string_view group;
  std::string_view asked = name(call.op);
  Operands have{};  // the buffers that were checked

  template <class... Args>
  [[noreturn, gnu::cold, gnu::noinline]] void wrong(ErrorCode code, fmt::format_string<Args...> text,
                                                    Args&&... args) const {
    throw Error(Failure{.code = code,
                        .text = fmt::format("{}: {} [group \"{}\", rank {}]", asked,
                                            fmt::format(text, std::forward<Args>(args)...), group, rank),
                        .op = outside(call.op, kOpCount) ? Op::none : call.op,
                        .ranks = {}});
  }

  // Because of casts, or memory that holds no valid call, an enum may have any number.
  template <class Enum>
  void known(Enum value, int count, const char* what, const char* of = "") const {
    if (static_cast<int>(value) < count) return;
    const auto last = static_cast<Enum>(count - 1);
    wrong(ErrorCode::bad_argument, "{}{} is {}; expected 0 ({}) to {} ({})", what, of,
          static_cast<int>(value), name(Enum{}), count - 1, name(last));
  }

  template <class Byte>
  void buffer(const BasicBuffer<Byte>& b, const char* which) const {
    known(b.dtype, kDTypeCount, "dtype of ", which);
    if (b.device.kind != DeviceKind::cpu && b.device.kind != DeviceKind::cuda)
      wrong(ErrorCode::bad_argument, "{} is on a device of kind {}; expected 0 (cpu) or 1 (cuda)", which,
            static_cast<int>(b.device.kind));
    if ((b.device.kind != DeviceKind::cpu) != traits.device)
      wrong(ErrorCode::unsupported, "{} is on {}; backend {} moves {} memory", which, to_string(b.device),
            traits.name, traits.device ? "cuda" : "cpu");
    if (traits.device && b.device.index != traits.device_index)
      wrong(ErrorCode::bad_argument, "{} is on {}; expected {} (the device of the group)", which,
            to_string(b.device), to_string(Device{DeviceKind::cuda, traits.device_index}));
    if (b.fault) wrong(ErrorCode::bad_argument, "{} {}", which, b.fault.text());
    if (b.count < 0) wrong(ErrorCode::bad_argument, "{} has {} elements; expected 0 or more", which, b.count);
    if (std::int64_t bytes = 0; __builtin_mul_overflow(b.count, std::int64_t{size_bytes(b.dtype)}, &bytes))
      wrong(ErrorCode::bad_argument, "{} has {} elements; their bytes do not fit 64 bits", which, b.count);
    if (b.data == nullptr && b.count > 0)
      wrong(ErrorCode::bad_argument, "{} is null; expected {} elements", which, b.count);
    if (!traits.moves(b.dtype))
      wrong(ErrorCode::unsupported, "{} is {}, which backend {} does not move", which, name(b.dtype),
            traits.name);
  }

  // Raw bytes have a dtype, so that they can be moved, but weft does not know what they mean.
  template <class Byte>
  void elements(const BasicBuffer<Byte>& b, const char* which) const {
    if (b.raw)
      wrong(ErrorCode::unsupported,
            "{} is raw bytes ({}, from as_bytes(), std::byte or characters), for which there is no {}; "
            "expected elements of the dtype to combine",
            which, name(b.dtype), name(call.options.op));
  }

  void peer(int value, const char* which) const {
    if (value == any_source)
      wrong(ErrorCode::bad_argument, "{} is any_source; expected 0 to {} (group size {})", which, size - 1,
            size);
    if (value < 0 || value >= size)
      wrong(ErrorCode::bad_argument, "{} is {}; expected 0 to {} (group size {})", which, value, size - 1,
            size);
  }

  void source() const {
    if (call.peer != any_source) return peer(call.peer, "src");
    if (!traits.has(Op::wait_message))
      wrong(ErrorCode::unsupported, "src is any_source; backend {} receives from a rank that is named",
            traits.name);
  }

  void tag() const {
    if (call.options.tag < 0)
      wrong(ErrorCode::bad_argument, "tag is {}; expected 0 or more", call.options.tag);
  }

  void same_dtype(const ConstBuffer& in, const Buffer& out) const {
    if (in.dtype != out.dtype)
      wrong(ErrorCode::bad_argument, "out is {}; expected {} (in)", name(out.dtype), name(in.dtype));
  }

  // If `in` and `out` overlap, throws unless the call is in place. `rule` explains the condition in the text.
  void overlap(bool in_place, const char* rule) const {
    if (in_place || have.in_count == 0 || have.out_count == 0) return;
    const std::int64_t element = size_bytes(call.in.dtype);
    if (apart(call.in.data, have.in_count * element, call.out.data, have.out_count * element)) return;
    wrong(ErrorCode::bad_argument, "in and out overlap; {}", rule);
  }

  template <class Byte>
  void aligned(const BasicBuffer<Byte>& b, const char* which) const {
    if (b.count > 0 && !weft::aligned(b.data, b.dtype))
      wrong(ErrorCode::bad_argument, "{} begins at {}; expected a multiple of {} bytes for {}", which,
            static_cast<const void*>(b.data), alignment(b.dtype), name(b.dtype));
  }

  // Returns n x size; throws if the product does not fit 64 bits.
  std::int64_t times_size(std::int64_t n, const char* which) const {
    std::int64_t product = 0;
    if (__builtin_mul_overflow(n, std::int64_t{size}, &product))
      wrong(ErrorCode::bad_argument, "{} has {} elements; {} (group size) times that does not fit 64 bits",
            which, n, size);
    return product;
  }

  void reduction(DType dtype) const {
    const ReduceOp& op = call.options.op;
    known(op.kind, kReduceKindCount, "kind of op");
    if (call.options.order != Order::native && call.options.order != Order::canonical)
      wrong(ErrorCode::bad_argument, "order is {}; expected 0 (native) or 1 (canonical)",
            static_cast<int>(call.options.order));
    if (op.kind == ReduceOp::Kind::user && (op.user == nullptr || !op.user->combine))
      wrong(ErrorCode::bad_argument, "op is user, but its function is empty");
    if (!can_reduce(dtype, op.kind))
      wrong(ErrorCode::unsupported, "{} of {} is not defined{}", name(op), name(dtype),
            dtype == DType::boolean ? "; logical_or and logical_and are" : "");
    if (op.kind == ReduceOp::Kind::premul_sum && !is_floating(dtype) &&
        (op.scale != std::trunc(op.scale) || std::abs(op.scale) > 0x1p53))
      wrong(ErrorCode::bad_argument, "scale is {}; expected a whole number of at most 2^53 for {}", op.scale,
            name(dtype));
    if (op_support(traits, call.op, dtype, op.kind, call.options.order) != OpSupport::unsupported) return;
    if (is_scan(call.op) && !traits.has(call.op))
      wrong(ErrorCode::unsupported, "backend {} cannot do it", traits.name);
    wrong(ErrorCode::unsupported, "backend {} has no {} of {}{}", traits.name,
          op.kind == ReduceOp::Kind::user ? "reduction by a user's function" : name(op), name(dtype),
          call.options.order == Order::canonical ? " in canonical order" : "");
  }

  // Throws unsupported if the backend cannot perform a non-reducing operation on this dtype. (A barrier has
  // no dtype: pass any.)
  void can_do(DType dtype) const {
    if (op_support(traits, call.op, dtype, ReduceOp::Kind::sum, Order::native) == OpSupport::unsupported)
      wrong(ErrorCode::unsupported, "backend {} cannot do it", traits.name);
  }

  // Checks the blocks of a buffer: one for each rank, within the buffer, and disjoint if they are written.
  void blocks(const Blocks& b, const char* which, std::int64_t count, bool written) const {
    if (static_cast<int>(b.counts.size()) != size)
      wrong(ErrorCode::bad_argument, "{}_blocks has {} counts; expected {} (group size)", which,
            b.counts.size(), size);
    if (!b.offsets.empty() && b.offsets.size() != b.counts.size())
      wrong(ErrorCode::bad_argument, "{}_blocks has {} offsets; expected {} (group size) or none", which,
            b.offsets.size(), size);
    std::int64_t next = 0;
    for (std::size_t r = 0; r < b.counts.size(); ++r) {
      const std::int64_t n = b.counts[r], at = b.offsets.empty() ? next : b.offsets[r];
      if (n < 0)
        wrong(ErrorCode::bad_argument, "{}_blocks.counts[{}] is {}; expected 0 or more", which, r, n);
      if (at < 0 || at > count || n > count - at)
        wrong(ErrorCode::bad_argument, "{}_blocks: block {} has {} elements from {} on; {} has {}", which, r,
              n, at, which, count);
      next = at + n;
    }
    if (!written || b.offsets.empty()) return;
    std::vector<std::size_t> order(b.counts.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::erase_if(order, [&](std::size_t r) { return b.counts[r] == 0; });
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t x, std::size_t y) { return b.offsets[x] < b.offsets[y]; });
    for (std::size_t i = 1; i < order.size(); ++i)
      if (b.offsets[order[i - 1]] + b.counts[order[i - 1]] > b.offsets[order[i]])
        wrong(ErrorCode::bad_argument, "{}_blocks: blocks {} and {} overlap", which, order[i - 1], order[i]);
  }

  // The element at which block r begins.
  static std::int64_t offset(const Blocks& b, int r) {
    return b.offsets.empty() ? std::accumulate(b.counts.begin(), b.counts.begin() + r, std::int64_t{0})
                             : b.offsets[static_cast<std::size_t>(r)];
  }

  void no_blocks(const Blocks& b, const char* which) const {
    if (!b.counts.empty() || !b.offsets.empty())
      wrong(ErrorCode::bad_argument, "{}_blocks has {} counts; expected none", which, b.counts.size());
  }

  void counts(OpRow r) const;
};

// How many elements `in` and `out` have, and how the two may overlap.
void Checker::counts(OpRow r) const {
  const ConstBuffer& in = call.in;
  const Buffer& out = call.out;
  const std::int64_t in_count = have.in_count, out_count = have.out_count, element = size_bytes(in.dtype);
  const auto own = static_cast<std::size_t>(rank);
  switch (r.counts) {
    case Counts::equal:
      if (in_count != out_count)
        wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in)", out_count, in_count);
      if (call.op == Op::all_to_all) {
        if (in_count % size != 0)
          wrong(ErrorCode::bad_argument, "in has {} elements; expected a multiple of {} (group size)",
                in_count, size);
        overlap(false, "all_to_all is never in place");
      } else {
        overlap(in.data == out.data, "in place means the same buffer");
      }
      return;
    case Counts::out_is_n_in:
      if (const std::int64_t expected = times_size(in_count, "in"); out_count != expected)
        wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in) x {} (group size) = {}",
              out_count, in_count, size, expected);
      overlap(in.data == out.data + rank * in_count * element, "in place means in is block rank() of out");
      return;
    case Counts::in_is_n_out:
      if (const std::int64_t expected = times_size(out_count, "out"); in_count != expected)
        wrong(ErrorCode::bad_argument, "in has {} elements; expected {} (out) x {} (group size) = {}",
              in_count, out_count, size, expected);
      overlap(in.data + rank * out_count * element == out.data, "in place means out is block rank() of in");
      return;
    case Counts::out_blocks:
      blocks(call.out_blocks, "out", out_count, true);
      if (in_count != call.out_blocks.counts[own])
        wrong(ErrorCode::bad_argument, "in has {} elements; expected {} (out_blocks.counts[{}])", in_count,
              call.out_blocks.counts[own], rank);
      overlap(in.data == out.data + offset(call.out_blocks, rank) * element,
              "in place means in is block rank() of out");
      return;
    case Counts::in_blocks:
      blocks(call.in_blocks, "in", in_count, false);
      if (out_count != call.in_blocks.counts[own])
        wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in_blocks.counts[{}])", out_count,
              call.in_blocks.counts[own], rank);
      overlap(in.data + offset(call.in_blocks, rank) * element == out.data,
              "in place means out is block rank() of in");
      return;
    case Counts::both_blocks:
      blocks(call.in_blocks, "in", in_count, false);
      blocks(call.out_blocks, "out", out_count, true);
      if (call.in_blocks.counts[own] != call.out_blocks.counts[own])
        wrong(ErrorCode::bad_argument,
              "out_blocks.counts[{}] is {}; expected {} (in_blocks.counts[{}], this rank's own)", rank,
              call.out_blocks.counts[own], call.in_blocks.counts[own], rank);
      overlap(false, "all_to_all_v is never in place");
      return;
    case Counts::none:
    case Counts::in_only:
    case Counts::out_only: return;
  }
}

// Whether a buffer is in memory of the host, has a known dtype other than raw bytes, and has so few elements
// that their bytes, times the ranks of any group, fit 64 bits. (A buffer with a fault has a negative count.)
template <class Byte>
bool plain(const BasicBuffer<Byte>& b) noexcept {
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  static_assert(static_cast<int>(DeviceKind::cpu) == 0);
  return static_cast<std::uint64_t>(b.count) <= kMost &&
         (static_cast<unsigned>(b.device.kind) | outside(b.dtype, kDTypeCount) | unsigned{b.raw}) == 0 &&
         (b.data != nullptr || b.count == 0);
}

// The fast path. Most calls are right, and most right calls can be recognised in few instructions. They have
// equal blocks, and a dtype and a reduction that the transport supports natively. If the result is false, the
// call is not necessarily wrong, but the checks below must decide.
bool plainly_right(const Call& call, const Traits& traits, int rank, int size, Operands& have) noexcept {
  if ((call.in_blocks.counts.size() | call.in_blocks.offsets.size() | call.out_blocks.counts.size() |
       call.out_blocks.offsets.size() | outside(call.op, kOpCount)) != 0 ||
      traits.device || !traits.has(call.op) || call.options.deadline < Duration::zero())
    return false;
  const OpRow r = row(call.op);
  if (r.counts == Counts::none) return r.collective;
  const auto a_rank = [&](int value) { return static_cast<unsigned>(value) < static_cast<unsigned>(size); };
  if (r.rooted != Rooted::no && !a_rank(call.root)) return false;
  if (!r.collective && (!a_rank(call.peer) || call.options.tag < 0)) return false;
  const bool at_root = rank == call.root, in = has_in(call.op, at_root), out = has_out(call.op, at_root);
  if (in) {
    if (!plain(call.in)) return false;
    have.in = call.in.data;
    have.in_count = call.in.count;
    have.dtype = call.in.dtype;
  }
  if (out) {
    if (!plain(call.out) || (in && call.out.dtype != have.dtype)) return false;
    have.out = call.out.data;
    have.out_count = call.out.count;
    have.dtype = call.out.dtype;
  }
  if (!traits.moves(have.dtype)) return false;
  if (r.reduces) {
    const ReduceOp::Kind kind = call.options.op.kind;
    static_assert(static_cast<int>(ReduceOp::Kind::user) == kReduceKindCount - 1);
    if (kind >= ReduceOp::Kind::user || kind == ReduceOp::Kind::premul_sum ||
        !traits.reduces_itself(kind, have.dtype) ||
        (call.options.order != Order::native &&
         (call.options.order != Order::canonical || !traits.native_is_canonical)) ||
        !aligned(have.in, have.dtype) || !aligned(have.out, have.dtype))
      return false;
  }
  if (!in || !out) return true;
  // The operation must be in place, or the buffers must be disjoint.
  const std::int64_t element = size_bytes(have.dtype), in_bytes = have.in_count * element,
                     out_bytes = have.out_count * element;
  switch (r.counts) {
    case Counts::equal:
      if (call.op == Op::all_to_all || have.in_count != have.out_count) return false;
      if (have.in == have.out) return true;
      break;
    case Counts::out_is_n_in:
      if (have.out_count != have.in_count * size) return false;
      if (have.in == have.out + rank * in_bytes) return true;
      break;
    case Counts::in_is_n_out:
      if (have.in_count != have.out_count * size) return false;
      if (have.in + rank * out_bytes == have.out) return true;
      break;
    case Counts::out_blocks:
    case Counts::in_blocks:
    case Counts::both_blocks: return false;  // these operations have blocks
    case Counts::none:
    case Counts::in_only:
    case Counts::out_only: break;  // these operations have at most one buffer
  }
  return apart(have.in, in_bytes, have.out, out_bytes);
}

// The slow path: all checks.
[[gnu::noinline]] Operands check_closely(const Call& call, const Traits& traits, int rank, int size,
                                         std::string_view group) {
  Checker c{call, traits, rank, size, group};
  if (call.options.deadline < Duration::zero())
    c.wrong(ErrorCode::bad_argument, "deadline is {} ns; expected 0 or more", call.options.deadline.count());
  c.known(call.op, kOpCount, "op");
  if (call.op == Op::none)
    c.wrong(ErrorCode::bad_argument, "the call is empty; make it with a function of namespace call");
  if (call.op == Op::exchange)
    c.wrong(ErrorCode::bad_argument,
            "op is exchange, and a Call cannot hold its plan; call make_exchange() or exchange()");
  const OpRow r = row(call.op);
  if (r.counts != Counts::in_blocks && r.counts != Counts::both_blocks) c.no_blocks(call.in_blocks, "in");
  if (r.counts != Counts::out_blocks && r.counts != Counts::both_blocks) c.no_blocks(call.out_blocks, "out");
  if (!r.collective) {
    if (call.op == Op::send) {
      c.peer(call.peer, "dst");
    } else {
      c.source();
    }
    c.tag();
  }
  if (r.counts == Counts::none) {
    c.can_do(DType::u8);
    return {};
  }
  if (r.rooted != Rooted::no) c.peer(call.root, "root");
  const bool in = has_in(call.op, rank == call.root), out = has_out(call.op, rank == call.root);
  if (in) {
    c.buffer(call.in, "in");
    c.have = {call.in.data, nullptr, call.in.count, 0, call.in.dtype};
  }
  if (out) {
    c.buffer(call.out, "out");
    c.have.out_count = call.out.count;
    c.have.out = call.out.data;
    c.have.dtype = call.out.dtype;
  }
  if (in && out) c.same_dtype(call.in, call.out);
  if (r.reduces) {
    c.elements(call.in, "in");
    if (out) c.elements(call.out, "out");
    c.reduction(call.in.dtype);
    c.aligned(call.in, "in");
    if (out) c.aligned(call.out, "out");
  } else {
    c.can_do(in ? call.in.dtype : call.out.dtype);
  }
  if (in && out) c.counts(r);
  return c.have;
}

}  // namespace

void check_probe(int source, const CallOptions& options, const Traits& traits, int rank, int size,
                 std::string_view group) {
  const Call call = call::wait_message(source, options);
  const Checker c{call, traits, rank, size, group, "probe"};
  c.source();
  c.tag();
  c.can_do(DType::u8);
}

Operands check(const Call& call, const Traits& traits, int rank, int size, std::string_view group) {
  Operands have;
  return plainly_right(call, traits, rank, size, have) ? have
                                                       : check_closely(call, traits, rank, size, group);
}

}  // namespace weft
