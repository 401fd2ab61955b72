// Errors of windows begin with the name of the interface that the program called: "halo: " or "window: ". No
// state. Any thread may call them.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "weft/base/error.hpp"

namespace weft::windows {

/// Returns "<name>: " and `text`, or `text` alone if it begins so.
inline std::string named(const char* name, std::string_view text) {
  const std::string begin = std::string(name) + ": ";
  return text.starts_with(begin) ? std::string(text) : begin + std::string(text);
}

[[noreturn]] inline void throw_with_text(const Error& e, std::string text, bool quiesced) {
  const auto ranks = e.ranks();
  const auto last_calls = e.last_calls();
  throw Error(Failure{.code = e.code(),
                      .text = std::move(text),
                      .op = e.op(),
                      .call = e.call(),
                      .ranks = {ranks.begin(), ranks.end()}},
              quiesced, {last_calls.begin(), last_calls.end()});
}

/// The text of e, named(). The group's texts about its exchange begin with the name of that call ("exchange:
/// rank 1 died"). The texts of other calls about this exchange begin with their names ("recv: halo: ...").
/// Both names are left out.
inline std::string named_once(const char* name, const Error& e) {
  std::string_view text = e.what();
  const std::string noticed_in = std::string(weft::name(e.op())) + ": ";
  const bool own = e.op() == Op::exchange && text.starts_with(noticed_in);
  if (own || text.starts_with(noticed_in + name + ": ")) text.remove_prefix(noticed_in.size());
  return named(name, text);
}

/// Call it in a catch block of `e`. It throws `e` with the text named_once().
[[noreturn, gnu::cold, gnu::noinline]] inline void throw_named(const char* name, const Error& e) {
  std::string text = named_once(name, e);
  if (text == e.what()) throw;
  throw_with_text(e, std::move(text), e.quiesced());
}

/// Returns f(), which plans a window for a halo. Its Errors "window: ..." begin with "halo: ".
template <class F>
auto as_halo(const F& f) {
  constexpr std::string_view kWindow = "window: ";
  try {
    return f();
  } catch (const Error& e) {
    const std::string_view text = e.what();
    if (!text.starts_with(kWindow)) throw;
    throw_with_text(e, named("halo", text.substr(kWindow.size())), e.quiesced());
  }
}

}  // namespace weft::windows
