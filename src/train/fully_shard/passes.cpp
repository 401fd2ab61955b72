#include "train/fully_shard/passes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "dp/missing.hpp"
#include "train/masters.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

// The number of reductions that continue while the next block computes.
constexpr std::size_t kReductionsInFlight = 1;

DeviceMesh joined(const ShardAxes& axes) {
  std::vector<std::string> names;
  if (axes.replicate)
    for (const DeviceMesh& axis : axes.replicate.each_axis()) names.push_back(axis.name());
  for (const DeviceMesh& axis : axes.shard.each_axis()) names.push_back(axis.name());
  return axes.shard.root().submesh(names);
}

}  // namespace

int reshard_ranks(const ReshardAfterForward& reshard, int ranks) {
  if (const bool* const drop = std::get_if<bool>(&reshard)) return *drop ? 0 : 1;
  const int n = std::get<int>(reshard);
  if (n < 1 || ranks % n != 0)
    throw Error(ErrorCode::bad_argument, fmt::format("fully_shard: options.reshard_after_forward is {}; "
                                                     "expected true, false, or a number that divides "
                                                     "the {} ranks that share the parameters",
                                                     n, ranks));
  return n == ranks && n > 1 ? 0 : n;
}

ShardPasses::ShardPasses(std::vector<std::unique_ptr<ShardBlock>> blocks, const ShardAxes& axes,
                         const FullyShardOptions& options)
    : blocks_(std::move(blocks)),
      axes_(axes),
      options_(options),
      reshard_ranks_(reshard_ranks(options.reshard_after_forward, axes.shard.size())),
      all_axes_(joined(axes)) {}

ShardPasses::~ShardPasses() {
  hooks_.clear();
  discard();
}

void ShardPasses::listen() {
  for (const auto& owned : blocks_) {
    ShardBlock* const block = owned.get();
    Module& module = block->module();
    hooks_.push_back(module.around_forward(
        {[this, block](Module&, Frame&) { enter(*block, Direction::forward); },
         [this, block](Module&, Frame& f) { leave(*block, Direction::forward, f.keeps()); }}));
    hooks_.push_back(module.around_backward(
        {[this, block](Module&, Frame&) { enter(*block, Direction::backward); },
         [this, block](Module&, Frame& f) { leave(*block, Direction::backward, f.keeps()); }}));
    for (const Module::HookPoint point : {Module::HookPoint::post_forward, Module::HookPoint::post_backward})
      hooks_.push_back(
          module.add_hook(point, [this, block](Module&, Tensors&, Frame&) { completed(*block); }));
    const MixedPrecision& p = options_.precision;
    if (p.param == DType::bf16 && p.activations == DType::f32 && p.cast_inputs)
      hooks_.push_back(module.add_hook(Module::HookPoint::pre_forward,
                                       [this](Module&, Tensors& x, Frame& f) { round_inputs(x, f); }));
  }
}

void ShardPasses::round_inputs(Tensors& tensors, Frame& frame) const {
  for (Tensor& t : tensors) {
    if (t.dtype() != DType::f32) continue;
    const Tensor narrow = frame.compute().make(t.shape(), DType::bf16);
    const Tensor wide =
        frame.compute().make(t.shape(), DType::f32, t.storage().memory()).with_layout(t.layout());
    kernels::round_to_bf16(frame.kernels(), t.data_ptr<float>(), narrow.data_ptr<bf16>(), t.count());
    kernels::widen_bf16(frame.kernels(), narrow.data_ptr<bf16>(), wide.data_ptr<float>(), t.count());
    t = wide;
  }
}

// The groups in which weights that were kept in part are gathered: reshard_ranks_ neighbours each. Returns
// this rank's group.
ProcessGroup* ShardPasses::neighbours() {
  if (reshard_ranks_ < 2) return nullptr;
  if (!neighbours_) {
    const int first = axes_.shard.rank() / reshard_ranks_ * reshard_ranks_;
    std::vector<int> ranks;
    for (int r = first; r < first + reshard_ranks_; ++r) ranks.push_back(r);
    neighbours_ =
        axes_.shard.group().subgroup(fmt::format("fully_shard.{}.{}", reshard_ranks_, first), ranks);
  }
  return &neighbours_;
}

// Replicas of the shards that began with different values would get equal gradients and stay different.
void ShardPasses::compare_replicas() {
  std::vector<Parameter*> parameters;
  for (const auto& block : blocks_)
    parameters.insert(parameters.end(), block->parameters().begin(), block->parameters().end());
  expect_same_masters(parameters, {&axes_.replicate, 1});
  compared_ = true;
}

void ShardPasses::enter(ShardBlock& block, Direction direction) {
  if (depth_ == 0) seen_.clear();
  ++depth_;
  ++block.depth;
  const ShardBlock::Use use =
      direction == Direction::forward ? ShardBlock::Use::forward : ShardBlock::Use::backward;
  block.under_way.push_back({std::uncaught_exceptions(), false, use});
  try {
    poll();
    if (!compared_) compare_replicas();
    block.gather(neighbours(), use);
    if (direction == Direction::backward && block.depth == 1) block.begin_gradients();
    seen_.push_back(&block);
    prefetch(block, direction);
    note_peak();
  } catch (...) {  // the module does not leave a scope that it could not enter
    try {
      leave(block, direction, true);
    } catch (...) {}  // the first error is reported
    throw;
  }
}

