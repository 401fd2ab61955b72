#include "weft/nn/key_value_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse_cache(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "key/value cache: " + text);
}

// Writes x: (samples, positions, features) to `known`: (samples, most, features), from position `first` on.
void put(Compute& compute, const Tensor& x, const Tensor& known, std::int64_t first) {
  const std::int64_t features = x.size(2), count = x.size(1) * features;
  for (std::int64_t sample = 0; sample < x.size(0); ++sample) {
    float* const to = known.data_ptr<float>() + (sample * known.size(1) + first) * features;
    if (x.dtype() == DType::bf16)
      kernels::widen_bf16(kernels_of(compute), x.data_ptr<bf16>() + sample * count, to, count);
    else
      std::copy_n(x.data_ptr<float>() + sample * count, count, to);
  }
}

}  // namespace

void KeyValues::append(Compute& compute, const Tensor& k, const Tensor& v) {
  if (compute.device() != Device{})
    throw Error(ErrorCode::unsupported, fmt::format("key/value cache: the model is on {}; expected the host",
                                                    to_string(compute.device())));
  if (size + k.size(1) > most)
    refuse_cache(fmt::format("{} positions are known, and {} more come; expected at most {} in all", size,
                             k.size(1), most));
  if (!keys || (size == 0 && keys.size(0) != k.size(0))) {
    keys = compute.make({k.size(0), most, k.size(2)});
    values = compute.make({v.size(0), most, v.size(2)});
  }
  if (keys.size(0) != k.size(0))
    refuse_cache(fmt::format("{} samples; expected {}, as in the passes before", k.size(0), keys.size(0)));
  put(compute, k, keys, size);
  put(compute, v, values, size);
  size += k.size(1);
}

KeyValueCache::KeyValueCache(Module& model, std::int64_t positions) : most_(positions) {
  if (positions < 1) refuse_cache(fmt::format("{} positions; expected 1 or more", positions));
  model.visit([&](Module& m) {
    if (dynamic_cast<CrossAttention*>(&m) != nullptr || dynamic_cast<WindowAttention*>(&m) != nullptr ||
        dynamic_cast<Conv2d*>(&m) != nullptr)
      refuse_cache(fmt::format("\"{}\" reads other positions than those of an Attention", m.path()));
    auto* const attention = dynamic_cast<Attention*>(&m);
    if (attention == nullptr) return;
    if (attention->known() != nullptr) refuse_cache(fmt::format("\"{}\" has one already", m.path()));
    if (attention->rope() != nullptr && attention->rope()->positions < positions)
      refuse_cache(fmt::format("{} positions; the rotary tables of \"{}\" are for {}", positions, m.path(),
                               attention->rope()->positions));
    layers_.push_back({attention, std::make_unique<KeyValues>()});
    layers_.back().known->most = positions;
  });
  if (layers_.empty()) refuse_cache("the model has no Attention");
  for (const Layer& layer : layers_) layer.attention->remember(layer.known.get());
}

KeyValueCache::~KeyValueCache() {
  for (const Layer& layer : layers_) layer.attention->remember(nullptr);
}

std::int64_t KeyValueCache::size() const {
  const std::int64_t first = layers_.front().known->size;
  for (const Layer& layer : layers_)
    if (layer.known->size != first)
      throw Error(
          ErrorCode::mismatch,
          fmt::format("key/value cache: \"{}\" knows {} positions, and \"{}\" {}; after a pass that "
                      "throws, call clear()",
                      layers_.front().attention->path(), first, layer.attention->path(), layer.known->size));
  return first;
}

void KeyValueCache::clear() noexcept {
  for (const Layer& layer : layers_) layer.known->size = 0;
}

std::int64_t KeyValueCache::bytes() const {
  std::int64_t sum = 0;
  for (const Layer& layer : layers_)
    if (layer.known->keys)
      sum += (layer.known->keys.count() + layer.known->values.count()) *
             static_cast<std::int64_t>(sizeof(float));
  return sum;
}

}  // namespace weft
