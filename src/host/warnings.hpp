// Warnings that unauthenticated clients can cause as often as they like. In ten seconds it writes the first
// twenty and counts the others. Not thread-safe. The thread that serves the clients uses it.
#pragma once

#include <cstddef>
#include <string>

#include "weft/base/clock.hpp"
#include "weft/base/log.hpp"

namespace weft {

class Warnings {
 public:
  static constexpr int kAtOnce = 20;
  static constexpr Duration kWindow = std::chrono::seconds(10);

  /// `who` begins the line that says how many warnings were omitted. `log` must outlive this object.
  Warnings(Logger& log, LogLayer layer, std::string who) : log_(log), layer_(layer), who_(std::move(who)) {}
  ~Warnings();
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;

  void write(const std::string& line);
  /// The caller must call it at next() at the latest. Writes how many warnings were omitted.
  void look(Clock::time_point now);
  Clock::time_point next() const { return left_out_ == 0 ? Clock::time_point::max() : since_ + kWindow; }

 private:
  void sum_up() noexcept;

  Logger& log_;
  const LogLayer layer_;
  const std::string who_;
  Clock::time_point since_{};
  int written_ = 0;
  std::size_t left_out_ = 0;
};

}  // namespace weft
