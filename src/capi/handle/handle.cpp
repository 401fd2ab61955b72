// The table of the handles that are alive.
//
// The table is a list of arrays of addresses, each eight times as long as the previous one. A handle's
// address is in one of the kProbes places behind its hash, in the first array that had room there. It stays
// there until the handle is destroyed. So a look-up takes no lock, and a look-up of a live handle mostly
// reads one place of the first array. Arrays are never freed. There is more than one only if thousands of
// handles were alive at once.
#include "capi/handle/handle.hpp"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "weft/base/error.hpp"

namespace weft::capi {
namespace {

using Place = std::atomic<const void*>;  // null: free

constexpr int kFirstBits = 12, kGrowthBits = 3, kArrays = 6;  // the last one has 2^27 places
constexpr std::size_t kProbes = 16;

constinit std::array<Place, std::size_t{1} << kFirstBits> first_array{};
constinit std::array<std::atomic<Place*>, kArrays> arrays{first_array.data()};

constexpr int bits_of(int array) { return kFirstBits + kGrowthBits * array; }

// Calls f(place) for the places where that address may be in this array, until it says true.
template <class F>
bool any_place(Place* places, int bits, const void* address, const F& f) noexcept {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio (Knuth, volume 3, 6.4)
  constexpr int kAlignmentBits = 4;                      // of what new gives
  const std::uint64_t number = reinterpret_cast<std::uintptr_t>(address) >> kAlignmentBits;
  const std::size_t at = (number * kGolden) >> (64 - bits), mask = (std::size_t{1} << bits) - 1;
  for (std::size_t k = 0; k < kProbes; ++k)
    if (f(places[(at + k) & mask])) return true;
  return false;
}

// Null: nothing was in it yet.
Place* array(int index) noexcept {
  return arrays[static_cast<std::size_t>(index)].load(std::memory_order_acquire);
}
Place* made_array(int index) {
  if (Place* const known = array(index)) return known;
  Place* const made = new Place[std::size_t{1} << bits_of(index)]();
  Place* other = nullptr;
  if (arrays[static_cast<std::size_t>(index)].compare_exchange_strong(other, made, std::memory_order_acq_rel))
    return made;
  delete[] made;
  return other;
}

void enter(const void* address) {
  for (int i = 0; i < kArrays; ++i) {
    const bool entered = any_place(made_array(i), bits_of(i), address, [&](Place& place) {
      const void* free = nullptr;
      return place.load(std::memory_order_relaxed) == nullptr &&
             place.compare_exchange_strong(free, address, std::memory_order_release,
                                           std::memory_order_relaxed);
    });
    if (entered) return;
  }
  throw std::bad_alloc();  // a hundred million handles
}

// f(place) of the place where the address is. False if it is nowhere.
template <class F>
bool with_place(const void* address, const F& f) noexcept {
  for (int i = 0; i < kArrays; ++i) {
    Place* const places = array(i);
    if (places == nullptr) return false;
    bool done = false;
    if (any_place(places, bits_of(i), address, [&](Place& place) {
          if (place.load(std::memory_order_acquire) != address) return false;
          done = f(place);
          return true;
        }))
      return done;
  }
  return false;
}

// True: it was there, and this call took it out.
bool leave(const void* address) noexcept {
  return with_place(address, [&](Place& place) {
    const void* expected = address;
    return place.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel,
                                         std::memory_order_relaxed);
  });
}

// libweft and libweft_train have texts of their own for one kind.
bool same_kind(const char* a, const char* b) noexcept { return a == b || std::strcmp(a, b) == 0; }

std::string words_of_dead(const char* what, const char* kind) {
  return fmt::format("{} is no live {}: it is destroyed, or another libweft made it", what, kind);
}
std::string words_of_other_kind(const char* what, const char* got, const char* kind) {
  return fmt::format("{} is a {}; expected a {}", what, got, kind);
}

}  // namespace

HandleBase::HandleBase(const char* kind) : kind_(kind) { enter(this); }
HandleBase::~HandleBase() {
  if (kind_ != nullptr) leave(this);
}

bool is_alive(const void* handle) noexcept {
  return handle != nullptr && with_place(handle, [](Place&) { return true; });
}

bool is_alive(const HandleBase* handle, const char* kind) noexcept {
  return is_alive(handle) && same_kind(handle->kind(), kind);
}

void expect_alive(const char* function, const HandleBase* handle, const char* what, const char* kind) {
  const bool alive = is_alive(handle);
  if (alive && same_kind(handle->kind(), kind)) [[likely]]
    return;
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", function,
                                                   alive ? words_of_other_kind(what, handle->kind(), kind)
                                                         : words_of_dead(what, kind)));
}

bool retire(const char* function, HandleBase* handle, const char* what, const char* kind) noexcept {
  // The thread that has taken it out of the table may read it, also if two threads destroy one handle.
  const bool alive = leave(handle);
  const bool fits = alive && same_kind(handle->kind(), kind);
  if (fits && !handle->lent_) [[likely]] {
    handle->kind_ = nullptr;
    return true;
  }
  try {
    const std::string words = fits    ? fmt::format("{} is borrowed: its owner destroys it", what)
                              : alive ? words_of_other_kind(what, handle->kind(), kind)
                                      : words_of_dead(what, kind);
    if (alive) enter(handle);
    const std::string line = fmt::format("weft error: {}: {}; nothing is destroyed\n", function, words);
    std::fwrite(line.data(), 1, line.size(), stderr);
  } catch (...) {}  // no memory for the line
  return false;
}

}  // namespace weft::capi
