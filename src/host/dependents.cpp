#include "host/dependents.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "weft/host/context.hpp"

namespace weft {

Dependents::Entry::Entry(Context& context, std::string what) : all_(context.attached<Dependents>()) {
  const std::lock_guard lock(all_.mutex_);
  at_ = all_.named_.insert(all_.named_.end(), std::move(what));
}

Dependents::Entry::~Entry() {
  const std::lock_guard lock(all_.mutex_);
  all_.named_.erase(at_);
}

std::string Dependents::text() const {
  const std::lock_guard lock(mutex_);
  std::string text = fmt::format("{}", fmt::join(named_, ", "));
  if (const std::int64_t count = blocks.load(); count > 0)
    text += fmt::format("{}{} block{} of memory (tensors)", text.empty() ? "" : ", ", count,
                        count == 1 ? "" : "s");
  return text;
}

}  // namespace weft
