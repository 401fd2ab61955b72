// Input numbers that are equal on every mesh and in the programs of bench/peers, and parsing of command-line
// words. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/base/tensor.hpp"

namespace weft::bench {

/// Number i of stream s, uniform on [-0.5, 0.5). number() of peers/torch_layers.py gives the same values.
float number(std::uint32_t s, std::int64_t i);
enum Stream : std::uint32_t { kX = 1, kDy = 2, kProbe = 3, kWeights = 10 };
/// Makes a tensor whose element i is scale * number(stream, first + i).
Tensor numbers(Context& context, const Shape& shape, std::uint32_t stream, float scale,
               std::int64_t first = 0);
/// The projection of all elements on the stream kProbe, and the square root of their sum of squares. Programs
/// compare these numbers.
struct Projection {
  double along = 0, norm = 0;
};
Projection project(const Tensor& whole);

/// Splits `text` at commas.
std::vector<std::string> words(const std::string& text);
/// Like words(), but throws bad_argument for a word that is not in `known`.
std::vector<std::string> chosen(const std::string& flag, const std::string& text,
                                const std::vector<std::string>& known);
/// Throws bad_argument if the number is not between 1 and 100.
int rounds_from(const std::string& text);

}  // namespace weft::bench
