#include "weft/base/env.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <charconv>
#include <cstdlib>

#include "weft/base/error.hpp"

namespace weft::env {
namespace {

constexpr Variable kVariables[] = {
    {"WEFT_LOG", "warning", "the least important line that is still logged: error, warning, info or debug"},
    {"WEFT_RANK", "RANK", "this process's rank in the job; set by weft run"},
    {"WEFT_WORLD_SIZE", "WORLD_SIZE", "ranks in the job; set by weft run"},
    {"WEFT_LOCAL_RANK", "LOCAL_RANK", "this process's rank among those of its host; set by weft run"},
    {"WEFT_STORE", "MASTER_ADDR:MASTER_PORT", "where the job's store listens, as host:port; set by weft run"},
    {"WEFT_JOB", "none", "token that keeps jobs that share a store apart; set by weft run"},
    {"WEFT_TERMINAL", "0",
     "1 where weft run writes to a terminal: progress bars may be drawn; set by weft run"},
    {"RANK", "0", "as WEFT_RANK, set by torchrun"},
    {"WORLD_SIZE", "1", "as WEFT_WORLD_SIZE, set by torchrun"},
    {"LOCAL_RANK", "RANK", "as WEFT_LOCAL_RANK, set by torchrun"},
    {"MASTER_ADDR", "127.0.0.1", "host of the store, set by torchrun"},
    {"MASTER_PORT", "none", "port of the store, which rank 0 serves; set by torchrun"},
    {"WEFT_BACKEND_PATH", "none",
     "folders, separated by ':', searched for libweft_backend_<name>.so before those of the installation"},
    {"WEFT_THREADS", "usable cores / ranks of the host", "threads per rank for kernels"},
    {"WEFT_GOLDEN_DIR", "../shared/golden beside the source tree", "reference data for the golden tests"},
};

bool known(std::string_view name) {
  return std::any_of(std::begin(kVariables), std::end(kVariables),
                     [&](const Variable& v) { return v.name == name; });
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  assert(known(name) && "every variable has a row in the table above");
  (void)known;
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> get_int(std::string_view name, std::int64_t min, std::int64_t max) {
  const auto text = get(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < min || value > max)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is \"{}\"; expected an integer from {} to {}", name, *text, min, max));
  return value;
}

}  // namespace weft::env
