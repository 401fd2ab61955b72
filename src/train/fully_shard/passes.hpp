// The work around the passes of a sharded model: which block is gathered, dropped or reduced, and when.
// Private to train.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "train/fully_shard/block.hpp"

namespace weft {

/// Every pass of a block enters and leaves here, in nested order. The first block to enter is the outermost;
/// when it leaves, nothing is in flight any more.
class ShardPasses {
 public:
  ShardPasses(std::vector<std::unique_ptr<ShardBlock>> blocks, const ShardAxes& axes,
              const FullyShardOptions& options);
  ~ShardPasses();

  /// Sets the hooks of all blocks.
  void listen();

  const std::vector<std::unique_ptr<ShardBlock>>& blocks() const noexcept { return blocks_; }
  void finish();
  void discard() noexcept;

  std::shared_ptr<int> no_syncs = std::make_shared<int>(0);  // that live
  int keepers = 0;                                           // the KeptWeights that live
  /// Drops all weights that are gathered.
  void drop_kept();
  std::int64_t prefetched = 0, whole_peak = 0;
  std::int64_t whole_now() const noexcept;

 private:
  enum class Direction : unsigned char { forward, backward };
  void compare_replicas();
  void enter(ShardBlock& block, Direction direction);
  void leave(ShardBlock& block, Direction direction, bool keeps);
  void leave_forward(ShardBlock& block, bool keeps);
  void leave_backward(ShardBlock& block);
  void completed(ShardBlock& block) { block.under_way.back().completed = true; }
  void end(Direction direction);
  void prefetch(const ShardBlock& block, Direction direction);
  void end_gathers();
  void end_reductions(std::size_t leave);
  void expect_used(const std::vector<ShardBlock*>& ran);
  void poll();
  void note_peak() noexcept { whole_peak = std::max(whole_peak, whole_now()); }
  ProcessGroup* neighbours();
  void round_inputs(Tensors& tensors, Frame& frame) const;

  const std::vector<std::unique_ptr<ShardBlock>> blocks_;
  const ShardAxes axes_;
  const FullyShardOptions options_;
  const int reshard_ranks_;
  DeviceMesh all_axes_;  // that shard, and that replicate
  ProcessGroup neighbours_;
  std::vector<HookHandle> hooks_;
  bool compared_ = false;                  // replicas of the shards
  int depth_ = 0;                          // passes of blocks that are under way
  const ShardBlock* failed_ = nullptr;     // the first of them that threw
  std::vector<ShardBlock*> order_, seen_;  // in which blocks went forward last, and go in this pass
  std::deque<ShardBlock*> reducing_;
};

/// 0, 1 or n: see ShardBlock.
int reshard_ranks(const ReshardAfterForward& reshard, int ranks);

}  // namespace weft
