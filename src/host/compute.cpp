#include "weft/host/compute.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft {

Compute::Compute(Context& context, int threads) : context_(&context), threads_(threads) {
  if (threads < 1)
    throw Error(ErrorCode::bad_argument, fmt::format("compute: threads is {}; expected at least 1", threads));
}

Compute::~Compute() {
  while (!attachments_.empty()) attachments_.pop_back();
}

}  // namespace weft
