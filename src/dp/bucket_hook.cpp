#include "weft/dp/bucket_hook.hpp"

#include <fmt/format.h>

#include <memory>
#include <vector>

#include "dp/parts.hpp"
#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"

namespace weft {
namespace {

// The buckets of one reducer as bf16, in shared memory.
class Bf16 {
 public:
  Bf16(Context& context, Compute* compute)
      : context_(&context), compute_(compute), kernels_(&dp::kernels_of("bf16_hook", compute)) {}

  Work start(const ReadyBucket& b) {
    if (b.data.dtype != DType::f32)
      return b.group.all_reduce(b.data, b.data, {.op = b.op, .stream = b.stream});
    expect_same_reducer(b);
    const Tensor& half = buffer(b);
    kernels_->narrow(compute_, b.data.as<float>().data(), half.data_ptr<bf16>(), b.data.count());
    return b.group.all_reduce(half, half, {.op = b.op, .stream = b.stream});
  }
  void finish(const ReadyBucket& b) {
    if (b.data.dtype == DType::f32)
      kernels_->widen(compute_, buffer(b).data_ptr<bf16>(), b.data.as<float>().data(), b.data.count());
  }

 private:
  // Reducers that exist at the same time have separate groups, but would use the same buffers.
  void expect_same_reducer(const ReadyBucket& b) {
    if (group_ == nullptr) group_ = &b.group;
    if (group_ != &b.group)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("bf16_hook: bucket {} belongs to another reducer than those before; expected a hook "
                      "for each reducer, made by a call of bf16_hook()",
                      b.number));
  }
  const Tensor& buffer(const ReadyBucket& b) {
    if (buffers_.size() <= b.number) buffers_.resize(b.number + 1);
    Tensor& t = buffers_[b.number];
    if (!t || t.count() != b.data.count())
      t = Tensor(*context_, {b.data.count()}, DType::bf16, Memory::shared, b.stream);
    return t;
  }
  Context* context_;
  Compute* compute_;
  const GradientKernels* kernels_;
  const ProcessGroup* group_ = nullptr;  // of the first bucket: compared, not used
  std::vector<Tensor> buffers_;          // by the bucket's number
};

}  // namespace

BucketHook bf16_hook(Context& context, Compute* compute) {
  const auto state = std::make_shared<Bf16>(context, compute);
  return {.name = "bf16",
          .start = [state](const ReadyBucket& b) { return state->start(b); },
          .finish = [state](const ReadyBucket& b) { state->finish(b); }};
}

}  // namespace weft
