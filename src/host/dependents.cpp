#include "host/dependents.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <utility>

#include "weft/host/context.hpp"

namespace weft {

Dependents::Entry::Entry(Context& context, std::string what)
    : context_(context), all_(context.attached<Dependents>()) {
  const std::lock_guard lock(all_.mutex_);
  at_ = all_.named_.insert(all_.named_.end(), std::move(what));
}

Dependents::Entry::~Entry() {
  if (context_.forked()) return;  // the parent's thread may have held the lock
  const std::lock_guard lock(all_.mutex_);
  all_.named_.erase(at_);
}

std::string Dependents::text() const {
  const std::lock_guard lock(mutex_);
  std::string text = fmt::format("{}", fmt::join(named_, ", "));
  const auto add = [&text](std::int64_t count, std::string_view one, std::string_view what) {
    if (count > 0)
      text += fmt::format("{}{} {}{}{}", text.empty() ? "" : ", ", count, one, count == 1 ? "" : "s", what);
  };
  add(blocks.load(), "block", " of memory (tensors)");
  add(pins.load(), "range", " of pinned pages");
  return text;
}

}  // namespace weft
