// Fields of an exchange whose memory was checked and is right. No state. Any thread may use it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/backends/exchange.hpp"
#include "weft/mesh/window.hpp"

namespace weft::windows {

/// The use that an exchange makes of its fields.
enum class Way : std::uint8_t {
  fetch,    ///< `in` is a part, `out` a window
  adjoint,  ///< `in` is a window, `out` a part, which becomes the sum
  add,      ///< the same, but the part lies at its place in the window, and the sum is added to it
};

/// Where a field lies here.
struct Pair {
  std::byte* part;
  std::byte* window;
};

/// All facts that were checked about some fields, in few cache lines. The views of eight fields take 40
/// lines, and an exchange of many bytes takes those out of the first cache each time.
class Judged {
 public:
  Judged() = default;
  /// `id`: a number that no other record of the plan has.
  Judged(std::uint64_t id, std::span<const WindowField> fields, Device device, std::vector<Pair> pairs,
         Way way);

  /// Whether these fields are the same, in the same memory.
  bool is_of(std::span<const WindowField> fields, Device device) const noexcept {
    if (pairs_.size() != fields.size() || !(device == device_) || words_.empty()) return false;
    const std::uint64_t* word = words_.data();
    for (const WindowField& f : fields) {
      if (word[0] != address(f.in.data) || word[1] != address(f.out.data) || word[2] != kind(f.in) ||
          word[3] != kind(f.out))
        return false;
      word += 4;
      const int rank = f.in.shape.rank();
      for (int d = 0; d < rank; ++d, word += 4)
        if (word[0] != bits(f.in.shape[d]) || word[1] != bits(f.in.strides[d]) ||
            word[2] != bits(f.out.shape[d]) || word[3] != bits(f.out.strides[d]))
          return false;
    }
    return true;
  }
  std::span<const Pair> pairs() const noexcept { return pairs_; }
  /// The same, as the group's exchange takes them.
  std::span<const ExchangeField> memory() const noexcept { return memory_; }
  std::uint64_t id() const noexcept { return id_; }

 private:
  static std::uint64_t address(const std::byte* data) noexcept {
    return reinterpret_cast<std::uintptr_t>(data);
  }
  static std::uint64_t bits(std::int64_t n) noexcept { return static_cast<std::uint64_t>(n); }
  // Its dtype, device and ranks.
  template <class View>
  static std::uint64_t kind(const View& v) noexcept {
    return static_cast<std::uint64_t>(v.dtype) | static_cast<std::uint64_t>(v.device.kind) << 8 |
           static_cast<std::uint64_t>(static_cast<std::uint16_t>(v.device.index)) << 16 |
           static_cast<std::uint64_t>(v.shape.rank()) << 32 |
           static_cast<std::uint64_t>(v.strides.rank()) << 40;
  }

  std::uint64_t id_ = 0;
  std::vector<Pair> pairs_{};
  std::vector<ExchangeField> memory_{};
  Device device_{};
  std::vector<std::uint64_t> words_{};  // the words above for each field; empty: none are known
};

}  // namespace weft::windows
