// The memory of one rank's part in one step, in this rank's random layout, and the memory around it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "program.hpp"
#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft::check {

/// One allocation of shared memory, from which buffers are cut as long as there is room.
class Pool {
 public:
  Pool(Context& context, std::int64_t bytes) : block_(context, Shape{bytes}, DType::u8, Memory::shared) {}
  std::optional<Tensor> cut(std::int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (bytes > block_.count() - used_) return std::nullopt;
    used_ += bytes;
    return block_.slice_flat(used_ - bytes, Shape{bytes});
  }

 private:
  Tensor block_;
  std::int64_t used_ = 0;
};

inline constexpr std::byte kUntouched{0xa5};  ///< the value of bytes that nobody has written

class Buffers {
 public:
  /// `pool`: the source of shared memory, if not null.
  Buffers(Context& context, const Step& s, Pool* pool) : context_(context), s_(s), pool_(pool) {}
  /// Room for `elements` elements, filled with kUntouched. It is shared, ordinary, or memory that is not
  /// weft's. If nothing is computed on it, it may begin at any address. The room around it must not be
  /// touched.
  std::byte* room(Dice& habits, std::int64_t elements);
  /// The bytes that may be written. It begins with none, mark() adds some, and stray() says which other byte
  /// was written (empty: none).
  class Marks {
   public:
    explicit Marks(const Buffers& all);
    void mark(const std::byte* at, std::int64_t bytes);
    std::string stray() const;

   private:
    const Buffers& all_;
    std::vector<std::vector<bool>> seen_;
  };
  /// Writes a pattern over everything, and checks whether it is still there.
  void overwrite();
  std::string overwritten() const;

 private:
  struct Buffer {
    Tensor tensor;
    std::vector<std::byte> foreign;
    std::byte* all = nullptr;
    std::size_t bytes = 0;  // all of it
  };
  Context& context_;
  const Step& s_;
  Pool* const pool_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

}  // namespace weft::check
