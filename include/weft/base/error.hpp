// The one exception type. A program acts on its fields; a person reads its text.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/last_call.hpp"
#include "weft/base/op.hpp"

namespace weft {

enum class ErrorCode : std::uint8_t {
  bad_argument,  ///< an argument of this call is wrong; nothing was sent
  layout,        ///< a tensor's layout does not fit the operation
  unsupported,   ///< this backend or build cannot do it
  mismatch,      ///< ranks called different things
  timeout,       ///< the deadline passed; ranks() had not arrived
  peer_lost,     ///< ranks() died or left
  aborted,       ///< some rank called abort()
  system,        ///< the operating system refused; text holds errno's words
  corrupt,       ///< bytes are damaged, in a file or in memory that ranks share: not what was written there
};
inline constexpr int kErrorCodeCount = static_cast<int>(ErrorCode::corrupt) + 1;

/// "bad_argument", "layout", …
std::string_view name(ErrorCode code) noexcept;
/// The code of a number that another process, or a program in C, gives; `system` if the number is no code.
constexpr ErrorCode error_code(std::int64_t number) noexcept {
  return number >= 0 && number < kErrorCodeCount ? static_cast<ErrorCode>(number) : ErrorCode::system;
}

/// A failure: its kind, place and ranks. An Error carries it and a backend reports it.
struct Failure {
  ErrorCode code = ErrorCode::system;
  std::string text;              ///< without the group's tail
  Op op = Op::none;              ///< the operation that failed
  std::uint64_t call = kNoCall;  ///< its number in the group
  std::vector<int> ranks;        ///< the ranks to blame, in the group's numbering
};

/// Thrown by every weft function that fails. Copying does not throw.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text);
  explicit Error(Failure failure, bool quiesced = true);
  Error(Failure failure, bool quiesced, std::vector<LastCall> last_calls);

  ErrorCode code() const noexcept { return details_->failure.code; }
  /// The operation that failed first in the group, on whatever rank; where it was none that failed (a rank
  /// died, or called abort()), the one that throws.
  Op op() const noexcept { return details_->failure.op; }
  /// The call's number in its group, or kNoCall.
  std::uint64_t call() const noexcept { return details_->failure.call; }
  /// The ranks that are to blame (dead, absent, mismatching), in the group's numbering; may be empty.
  std::span<const int> ranks() const noexcept { return details_->failure.ranks; }
  /// True: nobody touches this call's buffers any more. False: call quiesce() before reusing them.
  bool quiesced() const noexcept { return details_->quiesced; }
  /// The last call of each rank of the group, in order of the ranks, as far as this rank knows: for a timeout
  /// (whose text says the same in words) or peer_lost of a call. Empty if the transport does not know them,
  /// and for all other errors.
  std::span<const LastCall> last_calls() const noexcept { return details_->last_calls; }

 private:
  struct Details {
    Failure failure;
    bool quiesced;
    std::vector<LastCall> last_calls;
  };
  std::shared_ptr<const Details> details_;
};

/// errno's words and, where this process's own limit may be what refused, that: "Too many open files (ulimit
/// -n is 64)".
std::string system_words(int error_number);
/// The same for the words of a library, which may have errno's among them.
std::string with_limits(std::string words);

/// An Error of code `system` whose text is "<what>: <system_words()>".
[[noreturn]] void throw_errno(const std::string& what, int error_number);

}  // namespace weft
