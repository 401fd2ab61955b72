#include "weft/backends/first_cause.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/text/plain_streams.hpp"

namespace weft {
namespace {

// How long a rank waits for the Store. The Store may be on a host that is cut off, or in a stopped process.
constexpr auto kStoreAnswer = std::chrono::milliseconds(500);

}  // namespace

// "code op call n rank…\ntext"
std::string encode(const Failure& why) {
  return fmt::format("{} {} {} {} {}\n{}", static_cast<int>(why.code), static_cast<int>(why.op), why.call,
                     why.ranks.size(), fmt::join(why.ranks, " "), why.text);
}

Failure decode_failure(const std::string& text) {
  const std::size_t end = std::min(text.find('\n'), text.size());
  TextIn head(text.substr(0, end));
  int code = 0, op = 0;
  std::size_t n = 0;
  Failure why;
  head >> code >> op >> why.call >> n;
  // Another build, or another program that writes to the store, may use values that this build lacks.
  why.code = error_code(code);
  why.op = op >= 0 && op < kOpCount ? static_cast<Op>(op) : Op::none;
  for (int r = 0; why.ranks.size() < n && head >> r;) why.ranks.push_back(r);
  if (end < text.size()) why.text = text.substr(end + 1);
  return why;
}

Failure FirstCause::raise(const Failure& why) const noexcept {
  try {
    if (store_ != nullptr)
      return decode_failure(store_->compare_set(key_, "", encode(why), Deadline::after(kStoreAnswer)));
  } catch (...) {  // the Store has ended: every rank reports its own error
  }
  return why;
}

std::optional<Failure> FirstCause::look() const noexcept {
  try {
    if (store_ == nullptr) return std::nullopt;
    if (const std::optional<std::string> text = store_->try_get(key_, Deadline::after(kStoreAnswer)))
      return decode_failure(*text);
  } catch (...) {}
  return std::nullopt;
}

}  // namespace weft
