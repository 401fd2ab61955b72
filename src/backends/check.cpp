#include "backends/check.hpp"

#include <fmt/format.h>

#include "backends/op_table.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

struct Checker {
  const Call& call;
  const Traits& traits;
  int rank, size;
  std::string_view group;

  template <class... Args>
  [[noreturn, gnu::cold, gnu::noinline]] void wrong(ErrorCode code, fmt::format_string<Args...> text,
                                                    Args&&... args) const {
    throw Error(Failure{.code = code,
                        .text = fmt::format("{}: {} [group \"{}\", rank {}]", name(call.op),
                                            fmt::format(text, std::forward<Args>(args)...), group, rank),
                        .op = call.op,
                        .ranks = {}});
  }

  template <class Byte>
  void buffer(const BasicView<Byte>& v, const char* which) const {
    if (v.device.kind != DeviceKind::cpu)
      wrong(ErrorCode::unsupported, "{} is on {}; backend {} moves cpu memory", which, to_string(v.device),
            traits.name);
    if (!v.contiguous())
      wrong(ErrorCode::bad_argument, "{} is not contiguous: shape {} has strides {}", which,
            to_string(v.shape), to_string(v.strides));
    if (v.data == nullptr && v.count() > 0)
      wrong(ErrorCode::bad_argument, "{} is null; expected {} elements", which, v.count());
    if (((traits.dtypes >> static_cast<int>(v.dtype)) & 1u) == 0)
      wrong(ErrorCode::unsupported, "{} is {}, which backend {} does not move", which, name(v.dtype),
            traits.name);
  }

  void peer(int value, const char* which) const {
    if (value < 0 || value >= size)
      wrong(ErrorCode::bad_argument, "{} is {}; expected 0 to {} (group size {})", which, value, size - 1,
            size);
  }

  void tag() const {
    if (call.options.tag < 0)
      wrong(ErrorCode::bad_argument, "tag is {}; expected 0 or more", call.options.tag);
  }

  void same_dtype(const ConstTensorView& in, const TensorView& out) const {
    if (in.dtype != out.dtype)
      wrong(ErrorCode::bad_argument, "out is {}; expected {} (in)", name(out.dtype), name(in.dtype));
  }

  void overlap(const ConstTensorView& in, const TensorView& out, bool in_place, const char* rule) const {
    const std::byte *in_end = in.data + in.bytes(), *out_end = out.data + out.bytes();
    if (in.bytes() == 0 || out.bytes() == 0 || in.data >= out_end || out.data >= in_end) return;
    if (!in_place) wrong(ErrorCode::bad_argument, "in and out overlap; in place means {}", rule);
  }

  void reduction(DType dtype) const {
    if (((traits.reduce_dtypes >> static_cast<int>(dtype)) & 1u) == 0)
      wrong(ErrorCode::unsupported, "backend {} does not reduce {}", traits.name, name(dtype));
    if (call.options.order == Order::canonical && !traits.canonical)
      wrong(ErrorCode::unsupported, "backend {} has no canonical order", traits.name);
  }
};

}  // namespace

void check(const Call& call, const Traits& traits, int rank, int size, std::string_view group) {
  const Checker c{call, traits, rank, size, group};
  if (call.options.deadline < Duration::zero()) c.wrong(ErrorCode::bad_argument, "deadline is negative");
  const OpRow r = row(call.op);
  switch (r.counts) {
    case Counts::none: return;
    case Counts::in_only:
      c.peer(call.peer, "dst");
      c.tag();
      c.buffer(call.in[0], "in");
      return;
    case Counts::out_only:
      c.peer(call.peer, "src");
      c.tag();
      c.buffer(call.out[0], "out");
      return;
    case Counts::root_in:
      c.peer(call.root, "root");
      c.buffer(call.out[0], "out");
      if (rank == call.root) {
        const ConstTensorView& in = call.in[0];
        const TensorView& out = call.out[0];
        c.buffer(in, "in");
        c.same_dtype(in, out);
        if (in.count() != out.count())
          c.wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in)", out.count(), in.count());
        c.overlap(in, out, in.data == out.data, "the same buffer");
      }
      return;
    case Counts::equal:
    case Counts::out_is_n_in:
    case Counts::in_is_n_out: break;
  }
  const ConstTensorView& in = call.in[0];
  const TensorView& out = call.out[0];
  c.buffer(in, "in");
  c.buffer(out, "out");
  c.same_dtype(in, out);
  if (r.reduces) c.reduction(in.dtype);
  const std::int64_t in_count = in.count(), out_count = out.count();
  if (r.counts == Counts::equal) {
    if (in_count != out_count)
      c.wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in)", out_count, in_count);
    c.overlap(in, out, in.data == out.data, "the same buffer");
  } else if (r.counts == Counts::out_is_n_in) {
    if (out_count != in_count * size)
      c.wrong(ErrorCode::bad_argument, "out has {} elements; expected {} (in) x {} (group size) = {}",
              out_count, in_count, size, in_count * size);
    c.overlap(in, out, in.data == out.data + rank * in.bytes(), "in is block rank() of out");
  } else {
    if (in_count != out_count * size)
      c.wrong(ErrorCode::bad_argument, "in has {} elements; expected {} (out) x {} (group size) = {}",
              in_count, out_count, size, out_count * size);
    c.overlap(in, out, out.data == in.data + rank * out.bytes(), "out is block rank() of in");
  }
}

}  // namespace weft
