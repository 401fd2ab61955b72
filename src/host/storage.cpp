#include "weft/base/storage.hpp"

#include <fmt/format.h>

#include <cerrno>

#include "host/arena.hpp"
#include "host/local_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"

namespace weft {

Storage Storage::allocate(Context& context, Memory memory, std::size_t bytes) {
  context.check_fork("storage");
  Storage s;
  s.bytes_ = bytes;
  // A block that a forked child inherited is the parent's: the child's copy of the owner frees nothing.
  if (memory == Memory::shared) {
    if (void* block = context.arena().allocate(bytes)) {
      s.memory_ = Memory::shared;
      s.data_ = std::shared_ptr<void>(block, [&context](void* b) {
        if (!context.forked()) context.arena().release(b);
      });
      return s;
    }
  }
  void* block = context.local_memory().allocate(bytes);
  if (block == nullptr)
    throw_errno(fmt::format("storage: {} bytes of local memory cannot be had", bytes), ENOMEM);
  s.memory_ = Memory::local;
  s.data_ = std::shared_ptr<void>(block, [&context, bytes](void* b) {
    if (!context.forked()) context.local_memory().release(b, bytes);
  });
  return s;
}

Storage Storage::borrow(void* data, std::size_t bytes) { return adopt(data, bytes, std::shared_ptr<void>()); }

Storage Storage::adopt(void* data, std::size_t bytes, std::shared_ptr<void> owner) {
  Storage s;
  s.data_ = std::shared_ptr<void>(std::move(owner), data);
  s.bytes_ = bytes;
  return s;
}

}  // namespace weft
