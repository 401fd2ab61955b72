// The memory that a process shares with others, for tests in which it writes nonsense there.
#pragma once

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
            if (i % 16 == 0) look();
            scribble();
            std::this_thread::sleep_for(pause);
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

  // Finds the words that say something.
  void look() {
    constexpr std::size_t kLine = 8;
    live_.clear();
    for (const SharedMapping& m : mappings_) {
      const Words all = words(m);
      for (std::size_t i = 0; i + kLine <= all.size(); i += kLine) {
        bool alike = true;
        for (std::size_t k = 1; k < kLine; ++k) alike &= read(all[i + k]) == read(all[i]);
        for (std::size_t k = 0; k < kLine && !alike; ++k)
          if (read(all[i + k]) != 0) live_.push_back(&all[i + k]);
      }
    }
  }
  std::uint64_t* some_word() {
    if (!live_.empty() && number(8) != 0) {
      // The words beside one that says something say something, too.
      std::uint64_t* const word = live_[number(live_.size())];
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
  std::vector<std::uint64_t*> live_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace weft::test
