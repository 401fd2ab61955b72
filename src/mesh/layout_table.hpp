// The layouts of one mesh to which references exist, each once. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include "base/hash.hpp"
#include "weft/mesh/layout.hpp"

namespace weft {

/// Adds all facts of a layout.
void add_to(Fnv1a& hash, const LayoutSpec& spec);

/// A hash table of lists. find() takes no lock. Adding and removing do. An entry that was removed is freed
/// when no find() is running, so that a find() that began earlier never reads freed memory.
class LayoutTable {
 public:
  LayoutTable() = default;
  ~LayoutTable();
  LayoutTable(const LayoutTable&) = delete;
  LayoutTable& operator=(const LayoutTable&) = delete;

  /// Returns the layout equal to `spec`, which must be normalised and checked. Makes it if no LayoutRef holds
  /// it.
  LayoutRef intern(const std::shared_ptr<MeshState>& mesh, LayoutSpec spec);
  /// The number of layouts, for tests.
  std::size_t size() const;

 private:
  struct Entry {
    std::size_t hash;
    std::weak_ptr<const Layout> layout;
    std::atomic<Entry*> next{nullptr};
    Entry* next_removed = nullptr;
  };
  LayoutRef find(std::size_t hash, const LayoutSpec& spec) const;
  std::atomic<Entry*>& list_of(std::size_t hash) noexcept { return lists_[hash % lists_.size()]; }
  void remove(Entry* entry) noexcept;  // the last user of its layout is gone
  static void free_all(Entry* removed) noexcept;

  std::array<std::atomic<Entry*>, 256> lists_{};
  mutable std::atomic<int> finding_{0};  // calls of find() that run
  mutable std::mutex changing_;
  Entry* removed_ = nullptr;  // not freed yet
};

}  // namespace weft
