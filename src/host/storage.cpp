#include "weft/base/storage.hpp"

#include <fmt/format.h>

#include "host/arena.hpp"
#include "host/dependents.hpp"
#include "host/local_memory.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

// The counter of the blocks that Storages own.
std::atomic<std::int64_t>& counted_block(Context& context) {
  std::atomic<std::int64_t>& blocks = context.attached<Dependents>().blocks;
  blocks.fetch_add(1, std::memory_order_relaxed);
  return blocks;
}

}  // namespace

Storage Storage::allocate(Context& context, Memory memory, std::size_t bytes, Stream where) {
  context.check_fork("storage");
  if (where.device != Device{}) return on_device(context, memory, bytes, where);
  Storage s;
  s.bytes_ = bytes;
  // A block that a forked child inherited belongs to the parent: the child's copy of the owner frees nothing.
  if (memory == Memory::shared) {
    if (void* block = arena_of(context).allocate(bytes)) {
      s.memory_ = Memory::shared;
      s.data_ = std::shared_ptr<void>(block, [&context, &blocks = counted_block(context)](void* b) {
        if (context.forked()) return;
        arena_of(context).release(b);
        blocks.fetch_sub(1, std::memory_order_relaxed);
      });
      return s;
    }
  }
  void* block = local_memory_of(context).allocate("storage", bytes);
  s.memory_ = Memory::local;
  s.data_ = std::shared_ptr<void>(block, [&context, &blocks = counted_block(context), bytes](void* b) {
    if (context.forked()) return;
    local_memory_of(context).release(b, bytes);
    blocks.fetch_sub(1, std::memory_order_relaxed);
  });
  return s;
}

Storage Storage::on_device(Context& context, Memory memory, std::size_t bytes, Stream where) {
  DeviceRuntime& runtime = context.device(where.device);
  Storage s;
  s.bytes_ = bytes;
  s.memory_ = memory;
  s.stream_ = where;
  void* const block = runtime.allocate(bytes, where);  // counted afterwards, because this may throw
  s.data_ = std::shared_ptr<void>(
      block, [&context, &runtime, &blocks = counted_block(context), bytes, where](void* b) {
        if (context.forked()) return;
        runtime.release(b, bytes, where);
        blocks.fetch_sub(1, std::memory_order_relaxed);
      });
  return s;
}

Storage Storage::ordered_on(Context& context, Stream where) const {
  if (where.device != device())
    throw Error(ErrorCode::bad_argument, fmt::format("storage: ordered_on got a stream of {}; expected {}",
                                                     to_string(where.device), to_string(device())));
  if (where == stream_) return *this;
  DeviceRuntime& runtime = context.device(device());
  runtime.depend(where, stream_);
  Storage s = *this;
  s.stream_ = where;
  s.data_ = std::shared_ptr<void>(data_.get(), [&context, &runtime, where, owner = *this](void*) {
    if (context.forked()) return;
    try {
      runtime.depend(owner.stream_, where);
    } catch (const std::exception& e) {  // the device is lost, so there is nothing to wait for
      context.log().write(LogLayer::host, LogLevel::warning, fmt::format("storage: {}", e.what()));
    }
  });
  return s;
}

Storage Storage::borrow(void* data, std::size_t bytes, Stream where) {
  return adopt(data, bytes, std::shared_ptr<void>(), where);
}

Storage Storage::adopt(void* data, std::size_t bytes, std::shared_ptr<void> owner, Stream where) {
  Storage s;
  s.data_ = std::shared_ptr<void>(std::move(owner), data);
  s.bytes_ = bytes;
  s.stream_ = where;
  return s;
}

}  // namespace weft
