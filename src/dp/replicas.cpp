#include "dp/replicas.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "dp/axis_ranks.hpp"
#include "dp/elements.hpp"
#include "weft/base/error.hpp"

namespace weft::dp {
namespace {

constexpr std::size_t kOptionWords = 2;
constexpr double kUnset = -1;  // a tolerance, as ranks tell it

// Of a replica's distance from the average, relative to the largest element.
double tolerance_of(const SyncOptions& options, DType dtype) {
  if (options.tolerance) return *options.tolerance;
  switch (dtype) {
    case DType::f64: return 1024 * 0x1p-52;
    case DType::f32: return 1024 * 0x1p-23;
    case DType::bf16: return 4 * 0x1p-7;
    case DType::f16: return 4 * 0x1p-10;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean:
    case DType::c64:
    case DType::c128: break;  // check_gradients() refused it
  }
  return 0;
}

// Four sums side by side, each as in xxHash64: a large gradient is hashed about as fast as it is read.
class BitHash {
 public:
  void add(const std::byte* data, std::size_t bytes) {
    std::size_t at = 0;
    for (; at + 32 <= bytes; at += 32) {
      std::uint64_t words[4];
      std::memcpy(words, data + at, 32);
      for (std::size_t l = 0; l < 4; ++l) mix(lanes_[l], words[l]);
    }
    for (; at < bytes; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, data + at, std::min<std::size_t>(8, bytes - at));
      mix(lanes_[at / 8 % 4], word);
    }
  }
  std::uint64_t value() const {
    std::uint64_t sum = 0;
    for (const std::uint64_t lane : lanes_) mix(sum, lane);
    return sum;
  }

 private:
  static void mix(std::uint64_t& sum, std::uint64_t word) {
    sum = std::rotl(sum + word * 0xc2b2ae3d27d4eb4fu, 31) * 0x9e3779b185ebca87u;
  }
  std::uint64_t lanes_[4] = {1, 2, 3, 4};
};

std::uint64_t hash_of_data(const TensorView& v) {
  BitHash hash;
  hash.add(v.data, static_cast<std::size_t>(v.bytes()));
  return hash.value();
}

std::string text_of_options(const std::uint64_t* told) {
  const double tolerance = std::bit_cast<double>(told[0]);
  return fmt::format("tolerance {} and on_drift {}",
                     tolerance == kUnset ? "unset" : fmt::format("{}", tolerance),
                     told[1] == static_cast<std::uint64_t>(OnDrift::error) ? "error" : "average");
}

// What a rank says of its replica that is furthest from the average. Told as words.
struct Verdict {
  double excess = 0;  // distance / what rounding explains; more than 1: not rounding
  double distance = 0;
  std::uint64_t position = 0;  // among the replicas
};
constexpr std::size_t kVerdictWords = 3;

Verdict verdict_on(const TensorView& own, const TensorView& average, double tolerance, bool& finite) {
  double distance = 0, magnitude = 0;
  finite = true;
  with_elements(own, [&](const auto& values) {
    using T = typename std::remove_cvref_t<decltype(values)>::value_type;
    const auto means = average.as<T>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double mine = to_double(values[i]), mean = to_double(means[i]);
      finite = finite && std::isfinite(mine);
      if (!std::isfinite(mine) || !std::isfinite(mean)) continue;
      distance = std::max(distance, std::abs(mine - mean));
      magnitude = std::max(magnitude, std::abs(mean));
    }
  });
  Verdict v;
  v.distance = distance;
  if (distance > 0) v.excess = distance / (tolerance * (magnitude + distance));
  return v;
}

}  // namespace

const Replicas::Holders& Replicas::holders(const std::vector<std::string>& along) {
  if (const auto known = holders_.find(along); known != holders_.end()) return known->second;
  const MeshShape root = axes_.root().shape();
  std::map<std::vector<int>, std::vector<int>> by_place;  // coordinates on the other axes -> ranks
  const std::vector<int> ranks = axes_.ranks();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<int> place = root.coordinates(ranks[r]);
    for (const std::string& axis : along) place[static_cast<std::size_t>(root.index(axis))] = 0;
    by_place[place].push_back(static_cast<int>(r));
  }
  Holders& made = holders_[along];
  for (auto& [place, set] : by_place) {
    if (std::find(set.begin(), set.end(), axes_.rank()) != set.end()) made.own = made.sets.size();
    made.sets.push_back(std::move(set));
  }
  return made;
}

void Replicas::add(const Gradient& gradient, std::size_t index, const std::vector<std::string>& along) {
  replicas_.emplace(index, Replica{&gradient, along, &holders(along), {}});
}

std::uint64_t Replicas::hash_of_rank(int rank, std::size_t position) const {
  return hashes_[static_cast<std::size_t>(rank) * (kOptionWords + replicas_.size()) + kOptionWords +
                 position];
}

void Replicas::compare_bits(const SyncOptions& options) {
  if (replicas_.empty()) return;
  std::vector<std::uint64_t> own = {std::bit_cast<std::uint64_t>(options.tolerance.value_or(kUnset)),
                                    static_cast<std::uint64_t>(options.on_drift)};
  for (const auto& [index, replica] : replicas_) own.push_back(hash_of_data(replica.gradient->data));
  hashes_.resize(own.size() * static_cast<std::size_t>(axes_.size()));
  axes_.group().all_gather(view(own), view(hashes_)).wait();
  for (std::size_t at = own.size(); at < hashes_.size(); at += own.size())
    if (!std::equal(hashes_.begin(), hashes_.begin() + kOptionWords,
                    hashes_.begin() + static_cast<std::ptrdiff_t>(at)))
      throw Error(
          Failure{ErrorCode::mismatch,
                  fmt::format("sync_replicated_gradients: ranks gave different options: {} on {} rank 0, "
                              "{} on {} rank {}",
                              text_of_options(&hashes_[0]), axes_.name(), text_of_options(&hashes_[at]),
                              axes_.name(), at / own.size()),
                  Op::none,
                  kNoCall,
                  {0, static_cast<int>(at / own.size())}});
  std::size_t position = 0;
  for (auto& [index, replica] : replicas_) {
    for (const std::vector<int>& set : replica.holders->sets)
      replica.same.push_back(std::all_of(set.begin(), set.end(), [&](int r) {
        return hash_of_rank(r, position) == hash_of_rank(set[0], position);
      }));
    ++position;
  }
}

