#include "support/masked_backend.hpp"

#include <fmt/format.h>

#include "backends/compose/op_support.hpp"
#include "backends/plugins/forwarding_backend.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test {
namespace {

class Masked final : public ForwardingBackend {
 public:
  Masked(std::unique_ptr<Backend> inner, const Mask& mask)
      : ForwardingBackend(std::move(inner)), traits_(traits_of(mask)) {
    traits_.spin = this->inner().traits().spin;
  }
  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override {
    const bool known = op_support(traits_, s.op, s.dtype, s.reduce.kind, s.order) == OpSupport::native;
    const bool in_order = !row(s.op).collective || s.call == next_++;
    if (!known || !in_order)
      inner().fail({.code = ErrorCode::system,
                    .text = fmt::format("the masked backend got {} [call {}], which is {}", name(s.op),
                                        s.call, known ? "out of order" : "hidden"),
                    .ranks = {}});
    inner().post(s);
  }

 private:
  Traits traits_;
  std::uint64_t next_ = 0;
};

}  // namespace

Traits traits_of(const Mask& mask) {
  Traits t = *known_traits("shm");
  t.name = "masked";
  t.ops = mask.ops;
  t.reduces = mask.reduces;
  t.native_is_canonical = mask.canonical;
  return t;
}

BackendFactory masked(const Mask& mask) {
  return [mask](const GroupInit& b) -> std::unique_ptr<Backend> {
    return std::make_unique<Masked>(load_backend(b.context, "shm")(b), mask);
  };
}

Mask messages_only() { return {.ops = op_bit(Op::send) | op_bit(Op::recv)}; }

Mask all_to_all_v_only() { return {.ops = op_bit(Op::all_to_all_v)}; }

Mask some() {
  Mask m{.ops = op_bit(Op::send) | op_bit(Op::recv) | op_bit(Op::all_reduce) | op_bit(Op::reduce_scatter) |
                op_bit(Op::reduce) | op_bit(Op::broadcast) | op_bit(Op::all_gather) | op_bit(Op::barrier)};
  const DTypeSet dtypes = dtype_bit(DType::f32) | dtype_bit(DType::f64) | dtype_bit(DType::i8) |
                          dtype_bit(DType::i32) | dtype_bit(DType::u64);
  for (const auto kind : {ReduceOp::Kind::sum, ReduceOp::Kind::min, ReduceOp::Kind::max})
    m.reduces[static_cast<std::size_t>(kind)] = dtypes;
  return m;
}

}  // namespace weft::test
