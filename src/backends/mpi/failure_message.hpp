// The first cause as a control message. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "weft/base/error.hpp"

namespace weft::mpi {

/// A control message of kind `failure`: this, the ranks, the text.
struct FailureMessage {
  ErrorCode code = ErrorCode::system;
  Op op = Op::none;
  std::uint64_t call = kNoCall;
  std::uint32_t ranks = 0, text = 0;
};

/// A text that is too long for a control message is cut: its beginning is sent.
std::vector<std::byte> encode(const Failure& why);
Failure decode(std::span<const std::byte> bytes);

}  // namespace weft::mpi
