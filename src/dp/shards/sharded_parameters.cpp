#include "weft/dp/sharded_parameters.hpp"

#include <fmt/format.h>

#include "dp/parts.hpp"
#include "dp/shards/transfers.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using dp::ShardItem;

[[noreturn]] void bad(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "sharded_parameters: " + text);
}

}  // namespace

struct ShardedParameters::Impl : dp::ShardTransfers {
  using dp::ShardTransfers::ShardTransfers;

  const ShardItem& item(std::size_t i) const {
    if (i >= plan().items.size()) bad(fmt::format("i is {}; expected less than {}", i, plan().items.size()));
    return plan().items[i];
  }
  void expect_count(const char* what, std::size_t got) const {
    if (got != plan().items.size())
      bad(fmt::format("{} are {}; expected one for each of {} entries", what, got, plan().items.size()));
  }
  void expect_view(const char* what, const ShardItem& item, const ConstTensorView& v, DType dtype,
                   const Shape& shape) const {
    const auto wrong = [&](const std::string& text) {
      bad(fmt::format("{} of \"{}\" {}", what, item.entry.name, text));
    };
    if (const std::string fault = memory_fault(v); !fault.empty()) wrong(fault);
    if (v.dtype != dtype || !(v.shape == shape))
      wrong(fmt::format("is {} {}; expected {} {}", name(v.dtype), to_string(v.shape), name(dtype),
                        to_string(shape)));
    if (const std::string fault = device_fault(v.device, plan().options.compute); !fault.empty())
      wrong(fault);
  }
  template <class View>
  void expect_shards(std::span<const View> shards) const {
    expect_count("shards", shards.size());
    for (std::size_t i = 0; i < shards.size(); ++i)
      expect_view("the shard", plan().items[i], shards[i], plan().items[i].entry.dtype,
                  plan().items[i].shard->local_shape());
  }
  template <class View>
  void expect_wholes(std::span<const View> wholes) const {
    expect_count("wholes", wholes.size());
    for (std::size_t i = 0; i < wholes.size(); ++i)
      expect_view("the whole", plan().items[i], wholes[i], plan().items[i].entry.dtype,
                  plan().items[i].entry.layout->local_shape());
  }
  void expect_buffer(const char* what, const Tensor& buffer, DType dtype, std::int64_t count,
                     const char* made_by) const {
    if (buffer.dtype() != dtype || buffer.count() != count || (count > 0 && !buffer))
      bad(fmt::format("{} is {} x{}; expected {} x{}, made by {}", what, name(buffer.dtype()), buffer.count(),
                      name(dtype), count, made_by));
    if (const std::string fault = device_fault(buffer.device(), plan().options.compute); !fault.empty())
      bad(fmt::format("{} {}", what, fault));
  }
  Tensor make(std::int64_t count, DType dtype) const {
    return Tensor(plan().axes.context(), {count}, dtype, Memory::shared,
                  dp::stream_of(plan().options.compute));
  }
  void expect_op(const ReduceOp& op) const {
    if (!(op == ReduceOp::sum) && !(op == ReduceOp::avg))
      bad(fmt::format("op is {}; expected sum or avg", name(op)));
  }
};

ShardedParameters::ShardedParameters(DeviceMesh shard, std::vector<ShardEntry> entries,
                                     const ShardedParametersOptions& options)
    : impl_(std::make_shared<Impl>(dp::ShardPlan(std::move(shard), std::move(entries), options))) {}
ShardedParameters::~ShardedParameters() = default;
ShardedParameters::ShardedParameters(ShardedParameters&&) noexcept = default;
ShardedParameters& ShardedParameters::operator=(ShardedParameters&&) noexcept = default;

std::size_t ShardedParameters::size() const noexcept { return impl_->plan().items.size(); }
const ShardEntry& ShardedParameters::entry(std::size_t i) const { return impl_->item(i).entry; }
const LayoutRef& ShardedParameters::whole_layout(std::size_t i) const { return impl_->item(i).entry.layout; }
const LayoutRef& ShardedParameters::shard_layout(std::size_t i) const { return impl_->item(i).shard; }

std::vector<Chunk> ShardedParameters::ranges(std::size_t i, int rank) const {
  shard_count(i, rank);  // checks both
  std::vector<Chunk> ranges;
  impl_->item(i).for_each_run(static_cast<std::size_t>(rank),
                              [&](std::int64_t in_whole, std::int64_t, std::int64_t count) {
                                ranges.push_back({in_whole, count});
                              });
  return ranges;
}

std::int64_t ShardedParameters::shard_count(std::size_t i, int rank) const {
  const ShardItem& item = impl_->item(i);
  if (rank < 0 || rank >= impl_->plan().axes.size())
    bad(fmt::format("rank is {}; expected 0 to {}", rank, impl_->plan().axes.size() - 1));
  return item.shard_counts[static_cast<std::size_t>(rank)];
}

std::int64_t ShardedParameters::unshard_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const ShardItem& item : impl_->plan().items)
    sum += (item.count - item.shard_counts[impl_->own()]) * size_bytes(item.entry.dtype);
  return sum;
}

std::int64_t ShardedParameters::reduce_bytes() const noexcept {
  std::int64_t sum = 0;
  for (const ShardItem& item : impl_->plan().items) sum += item.count - item.shard_counts[impl_->own()];
  return sum * size_bytes(impl_->plan().options.reduce);
}

