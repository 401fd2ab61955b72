#include "host/warnings.hpp"

#include <fmt/format.h>

namespace weft {

Warnings::~Warnings() { sum_up(); }

void Warnings::write(const std::string& line) {
  look(Clock::now());
  if (written_ < kAtOnce) {
    ++written_;
    log_.write(layer_, LogLevel::warning, line);
  } else {
    ++left_out_;
  }
}

void Warnings::look(Clock::time_point now) {
  if (now - since_ < kWindow) return;
  sum_up();
  since_ = now;
  written_ = 0;
}

void Warnings::sum_up() noexcept {
  try {
    if (left_out_ > 0)
      log_.write(layer_, LogLevel::warning,
                 fmt::format("{}: and {} more warnings within {:.1f} s", who_, left_out_,
                             std::chrono::duration_cast<std::chrono::duration<double>>(kWindow).count()));
  } catch (const std::bad_alloc&) {}
  left_out_ = 0;
}

}  // namespace weft
