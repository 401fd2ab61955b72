// All argument checks of a call, before it is numbered. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "weft/backends/backend.hpp"
#include "weft/backends/call.hpp"

namespace weft {

/// The buffers of a call on this rank; a missing buffer is null with 0 elements.
struct Operands {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_count = 0, out_count = 0;
  DType dtype = DType::u8;
};

/// Throws bad_argument or unsupported; the text names the wrong argument, and ends with group and rank
/// (`[group "tp", rank 3]`).
Operands check(const Call& call, const Traits& traits, int rank, int size, std::string_view group);
/// Like check(), for ProcessGroup::probe(), which is no call.
void check_probe(int source, const CallOptions& options, const Traits& traits, int rank, int size,
                 std::string_view group);

}  // namespace weft
