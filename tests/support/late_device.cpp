#include "support/late_device.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>

namespace weft::test {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 28;
constexpr int kPoison = 0xFF;  // NaN in every floating-point dtype

std::byte* map(int protection) {
  void* const at = ::mmap(nullptr, kBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(at);
}

std::size_t rounded(std::size_t bytes) { return std::max<std::size_t>((bytes + 63) / 64 * 64, 64); }

void copy_rows(const std::byte* from, std::byte* to, const Rows& rows) {
  if (rows.bytes == 0) return;
  for (std::int64_t i = 0; i < rows.count; ++i, from += rows.from_pitch, to += rows.to_pitch)
    std::memcpy(to, from, rows.bytes);
}

}  // namespace

LateDevice::LateDevice(int index)
    : device_{DeviceKind::cuda, static_cast<std::int16_t>(index)},
      given_out_(map(PROT_NONE)),
      true_(map(PROT_READ | PROT_WRITE)) {
  queues_[nullptr] = std::make_unique<Queue>();
}

LateDevice::~LateDevice() {
  ::munmap(given_out_, kBytes);
  ::munmap(true_, kBytes);
}

const void* LateDevice::translate(const void* address) const {
  if (address == nullptr) return nullptr;
  const auto* const at = static_cast<const std::byte*>(address);
  if (at < given_out_ || at >= given_out_ + kBytes)
    throw std::logic_error("late device: memory of somebody else was given to it");
  return true_ + (at - given_out_);
}

LateDevice::Queue& LateDevice::queue(Stream stream) {
  const auto q = queues_.find(stream.handle);
  if (stream.device != device_ || q == queues_.end())
    throw std::logic_error("late device: a stream that it does not have");
  return *q->second;
}

void* LateDevice::allocate(std::size_t bytes, Stream stream) {
  const Lock lock(mutex_);
  std::vector<void*>& free = queue(stream).free[rounded(bytes)];
  void* block = nullptr;
  if (!free.empty()) {
    block = free.back();
    free.pop_back();
  } else {
    if (rounded(bytes) > kBytes - used_) throw std::bad_alloc();
    block = given_out_ + used_;
    used_ += rounded(bytes);
    std::memset(bytes_of(block), kPoison, rounded(bytes));  // for who reads before anything has run
  }
  ++blocks_;
  sizes_[static_cast<std::byte*>(block)] = bytes;
  fill(block, kPoison, {rounded(bytes)}, stream);
  return block;
}

void LateDevice::release(void* memory, std::size_t bytes, Stream stream) noexcept {
  const Lock lock(mutex_);
  --blocks_;
  sizes_.erase(static_cast<std::byte*>(memory));
  if (queues_.count(stream.handle) == 0) return;  // its stream has gone before it
  fill(memory, kPoison, {rounded(bytes)}, stream);
  queue(stream).free[rounded(bytes)].push_back(memory);
}

void LateDevice::copy(const void* from, Device from_device, void* to, Device to_device, const Rows& rows,
                      Stream stream) {
  {
    const Lock lock(mutex_);
    if (copies_to_failure_ && (*copies_to_failure_)-- == 0) {
      copies_to_failure_.reset();
      throw std::runtime_error("late device: the copy fails");
    }
  }
  const auto* const source = static_cast<const std::byte*>(from);
  auto* const target = static_cast<std::byte*>(to);
  if (from_device == Device{}) {
    auto staged = std::make_shared<std::vector<std::byte>>(rows.bytes * static_cast<std::size_t>(rows.count));
    copy_rows(source, staged->data(), {rows.bytes, rows.count, rows.from_pitch, rows.bytes});
    push(stream, [this, staged, target, rows] {
      copy_rows(staged->data(), bytes_of(target), {rows.bytes, rows.count, rows.bytes, rows.to_pitch});
    });
    return;
  }
  const bool to_host = to_device == Device{};
  push(stream, [this, source, target, rows, to_host] {
    copy_rows(bytes_of(source), to_host ? target : bytes_of(target), rows);
  });
}

void LateDevice::fill(void* to, unsigned char value, const Rows& rows, Stream stream) {
  push(stream, [this, to, value, rows] {
    std::byte* target = bytes_of(static_cast<std::byte*>(to));
    for (std::int64_t i = 0; i < rows.count; ++i, target += rows.to_pitch)
      std::memset(target, value, rows.bytes);
  });
}

void LateDevice::fail_copy(std::size_t count) {
  const Lock lock(mutex_);
  copies_to_failure_ = count;
}

Stream LateDevice::make_stream() {
  const Lock lock(mutex_);
  auto made = std::make_unique<Queue>();
  void* const handle = made.get();
  queues_[handle] = std::move(made);
  return {device_, handle};
}

void LateDevice::destroy_stream(Stream stream) noexcept {
  const Lock lock(mutex_);
  queues_.erase(stream.handle);
}

void LateDevice::depend(Stream later, Stream earlier) {
  const Lock lock(mutex_);
  Queue& first = queue(earlier);
  push(later, [this, earlier, until = first.done + first.tasks.size()] {
    if (queues_.count(earlier.handle) != 0) run_until(queue(earlier), until);
  });
}

void LateDevice::catch_up(Stream stream) noexcept {
  const Lock lock(mutex_);
  Queue& q = queue(stream);
  run_until(q, q.done + q.tasks.size());
}

void LateDevice::wait(Stream stream) {
  const Lock lock(mutex_);
  catch_up(stream);
  if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
}

void LateDevice::expect_inside(std::string_view kernel, const void* address, std::size_t bytes) const {
  if (bytes == 0) return;
  const Lock lock(mutex_);
  const auto* const at = static_cast<const std::byte*>(address);
  const auto after = sizes_.upper_bound(at);
  if (after == sizes_.begin() || at + bytes > std::prev(after)->first + std::prev(after)->second)
    throw std::logic_error("late device: an operand of " + std::string(kernel) +
                           " reaches beyond its memory");
}

void LateDevice::push(Stream stream, std::function<void()> task) {
  const Lock lock(mutex_);
  queue(stream).tasks.push_back(std::move(task));
}

void LateDevice::run_until(Queue& q, std::size_t done) {
  while (q.done < done) {
    const std::function<void()> task = std::move(q.tasks.front());
    q.tasks.pop_front();
    ++q.done;
    try {
      task();
    } catch (...) {
      if (!failed_) failed_ = std::current_exception();
    }
  }
}

std::size_t LateDevice::waiting() const {
  const Lock lock(mutex_);
  std::size_t n = 0;
  for (const auto& [handle, q] : queues_) n += q->tasks.size();
  return n;
}

std::size_t LateDevice::blocks() const {
  const Lock lock(mutex_);
  return blocks_;
}

}  // namespace weft::test