// Prefetches a block that came directly after this one in the last forward pass or, in a backward pass,
// directly before it.
void ShardPasses::prefetch(const ShardBlock& block, Direction direction) {
  if (!options_.prefetch) return;
  const auto at = std::find(order_.begin(), order_.end(), &block);
  if (at == order_.end()) return;
  ShardBlock* next = nullptr;
  if (direction == Direction::forward)
    next = at + 1 == order_.end() ? nullptr : *(at + 1);
  else
    next = &block == order_.front() ? order_.back() : at == order_.begin() + 1 ? nullptr : *(at - 1);
  if (next == nullptr || next == &block || next->gathered() || next->on_its_way()) return;
  next->start_gather(neighbours(),
                     direction == Direction::forward ? ShardBlock::Use::forward : ShardBlock::Use::backward);
  if (next->on_its_way()) ++prefetched;
}

void ShardPasses::leave(ShardBlock& block, Direction direction, bool keeps) {
  const ShardBlock::Pass pass = block.under_way.back();
  block.under_way.pop_back();
  --block.depth;
  --depth_;
  // A hook behind ours may throw, too; then this is called while that exception is in flight.
  const bool done = pass.completed && std::uncaught_exceptions() == pass.exceptions;
  if (!done && failed_ == nullptr) failed_ = &block;
  try {
    if (failed_ == nullptr) {
      if (direction == Direction::forward)
        leave_forward(block, keeps);
      else
        leave_backward(block);
    }
    if (depth_ == 0 && failed_ == nullptr) end(direction);
  } catch (...) {
    if (failed_ == nullptr) failed_ = &block;
    if (depth_ == 0) discard();
    throw;
  }
  if (depth_ > 0 || failed_ == nullptr) return;
  const std::string at = failed_->module().path();
  discard();
  if (done)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("fully_shard: an error in the pass of \"{}\" was caught by a module above it, which "
                    "went on; expected it to end the outermost pass. All gradients were discarded",
                    at));
}

void ShardPasses::leave_forward(ShardBlock& block, bool keeps) {
  if (block.depth > 0) {  // run again inside its backward
    block.gather(neighbours(), block.under_way.back().use);
    return;
  }
  if (keepers > 0) return;
  const bool root = &block == blocks_.front().get();
  if (!keeps)
    block.drop(false);
  else if (!root)
    block.drop(true);
}

void ShardPasses::leave_backward(ShardBlock& block) {
  if (block.depth > 0) return;
  if (*no_syncs > 0) {
    block.keep_unreduced();
  } else {
    end_reductions(kReductionsInFlight - 1);
    block.start_reduce();
    if (block.reducing()) reducing_.push_back(&block);
  }
  note_peak();
  if (keepers == 0) block.drop(false);
}

void ShardPasses::drop_kept() {
  for (const auto& block : blocks_) block->drop(false);
}

// The outermost pass is over.
void ShardPasses::end(Direction direction) {
  end_gathers();
  if (direction == Direction::forward) {
    order_ = seen_;
    return;
  }
  end_reductions(0);
  if (*no_syncs == 0) expect_used(seen_);
}

// Ends gathers that were begun and not used: the pass took another path through the model than the previous
// one.
void ShardPasses::end_gathers() {
  for (const auto& block : blocks_)
    if (block->on_its_way()) {
      block->gather(neighbours(), block->gathered_for());
      block->drop(false);
    }
}

// Ends reductions in the order in which they were begun, all but the last `leave`.
void ShardPasses::end_reductions(std::size_t leave) {
  while (reducing_.size() > leave) {
    ShardBlock& oldest = *reducing_.front();
    reducing_.pop_front();
    oldest.finish_reduce();
  }
}

// Throws if there are parameters that no pass used: among the blocks that ran and were reduced, or in the
// whole model if its root ran.
void ShardPasses::expect_used(const std::vector<ShardBlock*>& ran) {
  const auto is_one = [&ran](const std::unique_ptr<ShardBlock>& b) {
    return std::ranges::count(ran, b.get()) > 0;
  };
  const bool root_ran = is_one(blocks_.front());
  std::vector<Parameter*> all;
  std::vector<std::size_t> missing;
  for (const auto& block : blocks_) {
    const bool reduced = is_one(block);
    if (!reduced && !root_ran) continue;
    for (Parameter* p : block->parameters()) {
      if (!p->trainable()) continue;
      const bool unused = reduced ? std::ranges::count(block->missing(), p) > 0 : !p->has_gradient();
      if (unused) missing.push_back(all.size());
      if (unused && !p->has_gradient()) block->give_zeros(*p);
      all.push_back(p);
    }
  }
  if (options_.unused == Unused::zeros) return;
  try {
    dp::expect_none_missing({"fully_shard: no backward pass used", "FullyShardOptions"}, all_axes_,
                            all.size(), missing,
                            [&](std::size_t i) { return std::string_view(all[i]->path()); });
  } catch (...) {
    for (const std::size_t i : missing) all[i]->zero_gradient();
    throw;
  }
}

void ShardPasses::poll() {
  for (ShardBlock* block : reducing_) block->poll();
  for (const auto& block : blocks_)
    if (block->on_its_way()) block->poll();
}

void ShardPasses::finish() {
  if (*no_syncs > 0)
    throw Error(ErrorCode::bad_argument,
                "fully_shard: finish() inside no_sync(); end that scope before the last pass");
  std::vector<ShardBlock*> waiting;
  for (const auto& block : blocks_)
    if (block->unreduced()) waiting.push_back(block.get());
  if (waiting.empty()) return;
  try {
    for (ShardBlock* block : waiting) {
      block->start_reduce();
      block->finish_reduce();
    }
    expect_used(waiting);
  } catch (...) {
    discard();
    throw;
  }
}

void ShardPasses::discard() noexcept {
  failed_ = nullptr;
  reducing_.clear();
  for (const auto& block : blocks_) block->discard();
}

std::int64_t ShardPasses::whole_now() const noexcept {
  std::int64_t sum = 0;
  for (const auto& block : blocks_) sum += block->whole_bytes();
  return sum;
}

}  // namespace weft
