#include "checkpoint/conv_format.hpp"

#include <array>
#include <utility>

namespace weft {
namespace {

// Returns whether `name` ends in `suffix` after a dot, or equals it; `before` receives the part before it.
bool ends_in(std::string_view name, std::string_view suffix, std::string& before) {
  if (!name.ends_with(suffix)) return false;
  const std::size_t at = name.size() - suffix.size();
  if (at > 0 && name[at - 1] != '.') return false;
  before = name.substr(0, at);
  return true;
}

bool is_1x1(const Shape& shape) { return shape.rank() == 4 && shape[2] == 1 && shape[3] == 1; }

// The three projections of the fused entry `kind` (weight, weight_orig, …) below `before`.
ConvFormat projections(const std::string& before, const std::string& kind, const Shape& shape) {
  ConvFormat format;
  const auto put = [&](const Shape& piece, std::int64_t rows) {
    std::int64_t first = 0;
    for (const char* projection : {"to_q.", "to_k.", "to_v."}) {
      format.pieces.push_back({before + projection + kind, piece, first});
      first += rows;
    }
  };
  const bool vector = kind == "weight_u";
  if (kind == "weight_v") {
    shape.rank() == 1 ? put(shape, 0) : void(format.expected = "(dim)");
  } else if (kind == "weight" && shape == Shape{1}) {
    put(shape, 0);
  } else if (vector ? shape.rank() != 1 : !is_1x1(shape)) {
    format.expected = vector ? "(3 n)" : "(3 n, dim, 1, 1)";
  } else if (shape[0] % 3 != 0) {
    format.expected = "rows of q, k and v, as many of each";
  } else {
    const std::int64_t rows = shape[0] / 3;
    put(vector ? Shape{rows} : Shape{rows, shape[1]}, rows);
  }
  return format;
}

}  // namespace

ConvFormat conv_format(std::string_view name, const Shape& shape) {
  std::string before;
  for (const char* kind : {"weight", "weight_orig", "weight_u", "weight_v"})
    if (ends_in(name, std::string("to_qkv.") + kind, before)) return projections(before, kind, shape);
  if (is_1x1(shape))
    for (const char* layer : {"to_out.", "layers.1.", "layers.4."})
      for (const char* kind : {"weight", "weight_orig"})
        if (ends_in(name, std::string(layer) + kind, before))
          return {{{std::string(name), {shape[0], shape[1]}, 0}}, {}};
  return {};
}

std::string spectral_norm_name(std::string_view name) {
  constexpr std::array<std::pair<const char*, const char*>, 3> kForms{
      std::pair{"parametrizations.weight.original", "weight_orig"},
      {"parametrizations.weight.0._u", "weight_u"},
      {"parametrizations.weight.0._v", "weight_v"}};
  std::string before;
  for (const auto& form : kForms)
    if (ends_in(name, form.first, before)) return before + form.second;
  return std::string(name);
}

std::vector<RemappedTensor> remap_old_names(std::string_view name, const Shape& shape) {
  const std::string renamed = spectral_norm_name(name);
  ConvFormat format = conv_format(renamed, shape);
  if (format.pieces.empty() && renamed != name) format.pieces.push_back({renamed, shape, 0});
  return std::move(format.pieces);
}

}  // namespace weft
