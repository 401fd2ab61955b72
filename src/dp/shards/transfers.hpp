// The transfers of ShardedParameters: an all-gather and a reduce-scatter of many tensors, in as few calls as
// possible. Private to dp.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "dp/convert.hpp"
#include "dp/shards/plan.hpp"
#include "weft/mesh/transfer.hpp"

namespace weft::dp {

class ShardTransfers {
 public:
  explicit ShardTransfers(ShardPlan plan) : plan_(std::move(plan)) {}
  const ShardPlan& plan() const noexcept { return plan_; }
  /// The number of this rank among the ranks of the axes.
  std::size_t own() const noexcept { return own_; }
  void set_history(std::uint64_t digest) noexcept { history_ = digest; }

  /// The tensor in `buffer` from byte `at` on.
  static Tensor part(const Tensor& buffer, std::int64_t at, const Shape& shape, DType dtype) {
    const auto base = static_cast<std::size_t>(buffer.data() - buffer.storage().data());
    return Tensor(buffer.storage(), base + static_cast<std::size_t>(at), shape, dtype);
  }
  /// `to`: the places for the whole tensors; `keep`: the result of finish(). `self`: the owner of this
  /// object.
  Transfer gather(const std::shared_ptr<ShardTransfers>& self, std::span<const ConstTensorView> shards,
                  std::vector<std::byte*> to, Tensor keep);
  /// Consumes `gradients`.
  Transfer reduce(const std::shared_ptr<ShardTransfers>& self, Tensor gradients, ReduceOp op);

 private:
  class Gather;
  class Reduce;
  void compare();
  Tensor shared(std::int64_t count, DType dtype) const;

  const ShardPlan plan_;
  const std::size_t own_ = static_cast<std::size_t>(plan_.axes.rank());
  std::uint64_t history_ = 0;  // of the parts
  bool compared_ = false;
};

/// A reduction whose results go to the caller's memory.
class IntoShards final : public Transfer::Steps {
 public:
  IntoShards(Transfer transfer, std::shared_ptr<const ShardTransfers> of, std::vector<TensorView> shards)
      : of_(std::move(of)), shards_(std::move(shards)), transfer_(std::move(transfer)) {}
  bool done() override { return transfer_.done(); }
  Tensor finish() override;

 private:
  const std::shared_ptr<const ShardTransfers> of_;
  const std::vector<TensorView> shards_;
  Transfer transfer_;
};

}  // namespace weft::dp
