#include "weft/host/pin.hpp"

#include "host/arena.hpp"

namespace weft {

PinnedPages::PinnedPages(Context& context, const void* data, std::size_t bytes)
    : context_(context.arena().pin(data, bytes) ? &context : nullptr), data_(data), bytes_(bytes) {}

PinnedPages::~PinnedPages() {
  if (context_ != nullptr && !context_->forked()) context_->arena().unpin(data_, bytes_);
}

}  // namespace weft
