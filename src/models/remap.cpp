#include "weft/models/remap.hpp"

#include <fmt/format.h>

#include <array>
#include <string_view>
#include <utility>

#include "weft/base/error.hpp"

namespace weft {
namespace {

// Whether `name` ends in `suffix` from a dot on, or is all of it; `before`: what comes before it.
bool ends_in(std::string_view name, std::string_view suffix, std::string& before) {
  if (!name.ends_with(suffix)) return false;
  const std::size_t at = name.size() - suffix.size();
  if (at > 0 && name[at - 1] != '.') return false;
  before = name.substr(0, at);
  return true;
}

void put(const char* function, NamedTensors& to, const std::string& name, const Tensor& tensor,
         const std::string& from) {
  if (!to.emplace(name, tensor).second)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: \"{}\" becomes \"{}\", which is there already", function, from, name));
}

[[noreturn]] void refuse_shape(const std::string& name, const Tensor& t, const char* expected) {
  throw Error(ErrorCode::bad_argument, fmt::format("remap_conv_weights: \"{}\" is {}; expected {}", name,
                                                   to_string(t.shape()), expected));
}

bool is_1x1(const Tensor& t) { return t.shape().rank() == 4 && t.size(2) == 1 && t.size(3) == 1; }

constexpr std::array<const char*, 3> kProjections{"to_q.", "to_k.", "to_v."};

// Splits a fused entry, `kind` (weight, weight_orig, …) of the to_qkv at `before`.
void put_projections(Context& context, NamedTensors& to, const std::string& name, const std::string& before,
                     const std::string& kind, const Tensor& t) {
  const auto put_each = [&](const auto& part) {
    for (std::size_t i = 0; i < kProjections.size(); ++i)
      put("remap_conv_weights", to, before + kProjections[i] + kind, part(static_cast<std::int64_t>(i)),
          name);
  };
  if (kind == "weight_v") {
    if (t.shape().rank() != 1) refuse_shape(name, t, "(dim)");
    return put_each([&](std::int64_t i) { return i == 0 ? t : t.clone(context); });
  }
  const bool vector = kind == "weight_u";
  if (vector ? t.shape().rank() != 1 : !is_1x1(t))
    refuse_shape(name, t, vector ? "(3 n)" : "(3 n, dim, 1, 1)");
  if (t.size(0) % 3 != 0) refuse_shape(name, t, "rows of q, k and v, as many of each");
  const std::int64_t rows = t.size(0) / 3;
  put_each([&](std::int64_t i) {
    if (vector) return t.slice_flat(i * rows, {rows});
    return t.slice_flat(i * rows * t.size(1), {rows, t.size(1)});
  });
}

}  // namespace

NamedTensors remap_conv_weights(Context& context, const NamedTensors& stored) {
  NamedTensors to;
  for (const auto& [name, tensor] : stored) {
    std::string before;
    bool done = false;
    for (const char* kind : {"weight", "weight_orig", "weight_u", "weight_v"})
      if (ends_in(name, fmt::format("to_qkv.{}", kind), before)) {
        put_projections(context, to, name, before, kind, tensor);
        done = true;
      }
    for (const char* layer : {"to_out", "layers.1", "layers.4"})
      for (const char* kind : {"weight", "weight_orig"})
        if (!done && is_1x1(tensor) && ends_in(name, fmt::format("{}.{}", layer, kind), before)) {
          put("remap_conv_weights", to, name, tensor.reshape({tensor.size(0), tensor.size(1)}), name);
          done = true;
        }
    if (!done) put("remap_conv_weights", to, name, tensor, name);
  }
  return to;
}

NamedTensors remap_spectral_norm_names(const NamedTensors& stored) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kForms{
      std::pair{"parametrizations.weight.original", "weight_orig"},
      {"parametrizations.weight.0._u", "weight_u"},
      {"parametrizations.weight.0._v", "weight_v"}};
  NamedTensors to;
  for (const auto& [name, tensor] : stored) {
    std::string before, renamed = name;
    for (const auto& form : kForms)
      if (ends_in(name, form.first, before)) renamed = before + form.second;
    put("remap_spectral_norm_names", to, renamed, tensor, name);
  }
  return to;
}

}  // namespace weft