void ShardedParameters::set_history(std::uint64_t digest) noexcept { impl_->set_history(digest); }

Tensor ShardedParameters::make_whole() const { return impl_->make(whole_bytes(), DType::u8); }
std::int64_t ShardedParameters::whole_bytes() const noexcept { return impl_->plan().whole_bytes; }

Tensor ShardedParameters::whole(std::size_t i, const Tensor& buffer) const {
  const ShardItem& item = impl_->item(i);
  impl_->expect_buffer("buffer", buffer, DType::u8, whole_bytes(), "make_whole()");
  return impl_->part(buffer, item.whole_at, item.entry.layout->local_shape(), item.entry.dtype)
      .with_layout(item.entry.layout);
}

Transfer ShardedParameters::start_unshard(std::span<const ConstTensorView> shards, Tensor into) {
  impl_->expect_shards(shards);
  if (!into) into = make_whole();
  impl_->expect_buffer("into", into, DType::u8, whole_bytes(), "make_whole()");
  std::vector<std::byte*> to;
  for (const ShardItem& item : impl_->plan().items) to.push_back(into.data() + item.whole_at);
  return impl_->gather(impl_, shards, std::move(to), std::move(into));
}

Transfer ShardedParameters::start_unshard(std::span<const ConstTensorView> shards,
                                          std::span<const TensorView> wholes) {
  impl_->expect_shards(shards);
  impl_->expect_wholes(wholes);
  std::vector<std::byte*> to;
  for (const TensorView& v : wholes) to.push_back(v.data);
  return impl_->gather(impl_, shards, std::move(to), Tensor());
}

void ShardedParameters::reshard(std::span<const ConstTensorView> wholes,
                                std::span<const TensorView> shards) const {
  impl_->expect_wholes(wholes);
  impl_->expect_shards(shards);
  std::vector<dp::Copied> copies;
  for (std::size_t i = 0; i < wholes.size(); ++i) {
    const std::int64_t size = size_bytes(wholes[i].dtype);
    impl_->item(i).for_each_run(
        impl_->own(), [&](std::int64_t in_whole, std::int64_t in_part, std::int64_t count) {
          copies.push_back({wholes[i].data + in_whole * size, shards[i].data + in_part * size, count * size});
        });
  }
  dp::copy_all(impl_->plan().options.compute, copies.size(), [&](std::size_t i) { return copies[i]; });
}

Tensor ShardedParameters::make_gradients() const {
  return impl_->make(impl_->plan().gradient_count, impl_->plan().options.reduce);
}
std::int64_t ShardedParameters::gradient_bytes() const noexcept {
  return impl_->plan().gradient_count * size_bytes(impl_->plan().options.reduce);
}

Tensor ShardedParameters::gradient(std::size_t i, const Tensor& buffer) const {
  const ShardItem& item = impl_->item(i);
  impl_->expect_buffer("buffer", buffer, impl_->plan().options.reduce, impl_->plan().gradient_count,
                       "make_gradients()");
  return buffer.slice_flat(item.gradient_at, item.entry.layout->local_shape());
}

Transfer ShardedParameters::start_reduce_scatter(Tensor gradients, ReduceOp op) {
  impl_->expect_buffer("gradients", gradients, impl_->plan().options.reduce, impl_->plan().gradient_count,
                       "make_gradients()");
  impl_->expect_op(op);
  return impl_->reduce(impl_, std::move(gradients), op);
}

Transfer ShardedParameters::start_reduce_scatter(std::span<const ConstTensorView> gradients, ReduceOp op) {
  impl_->expect_count("gradients", gradients.size());
  impl_->expect_op(op);
  const dp::ShardPlan& plan = impl_->plan();
  for (std::size_t i = 0; i < gradients.size(); ++i)
    impl_->expect_view("the gradient", plan.items[i], gradients[i], plan.options.gradient,
                       plan.items[i].entry.layout->local_shape());
  const Tensor buffer = make_gradients();
  std::vector<dp::Converted> all;
  for (std::size_t i = 0; i < gradients.size(); ++i)
    all.push_back({gradients[i].data,
                   buffer.data() + plan.items[i].gradient_at * size_bytes(plan.options.reduce),
                   plan.items[i].count});
  dp::convert_all(plan.options.compute, all, plan.options.gradient, plan.options.reduce);
  return impl_->reduce(impl_, buffer, op);
}

Transfer ShardedParameters::start_reduce_scatter(std::span<const ConstTensorView> gradients,
                                                 std::span<const TensorView> shards, ReduceOp op) {
  impl_->expect_count("shards", shards.size());
  const dp::ShardPlan& plan = impl_->plan();
  for (std::size_t i = 0; i < shards.size(); ++i)
    impl_->expect_view("the shard", plan.items[i], shards[i], plan.options.gradient,
                       plan.items[i].shard->local_shape());
  return Transfer(std::make_unique<dp::IntoShards>(start_reduce_scatter(gradients, op), impl_,
                                                   std::vector<TensorView>(shards.begin(), shards.end())));
}

Tensor ShardedParameters::shard_gradient(std::size_t i, const Tensor& reduced) const {
  const ShardItem& item = impl_->item(i);
  impl_->expect_buffer("reduced", reduced, impl_->plan().options.gradient, impl_->plan().shard_count,
                       "start_reduce_scatter()");
  return reduced.slice_flat(item.shard_at, item.shard->local_shape()).with_layout(item.shard);
}

}  // namespace weft
