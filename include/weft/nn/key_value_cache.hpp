// Keys and values of the positions that a model has seen. A forward pass over the next tokens then does not
// compute them again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"

namespace weft {

class Attention;
class Module;

/// The keys and values of one Attention: f32 (samples, most positions, features of this rank's key/value
/// heads), of which the first `size` positions are known.
struct KeyValues {
  Tensor keys, values;
  std::int64_t most = 0, size = 0;
  /// Appends keys and values of the next positions: (samples, positions, features), f32 or bf16. The first
  /// call allocates the memory. Throws bad_argument if there is no room, or if the number of samples changes.
  void append(Compute& compute, const Tensor& k, const Tensor& v);
};

/// Makes every Attention of a model keep its keys and values for as long as the cache exists. A forward pass
/// on an inference Frame then takes the tokens that follow those of the earlier passes, and each token sees
/// all of them. On a CPU with AVX2 the outputs have the bits of one pass over all tokens.
///
/// One thread at a time uses it: the thread that runs the model. The model must exist longer than the cache,
/// and must not train meanwhile: a pass on a Frame that keeps tensors throws. If a pass throws, call clear().
class KeyValueCache {
 public:
  /// `positions`: the most tokens of a sample. Throws bad_argument if it is below 1 or above the number of
  /// positions that the rotary tables have, if the model has no Attention, has another layer whose outputs
  /// depend on other positions (CrossAttention, WindowAttention, convolutions), or has a cache already.
  KeyValueCache(Module& model, std::int64_t positions);
  ~KeyValueCache();
  KeyValueCache(const KeyValueCache&) = delete;
  KeyValueCache& operator=(const KeyValueCache&) = delete;

  /// The number of known positions. Throws mismatch if a failed pass left the layers unequal.
  std::int64_t size() const;
  std::int64_t most() const noexcept { return most_; }
  /// Forgets all positions. The memory stays.
  void clear() noexcept;
  /// Bytes of this rank's keys and values.
  std::int64_t bytes() const;

 private:
  struct Layer {
    Attention* attention;
    std::unique_ptr<KeyValues> known;
  };
  std::vector<Layer> layers_;
  std::int64_t most_;
};

}  // namespace weft
