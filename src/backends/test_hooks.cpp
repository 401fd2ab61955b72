#include "backends/test_hooks.hpp"

#include <map>
#include <mutex>
#include <utility>

namespace weft {
namespace {

// One per Context.
struct HooksByRank {
  explicit HooksByRank(Context&) {}
  std::mutex mutex;
  std::map<int, TestHooks> hooks;  // by rank of this process
};

}  // namespace

TestHooks test_hooks(const GroupInit& b) {
  auto& all = b.context.attached<HooksByRank>();
  const std::lock_guard lock(all.mutex);
  const auto found = all.hooks.find(b.process_rank);
  return found == all.hooks.end() ? TestHooks{} : found->second;
}

ScopedTestHooks::ScopedTestHooks(Context& context, int process_rank, TestHooks hooks)
    : context_(context), process_rank_(process_rank) {
  auto& all = context_.attached<HooksByRank>();
  const std::lock_guard lock(all.mutex);
  outer_ = std::exchange(all.hooks[process_rank_], std::move(hooks));
}

ScopedTestHooks::~ScopedTestHooks() {
  auto& all = context_.attached<HooksByRank>();
  const std::lock_guard lock(all.mutex);
  all.hooks[process_rank_] = std::move(outer_);
}

}  // namespace weft
