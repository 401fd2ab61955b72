// The memory that a process shares with others, for tests in which it writes nonsense there.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/text/plain_streams.hpp"

namespace weft::test {

struct SharedMapping {
  std::byte* data;
  std::size_t bytes;
};

/// This process's mappings of memory of that kind: "region" (of groups and windows), "segment" (of arenas), "process".
inline std::vector<SharedMapping> shared_mappings(const std::string& kind) {
  std::vector<SharedMapping> found;
  FileIn maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (line.find("memfd:weft-" + kind) == std::string::npos ||
        std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) != 2)
      continue;
    // Parts of one mapping that differ in advice are lines of their own.
    if (!found.empty() && reinterpret_cast<std::uintptr_t>(found.back().data + found.back().bytes) == begin)
      found.back().bytes += end - begin;
    else
      found.push_back({reinterpret_cast<std::byte*>(begin), end - begin});
  }
  return found;
}

/// A thread that writes nonsense to words of this process's shared memory, one now and then: `writes` of them, or until it is
/// stopped. It writes to nothing else. It prefers words that are not zero, in lines that are not all alike: these say something.
class Scribbler {
 public:
  Scribbler(std::uint64_t seed, const std::vector<SharedMapping>& mappings, int writes,
            std::chrono::microseconds pause)
      : random_(seed), mappings_(mappings), thread_([this, writes, pause] {
          for (int i = 0; i < writes && !stop_.load(); ++i) {
            if (i == 0 || i == 64 || i % 512 == 511) look();
            scribble();
            if (i % 4 == 3) std::this_thread::sleep_for(pause);
          }
        }) {}
  ~Scribbler() {
    stop_.store(true);
    thread_.join();
  }
  Scribbler(const Scribbler&) = delete;
  Scribbler& operator=(const Scribbler&) = delete;

 private:
  using Words = std::span<std::uint64_t>;
  static Words words(const SharedMapping& m) {
    return {reinterpret_cast<std::uint64_t*>(m.data), m.bytes / sizeof(std::uint64_t)};
  }
  static std::uint64_t read(const std::uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
  std::uint64_t number(std::uint64_t below) { return random_() % below; }

  // Finds the words that say something, and those of them that have changed since the last look.
  void look() {
    constexpr std::size_t kLine = 8;
    live_.clear();
    changed_.clear();
    before_.resize(mappings_.size());
    for (std::size_t m = 0; m < mappings_.size(); ++m) {
      const Words all = words(mappings_[m]);
      std::vector<std::uint64_t>& before = before_[m];
      const bool first = before.empty();
      before.resize(all.size());
      for (std::size_t i = 0; i + kLine <= all.size(); i += kLine) {
        std::array<std::uint64_t, kLine> line;
        for (std::size_t k = 0; k < kLine; ++k) line[k] = read(all[i + k]);
        const bool alike = std::count(line.begin(), line.end(), line[0]) == kLine;
        for (std::size_t k = 0; k < kLine; ++k) {
          if (!alike && line[k] != 0) live_.push_back(&all[i + k]);
          if (!alike && !first && before[i + k] != line[k]) changed_.push_back(&all[i + k]);
          before[i + k] = line[k];
        }
      }
    }
  }
  std::uint64_t* some_word() {
    if (!live_.empty() && number(16) != 0) {
      const std::vector<std::uint64_t*>& from = !changed_.empty() && number(3) != 0 ? changed_ : live_;
      // The words beside one that says something say something, too.
      std::uint64_t* const word = from[number(from.size())];
      const auto line = reinterpret_cast<std::uintptr_t>(word) & ~std::uintptr_t{63};
      return number(3) == 0 ? reinterpret_cast<std::uint64_t*>(line) + number(8) : word;
    }
    const Words all = words(mappings_[number(mappings_.size())]);
    return &all[number(all.size())];
  }
  void scribble() {
    std::uint64_t* const word = some_word();
    const std::uint64_t was = read(*word);
    auto* const half = reinterpret_cast<std::uint32_t*>(word) + number(2);
    switch (number(8)) {
      case 0: __atomic_store_n(word, random_(), __ATOMIC_RELAXED); break;
      case 1: __atomic_store_n(half, static_cast<std::uint32_t>(random_()), __ATOMIC_RELAXED); break;
      case 2: __atomic_store_n(word, was ^ std::uint64_t{1} << number(64), __ATOMIC_RELAXED); break;
      case 3:
        __atomic_store_n(reinterpret_cast<std::uint8_t*>(word) + number(8),
                         static_cast<std::uint8_t>(random_()), __ATOMIC_RELAXED);
        break;
      case 4: __atomic_store_n(half, static_cast<std::uint32_t>(number(300)), __ATOMIC_RELAXED); break;
      case 5: __atomic_store_n(half, ~std::uint32_t{0}, __ATOMIC_RELAXED); break;
      case 6: __atomic_store_n(word, std::uint64_t{0}, __ATOMIC_RELAXED); break;
      default:
        __atomic_store_n(word, live_.empty() ? 0 : read(*live_[number(live_.size())]), __ATOMIC_RELAXED);
    }
  }

  std::mt19937_64 random_;
  const std::vector<SharedMapping> mappings_;
  std::vector<std::uint64_t*> live_, changed_;
  std::vector<std::vector<std::uint64_t>> before_;  // what the last look saw
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace weft::test
