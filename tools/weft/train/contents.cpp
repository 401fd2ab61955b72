#include "contents.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/hash.hpp"
#include "base/json_reader.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"
#include "weft/base/name_ranks.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::tools {
namespace {

std::vector<std::int64_t> extents(const Shape& shape) { return {shape.begin(), shape.end()}; }

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

}  // namespace

std::string content_line(const ContentName& name, const Tensor& tensor) {
  const Tensor all = full(tensor);
  std::string bytes(reinterpret_cast<const char*>(all.data()),
                    static_cast<std::size_t>(all.count() * size_bytes(all.dtype())));
  // The bits of a NaN depend on the sums that made it: each NaN is written as the same one.
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t i = 0; all.dtype() == DType::f32 && i < all.f32().size(); ++i)
    if (std::isnan(all.f32()[i])) std::memcpy(bytes.data() + i * sizeof(float), &kNaN, sizeof(float));
  return fmt::format("step {} {} {} {:016x}", name.step, name.kind, name.path, hash_of(bytes));
}

std::string content_values(const Tensor& tensor) {
  const Tensor all = full(tensor);
  nlohmann::json j{{"shape", extents(all.shape())}, {"ranks", nlohmann::json::array()}};
  if (const LayoutRef& layout = tensor.layout())
    for (int rank = 0; rank < layout->mesh_shape().size(); ++rank)
      for (const Box& box : layout->parts(rank))
        j["ranks"].push_back(
            {{"rank", rank}, {"offset", extents(box.offset)}, {"shape", extents(box.shape)}});
  const auto bytes = static_cast<std::size_t>(size_bytes(all.dtype()));
  for (std::size_t i = 0; i < static_cast<std::size_t>(all.count()); ++i) {
    std::uint64_t bits = 0;  // of an element of any dtype
    std::memcpy(&bits, all.data() + i * bytes, bytes);
    j["bits"].push_back(bits);
  }
  return j.dump();
}

std::vector<RunContents::Hash> read_contents(const std::string& text, const std::string& where) {
  std::vector<RunContents::Hash> hashes;
  TextIn lines(text);
  for (std::string line; std::getline(lines, line);) {
    TextIn in(line);
    std::string word;
    RunContents::Hash h;
    if (!(in >> word >> h.name.step >> h.name.kind >> h.name.path >> h.hash) || word != "step")
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: line {} is \"{}\"; expected step, kind, path and hash", where,
                              hashes.size() + 1, line));
    hashes.push_back(std::move(h));
  }
  return hashes;
}

// In the order in which a step makes its values: the activations, the loss, the gradients, their norm, the
// parameters, the state of the optimizer.
std::optional<ContentDifference> first_difference(const RunContents& a, const RunContents& b) {
  auto of_a = a.hashes.begin(), of_b = b.hashes.begin();
  for (std::size_t step = 0; step < a.losses.size(); ++step) {
    const auto number = static_cast<std::int64_t>(step);
    const auto differs = [&](std::string_view kind) -> std::optional<ContentDifference> {
      for (; of_a != a.hashes.end() && of_a->name.step == number && of_a->name.kind == kind; ++of_a, ++of_b)
        if (of_b == b.hashes.end() || !(of_a->name == of_b->name) || of_a->hash != of_b->hash)
          return ContentDifference{number, "", of_a->name};
      return {};
    };
    if (const auto d = differs("activation")) return d;
    if (step >= b.losses.size() || !same_bits(a.losses[step], b.losses[step]))
      return ContentDifference{number, "the loss", {}};
    if (const auto d = differs("gradient")) return d;
    if (!same_bits(a.norms[step], b.norms[step])) return ContentDifference{number, "the gradient norm", {}};
    if (const auto d = differs("parameter")) return d;
    if (const auto d = differs("state")) return d;
  }
  return {};
}

namespace {

struct Values {
  std::vector<std::int64_t> shape;
  std::vector<std::uint64_t> bits;
  struct Part {
    int rank;
    std::vector<std::int64_t> offset, shape;
  };
  std::vector<Part> parts;

  std::vector<int> ranks_with(const std::vector<std::int64_t>& index) const {
    std::vector<int> ranks;
    for (const Part& p : parts) {
      bool inside = true;
      for (std::size_t d = 0; d < index.size(); ++d)
        inside &= index[d] >= p.offset[d] && index[d] < p.offset[d] + p.shape[d];
      if (inside && (ranks.empty() || ranks.back() != p.rank)) ranks.push_back(p.rank);
    }
    return ranks;
  }
};

Values read_values(const std::string& text, const std::string& where) {
  const nlohmann::json j = parse_json(text, where + ": it");
  Values v{j.at("shape"), j.value("bits", std::vector<std::uint64_t>{}), {}};
  for (const auto& part : j.at("ranks"))
    v.parts.push_back({part.at("rank"), part.at("offset"), part.at("shape")});
  return v;
}

}  // namespace

std::string value_difference(const std::string& a, const std::string& b, const std::string& where) {
  const Values one = read_values(a, where), two = read_values(b, where);
  if (one.shape != two.shape || one.bits.size() != two.bits.size()) return "shapes differ";
  std::size_t first = one.bits.size(), count = 0;
  for (std::size_t i = one.bits.size(); i-- > 0;)
    if (one.bits[i] != two.bits[i]) first = i, ++count;
  if (count == 0) return "";
  std::vector<std::int64_t> index(one.shape.size());
  auto rest = static_cast<std::int64_t>(first);
  for (std::size_t d = index.size(); d-- > 0; rest /= one.shape[d]) index[d] = rest % one.shape[d];
  return fmt::format(
      "element ({}) of ({}): {:08x} and {:08x}, on {} of the first and on {} of the second; {} of {} "
      "elements differ",
      fmt::join(index, ", "), fmt::join(one.shape, ", "), one.bits[first], two.bits[first],
      name_ranks(one.ranks_with(index)), name_ranks(two.ranks_with(index)), count, one.bits.size());
}

}  // namespace weft::tools
