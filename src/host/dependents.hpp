// Objects that were made with a Context and refer to it: they must be destroyed before the Context. A program
// that gets the order wrong, most often by the order of a class's members, gets a message instead of a later
// crash. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>

namespace weft {

class Context;

class Dependents {
 public:
  Dependents() = default;
  explicit Dependents(Context&) {}  // as an attachment: each Context brings one itself

  /// An object in the list, named by `what`, as in `group "world"`, as long as the entry exists.
  class Entry {
   public:
    Entry(Context& context, std::string what);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    const Context& context_;
    Dependents& all_;
    std::list<std::string>::iterator at_;
  };

  /// The number of memory blocks that storages own; blocks have no names, so they are only counted.
  std::atomic<std::int64_t> blocks{0};
  /// PinnedPages that pin something.
  std::atomic<std::int64_t> pins{0};

  /// The objects that still exist, as in `group "world", 2 blocks of memory`; empty if there are none.
  std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::list<std::string> named_;
};

}  // namespace weft
