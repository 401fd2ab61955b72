// A halo is a window: what the window refuses is told as the halo's.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/base/error.hpp"

namespace weft::windows {

/// f(); its Errors "window: ..." begin with "halo: ".
template <class F>
auto as_halo(const F& f) {
  constexpr std::string_view kWindow = "window: ";
  try {
    return f();
  } catch (const Error& e) {
    const std::string_view text = e.what();
    if (!text.starts_with(kWindow)) throw;
    throw Error(Failure{.code = e.code(),
                        .text = "halo: " + std::string(text.substr(kWindow.size())),
                        .op = e.op(),
                        .call = e.call(),
                        .ranks = std::vector<int>(e.ranks().begin(), e.ranks().end())},
                e.quiesced());
  }
}

}  // namespace weft::windows
