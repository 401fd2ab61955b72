#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "weft/base/error.hpp"

namespace weft::bench {

float number(std::uint32_t s, std::int64_t i) {
  std::uint32_t h = (static_cast<std::uint32_t>(i) + s * 0x9e3779b9u) * 2654435761u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  h *= 3266489917u;
  h ^= h >> 16;
  return static_cast<float>(h >> 8) * 0x1p-24f - 0.5f;
}

Tensor numbers(Context& context, const Shape& shape, std::uint32_t stream, float scale, std::int64_t first) {
  const Tensor t(context, shape);
  float* const to = t.data_ptr<float>();
  for (std::int64_t i = 0; i < t.count(); ++i) to[i] = scale * number(stream, first + i);
  return t;
}

Projection project(const Tensor& whole) {
  double along = 0, squares = 0;
  for (std::int64_t i = 0; i < whole.count(); ++i) {
    const double v = whole.data_ptr<float>()[i];
    along += v * static_cast<double>(number(kProbe, i));
    squares += v * v;
  }
  return {along, std::sqrt(squares)};
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    all.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

std::vector<std::string> chosen(const std::string& flag, const std::string& text,
                                const std::vector<std::string>& known) {
  std::vector<std::string> all = words(text);
  for (const std::string& w : all)
    if (std::find(known.begin(), known.end(), w) == known.end()) {
      std::string names;
      for (const std::string& k : known) names += (names.empty() ? "" : ", ") + k;
      throw Error(ErrorCode::bad_argument, "bench: " + flag + " \"" + w + "\"; expected one of " + names);
    }
  return all;
}

int rounds_from(const std::string& text) {
  char* end = nullptr;
  const long rounds = std::strtol(text.c_str(), &end, 10);
  if (end == text.c_str() || *end != 0 || rounds < 1 || rounds > 100)
    throw Error(ErrorCode::bad_argument, "bench: --rounds \"" + text + "\"; expected 1 to 100");
  return static_cast<int>(rounds);
}

}  // namespace weft::bench
