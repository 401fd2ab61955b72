// The exception type of all weft functions. Programs read the fields of an Error; people read the text.
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

/// The kinds of errors. Their numbers are those of weft_status in C, where 0 is WEFT_OK.
enum class ErrorCode : std::uint8_t {
  bad_argument = 1,  ///< an argument of this call is wrong; nothing was sent
  layout,            ///< a tensor's layout does not fit the operation
  unsupported,       ///< this backend or build cannot do it
  mismatch,          ///< ranks called different things
  timeout,           ///< the deadline passed; ranks() are the ranks that had not arrived
  peer_lost,         ///< ranks() died or left
  aborted,           ///< some rank called abort()
  system,            ///< the operating system refused; the text holds errno's words
  corrupt,           ///< bytes in a file, or in memory that ranks share, differ from those that were written
};
inline constexpr int kErrorCodeCount = static_cast<int>(ErrorCode::corrupt);

/// "bad_argument", "layout", …
std::string_view name(ErrorCode code) noexcept;
/// The code for a number from another process or from a C program. `system` if no code has this number.
constexpr ErrorCode error_code(std::int64_t number) noexcept {
  return number >= 1 && number <= kErrorCodeCount ? static_cast<ErrorCode>(number) : ErrorCode::system;
}

/// A failure: its kind, the call in which it happened, and the ranks to blame. Backends report a Failure; an
/// Error contains one.
struct Failure {
  ErrorCode code = ErrorCode::system;
  std::string text;              ///< without the end of the text, which the group adds
  Op op = Op::none;              ///< the operation that failed
  std::uint64_t call = kNoCall;  ///< the number of that call in the group
  std::vector<int> ranks;        ///< the ranks to blame, in the group's numbering
};

/// Thrown by every weft function that fails. Copying does not throw.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text);
  explicit Error(Failure failure, bool quiesced = true);
  Error(Failure failure, bool quiesced, std::vector<LastCall> last_calls);

  ErrorCode code() const noexcept { return details_->failure.code; }
  /// The operation that failed first in the group, on any rank. If no operation failed (a rank died, or
  /// called abort()), the operation that throws.
  Op op() const noexcept { return details_->failure.op; }
  /// The call's number in its group, or kNoCall.
  std::uint64_t call() const noexcept { return details_->failure.call; }
  /// The ranks that are to blame (dead, absent, mismatching), in the group's numbering; may be empty.
  std::span<const int> ranks() const noexcept { return details_->failure.ranks; }
  /// True if no rank can access this call's buffers any more. If false, call quiesce() before you reuse the
  /// buffers.
  bool quiesced() const noexcept { return details_->quiesced; }
  /// If the Error is a timeout or peer_lost of a call: the last call of each rank of the group, in order of
  /// the ranks, as far as this rank knows. (The text of a timeout says the same in words.) Empty if the
  /// transport does not know the calls, and for all other errors.
  std::span<const LastCall> last_calls() const noexcept { return details_->last_calls; }

 private:
  struct Details {
    Failure failure;
    bool quiesced;
    std::vector<LastCall> last_calls;
  };
  std::shared_ptr<const Details> details_;
};

/// The system's text for errno. If a limit of this process may be the cause, the text also gives the limit:
/// "Too many open files (ulimit -n is 64)".
std::string system_words(int error_number);
/// Like system_words(), for the text of a library. This text may contain the system's text for errno.
std::string with_limits(std::string words);

/// An Error of code `system` whose text is "<what>: <system_words()>".
[[noreturn]] void throw_errno(const std::string& what, int error_number);

}  // namespace weft
