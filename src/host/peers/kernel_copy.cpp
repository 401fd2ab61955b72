#include "host/peers/kernel_copy.hpp"

#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <utility>

#include "base/text/printable.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft {

SingleCopySetting single_copy_setting() {
  using S = SingleCopySetting;
  const std::string text = env::get("WEFT_SINGLE_COPY").value_or("auto");
  for (const auto& [word, setting] :
       {std::pair{"auto", S::automatic}, {"off", S::off}, {"pull", S::pull}, {"push", S::push}})
    if (text == word) return setting;
  throw Error(ErrorCode::bad_argument,
              fmt::format("WEFT_SINGLE_COPY is \"{}\"; expected auto, off, pull or push", printable(text)));
}

bool kernel_copies_from(const std::byte* data, std::size_t bytes) noexcept {
  std::byte seen[2];
  const auto byte = [](const std::byte* at) { return iovec{const_cast<std::byte*>(at), 1}; };
  const iovec here = {seen, sizeof seen};
  const iovec there[] = {byte(data), byte(data + bytes - 1)};
  return ::process_vm_readv(::getpid(), &here, 1, there, 2, 0) == 2;
}

bool ends_now(const PeerProcess& process) noexcept {
  constexpr auto kPatience = std::chrono::milliseconds(100);
  const auto patience = Deadline::after(kPatience);
  while (process.alive() && !patience.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return !process.alive();
}

}  // namespace weft