bool Replicas::same_here(std::size_t index) const {
  const Replica& replica = replicas_.at(index);
  return replica.same[replica.holders->own];
}

bool Replicas::same_everywhere() const {
  return std::all_of(replicas_.begin(), replicas_.end(), [](const auto& entry) {
    const std::vector<bool>& same = entry.second.same;
    return std::find(same.begin(), same.end(), false) == same.end();
  });
}

void Replicas::throw_drift(const Replica& replica, const std::vector<int>& ranks,
                           const std::string& how) const {
  const DeviceMesh along = axes_.root().submesh(replica.along);
  throw Error(Failure{
      ErrorCode::mismatch,
      fmt::format("sync_replicated_gradients: the gradient of \"{}\" is Replicate on {}={}, but on {} it "
                  "{}; a replica drifted, or the gradient is Partial there",
                  replica.gradient->name, along.name(), along.size(), name_axis_ranks(axes_, ranks), how),
      Op::none, kNoCall, ranks});
}

void Replicas::throw_other_bits() const {
  std::size_t position = 0;
  for (const auto& [index, replica] : replicas_) {
    std::vector<int> blamed;
    for (std::size_t s = 0; s < replica.same.size(); ++s) {
      if (replica.same[s]) continue;
      std::map<std::uint64_t, std::vector<int>> by_hash;
      for (const int r : replica.holders->sets[s]) by_hash[hash_of_rank(r, position)].push_back(r);
      std::size_t most = 0, as_many = 0;
      for (const auto& [hash, those] : by_hash) most = std::max(most, those.size());
      for (const auto& [hash, those] : by_hash) as_many += those.size() == most;
      for (const auto& [hash, those] : by_hash)
        if (as_many > 1 || those.size() < most) blamed.insert(blamed.end(), those.begin(), those.end());
    }
    std::sort(blamed.begin(), blamed.end());
    if (!blamed.empty()) throw_drift(replica, blamed, "has other bits, where the tolerance is 0");
    ++position;
  }
  throw Error(ErrorCode::bad_argument, "sync_replicated_gradients: all replicas have the same bits");
}

void Replicas::expect_no_drift(const SyncOptions& options,
                               const std::map<std::size_t, TensorView>& averages) const {
  std::vector<const Replica*> list;
  std::vector<std::uint64_t> own(kVerdictWords + (replicas_.size() + 63) / 64);
  Verdict worst;
  for (const auto& [index, replica] : replicas_) {
    list.push_back(&replica);
    const auto average = averages.find(index);
    if (average == averages.end()) continue;
    const std::size_t position = list.size() - 1;
    bool finite = true;
    Verdict v = verdict_on(replica.gradient->data, average->second,
                           tolerance_of(options, replica.gradient->data.dtype), finite);
    v.position = position;
    if (!finite) own[kVerdictWords + position / 64] |= std::uint64_t{1} << (position % 64);
    if (v.excess > worst.excess) worst = v;
  }
  own[0] = std::bit_cast<std::uint64_t>(worst.excess);
  own[1] = std::bit_cast<std::uint64_t>(worst.distance);
  own[2] = worst.position;
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(axes_.size()));
  axes_.group().all_gather(view(own), view(all)).wait();

  const auto told = [&](int r) { return all.data() + static_cast<std::size_t>(r) * own.size(); };
  for (std::size_t position = 0; position < list.size(); ++position) {
    std::vector<int> broken;
    for (const std::vector<int>& set : list[position]->holders->sets) {
      std::vector<int> those;
      for (const int r : set)
        if ((told(r)[kVerdictWords + position / 64] >> (position % 64) & 1) != 0) those.push_back(r);
      if (those.size() < set.size()) broken.insert(broken.end(), those.begin(), those.end());
    }
    std::sort(broken.begin(), broken.end());
    if (!broken.empty())
      throw_drift(*list[position], broken, broken.size() == 1 ? "is not finite" : "are not finite");
  }
  const auto verdict = [&](int r) {
    return Verdict{std::bit_cast<double>(told(r)[0]), std::bit_cast<double>(told(r)[1]), told(r)[2]};
  };
  Verdict found;
  for (int r = 0; r < axes_.size(); ++r)
    if (verdict(r).excess > found.excess) found = verdict(r);
  if (found.excess <= 1) return;
  // Two ranks that differ are equally far from their average; of more, the one that drifted is the furthest.
  std::vector<int> blamed;
  for (int r = 0; r < axes_.size(); ++r) {
    const Verdict v = verdict(r);
    if (v.position == found.position && v.excess >= 0.999 * found.excess &&
        v.distance >= 0.999 * found.distance)
      blamed.push_back(r);
  }
  throw_drift(*list[found.position], blamed,
              fmt::format("is {:.3g} from the average, {:.3g} times what rounding explains", found.distance,
                          found.excess));
}

}  // namespace weft::dp
