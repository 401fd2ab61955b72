// Errors and names in C. Any thread.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string_view>

#include "capi/handles.hpp"
#include "weft/base/op.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kErrorFirstBytes = 1120;  // the size of weft_error in version 0.1
static_assert(sizeof(weft_error) == kErrorFirstBytes);

// 0 is WEFT_OK.
constexpr weft_status status_of(ErrorCode code) { return static_cast<weft_status>(code); }
static_assert(status_of(ErrorCode::bad_argument) == WEFT_BAD_ARGUMENT);
static_assert(status_of(ErrorCode::layout) == WEFT_LAYOUT);
static_assert(status_of(ErrorCode::unsupported) == WEFT_UNSUPPORTED);
static_assert(status_of(ErrorCode::mismatch) == WEFT_MISMATCH);
static_assert(status_of(ErrorCode::timeout) == WEFT_TIMEOUT);
static_assert(status_of(ErrorCode::peer_lost) == WEFT_PEER_LOST);
static_assert(status_of(ErrorCode::aborted) == WEFT_ABORTED);
static_assert(status_of(ErrorCode::system) == WEFT_SYSTEM);
static_assert(status_of(ErrorCode::corrupt) == WEFT_CORRUPT && kErrorCodeCount == WEFT_CORRUPT);

constexpr weft_op op_of(Op op) { return static_cast<weft_op>(op); }
static_assert(op_of(Op::none) == WEFT_OP_NONE && op_of(Op::all_reduce) == WEFT_OP_ALL_REDUCE);
static_assert(op_of(Op::reduce) == WEFT_OP_REDUCE && op_of(Op::broadcast) == WEFT_OP_BROADCAST);
static_assert(op_of(Op::all_gather) == WEFT_OP_ALL_GATHER && op_of(Op::all_gather_v) == WEFT_OP_ALL_GATHER_V);
static_assert(op_of(Op::reduce_scatter) == WEFT_OP_REDUCE_SCATTER);
static_assert(op_of(Op::reduce_scatter_v) == WEFT_OP_REDUCE_SCATTER_V);
static_assert(op_of(Op::gather) == WEFT_OP_GATHER && op_of(Op::scatter) == WEFT_OP_SCATTER);
static_assert(op_of(Op::all_to_all) == WEFT_OP_ALL_TO_ALL && op_of(Op::all_to_all_v) == WEFT_OP_ALL_TO_ALL_V);
static_assert(op_of(Op::barrier) == WEFT_OP_BARRIER && op_of(Op::send) == WEFT_OP_SEND);
static_assert(op_of(Op::recv) == WEFT_OP_RECV && op_of(Op::scan) == WEFT_OP_SCAN);
static_assert(op_of(Op::exscan) == WEFT_OP_EXSCAN);
static_assert(op_of(Op::wait_message) == WEFT_OP_WAIT_MESSAGE);
static_assert(op_of(Op::exchange) == WEFT_OP_EXCHANGE && kOpCount == WEFT_OP_EXCHANGE + 1);
static_assert(kNoCall == WEFT_NO_CALL);

// Writes as much of `parts` as fits; never cuts a UTF-8 character in two.
void write_text(weft_error& error, std::initializer_list<std::string_view> parts) noexcept {
  constexpr std::string_view kMore = "...";
  constexpr std::size_t kRoom = WEFT_ERROR_TEXT - 1;
  std::size_t used = 0;
  for (const std::string_view part : parts) {
    const std::size_t n = std::min(part.size(), kRoom - used);
    std::memcpy(error.text + used, part.data(), n);
    used += n;
    if (n < part.size()) {
      std::size_t end = kRoom - kMore.size();
      while (end > 0 && (static_cast<unsigned char>(error.text[end]) & 0xc0u) == 0x80u) --end;
      std::memcpy(error.text + end, kMore.data(), kMore.size());
      used = end + kMore.size();
      break;
    }
  }
  error.text[used] = '\0';
}

}  // namespace

bool usable(const char* function, weft_error* error) noexcept {
  if (error == nullptr || (error->struct_size >= kErrorFirstBytes && error->struct_size <= kMostStructBytes))
    return true;
  static std::atomic<bool> told = false;
  if (!told.exchange(true))
    std::fprintf(stderr,
                 "weft error: %s: error->struct_size is %u; expected %zu: initialise it with "
                 "WEFT_ERROR_INIT. Nothing is "
                 "done, here and in later calls with such an error\n",
                 function, static_cast<unsigned>(error->struct_size), sizeof(weft_error));
  error->code = WEFT_BAD_ARGUMENT;  // a field of every version
  return false;
}

weft_status tell(weft_error* error, const Error& e) noexcept {
  const weft_status status = status_of(e.code());
  if (error == nullptr) return status;
  error->code = status;
  error->op = op_of(e.op());
  error->call = e.call();
  error->quiesced = e.quiesced();
  error->rank_count = static_cast<std::int32_t>(e.ranks().size());
  std::fill(std::begin(error->ranks), std::end(error->ranks), -1);
  std::copy_n(e.ranks().begin(), std::min<std::size_t>(e.ranks().size(), WEFT_ERROR_RANKS), error->ranks);
  write_text(*error, {e.what()});
  return status;
}

weft_status tell(weft_error* error, const char* function, const Error& e) noexcept try {
  return tell(error, as_interrupted(function, e));
} catch (...) {  // no memory for that text
  return tell(error, e);
}

weft_status tell(weft_error* error, const char* function, const char* text) noexcept {
  if (error == nullptr) return WEFT_SYSTEM;
  error->code = WEFT_SYSTEM;
  error->op = WEFT_OP_NONE;
  error->call = WEFT_NO_CALL;
  error->quiesced = true;
  error->rank_count = 0;
  std::fill(std::begin(error->ranks), std::end(error->ranks), -1);
  write_text(*error, {function, ": ", text});
  return WEFT_SYSTEM;
}

}  // namespace weft::capi

const char* weft_version(void) { return WEFT_VERSION; }
int32_t weft_version_number(void) { return WEFT_VERSION_NUMBER; }

const char* weft_status_name(weft_status status) {
  if (status == WEFT_OK) return "ok";
  if (status < WEFT_OK || status > weft::kErrorCodeCount) return "?";
  return weft::name(static_cast<weft::ErrorCode>(status)).data();  // literals, so they end in a zero
}

const char* weft_op_name(weft_op op) {
  if (op < WEFT_OP_NONE || op >= weft::kOpCount) return "?";
  return weft::name(static_cast<weft::Op>(op)).data();  // literals
}

const char* weft_text_data(const weft_text* text) {
  return weft::capi::is_alive(text, weft_text::kKind) ? text->text.c_str() : "";
}
size_t weft_text_size(const weft_text* text) {
  return weft::capi::is_alive(text, weft_text::kKind) ? text->text.size() : 0;
}
void weft_text_destroy(weft_text* text) { weft::capi::destroy(__func__, text, "text"); }
