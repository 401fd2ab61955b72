// The memory that a process shares with others, for tests in which it writes nonsense there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text/plain_streams.hpp"

namespace weft::test {

struct SharedMapping {
  std::byte* data;
  std::size_t bytes;
};

/// This process's mappings of one kind of memory: "region" (of groups and windows), "segment" (of arenas),
/// "process".
inline std::vector<SharedMapping> shared_mappings(const std::string& kind) {
  std::vector<SharedMapping> found;
  FileIn maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (line.find("memfd:weft-" + kind) == std::string::npos ||
        std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) != 2)
      continue;
    // Parts of one mapping that differ in advice have separate lines in the file.
    if (!found.empty() && reinterpret_cast<std::uintptr_t>(found.back().data + found.back().bytes) == begin)
      found.back().bytes += end - begin;
    else
      found.push_back({reinterpret_cast<std::byte*>(begin), end - begin});
  }
  return found;
}

/// Writes nonsense to words of this process's shared memory, and to nothing else: to words that have changed
/// since look(), or to words next to them.
class Scribbler {
 public:
  Scribbler(std::uint64_t seed, std::vector<SharedMapping> mappings)
      : random_(seed), mappings_(std::move(mappings)), before_(mappings_.size()) {}

  /// A call of scribble() may hit the memory that changes from now on.
  void look() {
    for (std::size_t m = 0; m < mappings_.size(); ++m) {
      const std::span<std::uint64_t> all = words(mappings_[m]);
      before_[m].resize(all.size());
      for (std::size_t i = 0; i < all.size(); ++i) before_[m][i] = read(all[i]);
    }
  }
  /// The number of words that have changed.
  std::size_t find() {
    changed_.clear();
    for (std::size_t m = 0; m < mappings_.size(); ++m) {
      const std::span<std::uint64_t> all = words(mappings_[m]);
      for (std::size_t i = 0; i < all.size() && i < before_[m].size(); ++i)
        if (read(all[i]) != before_[m][i]) changed_.push_back(&all[i]);
    }
    return changed_.size();
  }
  /// One word that find() has found, or one of its cache line; from time to time any word.
  void scribble() {
    std::uint64_t* const word = some_word();
    const std::uint64_t was = read(*word);
    auto* const half = reinterpret_cast<std::uint32_t*>(word) + number(2);
    auto* const byte = reinterpret_cast<std::uint8_t*>(word) + number(8);
    switch (number(9)) {
      case 0: return write(word, random_());
      case 1: return write(half, static_cast<std::uint32_t>(random_()));
      case 2: return write(word, was ^ std::uint64_t{1} << number(64));
      case 3: return write(byte, static_cast<std::uint8_t>(random_()));
      case 4: return write(half, static_cast<std::uint32_t>(number(300)));
      case 5: return write(half, ~std::uint32_t{0});
      case 6: return write(word, std::uint64_t{1} << number(64));
      case 7: return write(word, std::uint64_t{0});
      default: return write(word, read(*some_word()));
    }
  }

 private:
  static std::span<std::uint64_t> words(const SharedMapping& m) {
    return {reinterpret_cast<std::uint64_t*>(m.data), m.bytes / sizeof(std::uint64_t)};
  }
  // An arena poisons memory that it has not allocated. A fault of another rank reaches that memory, too.
  [[gnu::no_sanitize_address]] static std::uint64_t read(const std::uint64_t& word) {
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
  }
  template <class T>
  [[gnu::no_sanitize_address]] static void write(T* word, T value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  std::uint64_t number(std::uint64_t below) { return random_() % below; }
  std::uint64_t* some_word() {
    if (changed_.empty() || number(32) == 0) {
      const std::span<std::uint64_t> all = words(mappings_[number(mappings_.size())]);
      return &all[number(all.size())];
    }
    std::uint64_t* word = changed_[number(changed_.size())];
    const auto line = reinterpret_cast<std::uintptr_t>(word) & ~std::uintptr_t{63};
    if (number(3) == 0) word = reinterpret_cast<std::uint64_t*>(line) + number(8);
    // Ranks mostly wait for the first word of a line. If that word is damaged, the result is a time-out and
    // no more.
    if (reinterpret_cast<std::uintptr_t>(word) == line && number(4) != 0) word += 1 + number(7);
    return word;
  }

  std::mt19937_64 random_;
  const std::vector<SharedMapping> mappings_;
  std::vector<std::vector<std::uint64_t>> before_;  // what look() saw
  std::vector<std::uint64_t*> changed_;
};

}  // namespace weft::test
