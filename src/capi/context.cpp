// Contexts and shared memory in C. Any thread.
#include <cstddef>

#include "capi/call_out.hpp"
#include "capi/handles.hpp"

using weft::ContextOptions;
using weft::ErrorCode;
using weft::LogLevel;
using weft::Storage;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kContextOptionsFirstBytes = 24;
static_assert(offsetof(weft_context_options, log_levels) == kContextOptionsFirstBytes);
static_assert(sizeof(weft_context_options) == 64);
static_assert(sizeof(weft_allocator) == 24);  // has no struct_size: it stays as it is

static_assert(static_cast<int>(LogLevel::error) == WEFT_LOG_ERROR);
static_assert(static_cast<int>(LogLevel::warning) == WEFT_LOG_WARNING);
static_assert(static_cast<int>(LogLevel::info) == WEFT_LOG_INFO);
static_assert(static_cast<int>(LogLevel::debug) == WEFT_LOG_DEBUG);

ContextOptions context_options(const char* function, const weft_context_options* options) {
  const weft_context_options o = capi::read(function, options, weft_context_options WEFT_CONTEXT_OPTIONS_INIT,
                                            kContextOptionsFirstBytes, "WEFT_CONTEXT_OPTIONS_INIT");
  if (o.log_level < WEFT_LOG_ERROR || o.log_level > WEFT_LOG_DEBUG)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("options->log_level is {}; expected 0 to {}", o.log_level, WEFT_LOG_DEBUG));
  ContextOptions to;
  to.log_level = static_cast<LogLevel>(o.log_level);
  if (o.log != nullptr)
    to.log_sink = [log = o.log, data = o.log_data](LogLevel level, std::string_view line) {
      const capi::CallOut out;
      if (out) log(data, static_cast<weft_log_level>(level), std::string(line).c_str());
    };
  if (o.log_levels != nullptr) to.log_levels = o.log_levels;
  if (o.segment_bytes != 0) to.segment_bytes = o.segment_bytes;
  to.allocator = {o.allocator.allocate, o.allocator.deallocate, o.allocator.data};
  return to;
}

}  // namespace

weft_status weft_context_create(const weft_context_options* options, weft_context** context,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_context*& to = capi::given(function, context, "context");
    to = new weft_context{std::make_shared<capi::ContextState>(context_options(function, options))};
  });
}

void weft_context_destroy(weft_context* context) { capi::destroy(__func__, context, "context"); }

weft_status weft_alloc(weft_context* context, size_t bytes, void** data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ContextState& state = *capi::given(function, context, "context").state;
    void*& to = capi::given(function, data, "data");
    state.context.check_fork(function);
    // At least one byte, so that each block has an address of its own.
    Storage block = Storage::allocate(state.context, weft::Memory::shared, bytes > 0 ? bytes : 1);
    void* const at = block.data();
    const std::lock_guard lock(state.mutex);
    state.blocks.emplace(at, std::move(block));
    to = at;
  });
}

weft_status weft_free(weft_context* context, void* data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ContextState& state = *capi::given(function, context, "context").state;
    if (data == nullptr) return;
    state.context.check_fork(function);
    Storage block;  // destroyed after the lock is released
    const std::lock_guard lock(state.mutex);
    const auto at = state.blocks.find(data);
    if (at == state.blocks.end())
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("data is {}, which weft_alloc of this context did not allocate, or is freed already",
                      data));
    block = std::move(at->second);
    state.blocks.erase(at);
  });
}
