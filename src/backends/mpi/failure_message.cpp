#include "backends/mpi/failure_message.hpp"

#include <algorithm>
#include <cstring>

#include "backends/mpi/control_channel.hpp"

namespace weft::mpi {

std::vector<std::byte> encode(const Failure& why) {
  FailureMessage head{.code = why.code, .op = why.op, .call = why.call};
  head.ranks = static_cast<std::uint32_t>(std::min<std::size_t>(why.ranks.size(), 512));
  head.text = static_cast<std::uint32_t>(
      std::min(why.text.size(), ControlChannel::kPayload - sizeof head - head.ranks * sizeof(int)));
  std::vector<std::byte> bytes(sizeof head + head.ranks * sizeof(int) + head.text);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (head.ranks > 0) std::memcpy(bytes.data() + sizeof head, why.ranks.data(), head.ranks * sizeof(int));
  if (head.text > 0)
    std::memcpy(bytes.data() + sizeof head + head.ranks * sizeof(int), why.text.data(), head.text);
  return bytes;
}

Failure decode(std::span<const std::byte> bytes) {
  FailureMessage head;
  std::memcpy(&head, bytes.data(), sizeof head);
  Failure why{.code = error_code(static_cast<int>(head.code)),
              .text = {},
              .op = head.op,
              .call = head.call,
              .ranks = {}};
  why.ranks.resize(head.ranks);
  if (head.ranks > 0) std::memcpy(why.ranks.data(), bytes.data() + sizeof head, head.ranks * sizeof(int));
  why.text.assign(reinterpret_cast<const char*>(bytes.data() + sizeof head + head.ranks * sizeof(int)),
                  head.text);
  return why;
}

}  // namespace weft::mpi
