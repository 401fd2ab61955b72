#include "rank/buffers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace weft::check {
namespace {

constexpr std::size_t kGuard = 64;       // bytes before and after
constexpr std::byte kOverwritten{0x5c};  // the value that the program writes after a failure

}  // namespace

std::byte* Buffers::room(Dice& habits, std::int64_t elements) {
  auto buffer = std::make_unique<Buffer>();
  const int size = size_bytes(s_.dtype);
  const int kind = s_.shared ? 0 : s_.plain ? 2 : habits.below(4);
  const bool anywhere = !s_.reduces() && s_.does == Does::call;
  const std::size_t shift = kind == 3 && anywhere ? static_cast<std::size_t>(habits.below(4)) : 0;
  buffer->bytes = static_cast<std::size_t>(elements * size) + 2 * kGuard + shift;
  std::optional<Tensor> part;
  if (kind < 2 && pool_ != nullptr) part = pool_->cut(static_cast<std::int64_t>(buffer->bytes));
  if (part) {
    buffer->tensor = std::move(*part);
    buffer->all = buffer->tensor.data();
  } else if (kind < 3) {
    buffer->tensor = Tensor(context_, Shape{static_cast<std::int64_t>(buffer->bytes)}, DType::u8,
                            kind < 2 ? Memory::shared : Memory::local);
    buffer->all = buffer->tensor.data();
  } else {
    buffer->foreign.resize(buffer->bytes);
    buffer->all = buffer->foreign.data();
  }
  std::memset(buffer->all, static_cast<int>(kUntouched), buffer->bytes);
  buffers_.push_back(std::move(buffer));
  return buffers_.back()->all + kGuard + shift;
}

Buffers::Marks::Marks(const Buffers& all) : all_(all) {
  for (const auto& b : all.buffers_) seen_.emplace_back(b->bytes, false);
}

void Buffers::Marks::mark(const std::byte* at, std::int64_t bytes) {
  for (std::size_t b = 0; b < seen_.size(); ++b) {
    const Buffer& buffer = *all_.buffers_[b];
    const std::ptrdiff_t from = at - buffer.all;
    if (from >= 0 && from < static_cast<std::ptrdiff_t>(buffer.bytes))
      std::fill_n(seen_[b].begin() + from, bytes, true);
  }
}

std::string Buffers::Marks::stray() const {
  for (std::size_t b = 0; b < seen_.size(); ++b) {
    const Buffer& buffer = *all_.buffers_[b];
    for (std::size_t i = 0; i < buffer.bytes; ++i)
      if (!seen_[b][i] && buffer.all[i] != kUntouched)
        return fmt::format("byte {} of a buffer of {} was written, which is in no block", i, buffer.bytes);
  }
  return {};
}

void Buffers::overwrite() {
  for (const auto& b : buffers_) std::memset(b->all, static_cast<int>(kOverwritten), b->bytes);
}

std::string Buffers::overwritten() const {
  for (const auto& b : buffers_)
    for (std::size_t i = 0; i < b->bytes; ++i)
      if (b->all[i] != kOverwritten)
        return fmt::format("byte {} of a buffer of {} was written after quiesce() had returned true", i,
                           b->bytes);
  return {};
}

}  // namespace weft::check
