// Numbers that are the same on every mesh and in the programs of bench/peers, and words of the command line.
// Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weft/base/tensor.hpp"

namespace weft::bench {

/// Uniform on [-0.5, 0.5): number i of stream s. As number() of peers/torch_layers.py has it.
float number(std::uint32_t s, std::int64_t i);
enum Stream : std::uint32_t { kX = 1, kDy = 2, kProbe = 3, kWeights = 10 };
/// scale * number(stream, first + i) as element i.
Tensor numbers(Context& context, const Shape& shape, std::uint32_t stream, float scale,
               std::int64_t first = 0);
/// The projection of all elements on the stream kProbe, and the square root of their sum of squares: what
/// programs compare.
struct Projection {
  double along = 0, norm = 0;
};
Projection project(const Tensor& whole);

/// The parts between commas.
std::vector<std::string> words(const std::string& text);
/// The same. Throws bad_argument for a word that is not among `known`.
std::vector<std::string> chosen(const std::string& flag, const std::string& text,
                                const std::vector<std::string>& known);
/// Throws bad_argument if it is not 1 to 100.
int rounds_from(const std::string& text);

}  // namespace weft::bench
