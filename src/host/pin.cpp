#include "weft/host/pin.hpp"

#include "host/arena.hpp"
#include "host/dependents.hpp"

namespace weft {

PinnedPages::PinnedPages(Context& context, const void* data, std::size_t bytes)
    : context_(arena_of(context).pin(data, bytes) ? &context : nullptr), data_(data), bytes_(bytes) {
  if (context_ != nullptr) ++context.attached<Dependents>().pins;
}

PinnedPages::~PinnedPages() {
  if (context_ == nullptr || context_->forked()) return;
  arena_of(*context_).unpin(data_, bytes_);
  --context_->attached<Dependents>().pins;
}

}  // namespace weft
