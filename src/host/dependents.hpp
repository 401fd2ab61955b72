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
  explicit Dependents(Context&) {}  // made as an attachment of the Context

  /// As long as an Entry exists, the list has an object that `what` describes: `group "world"`.
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

  /// The number of memory blocks that storages own. Blocks have no names, so they are only counted.
  std::atomic<std::int64_t> blocks{0};
  /// The number of PinnedPages that pin memory.
  std::atomic<std::int64_t> pins{0};

  /// The objects that still exist, as in `group "world", 2 blocks of memory`. Empty if there are none.
  std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::list<std::string> named_;
};

}  // namespace weft
