#include "mesh/replica_bits.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/hash.hpp"
#include "host/threads/workers.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/mesh_state.hpp"
#include "weft/base/error.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

// Several threads hash blocks, and the hash of a tensor is a hash of its blocks' hashes; the blocks are
// always the same. Bytes on a device are copied to the host, at most this many at a time.
constexpr std::int64_t kBlockBytes = std::int64_t{1} << 19;
constexpr std::size_t kBlocksAtOnce = 32;

// Four parallel sums, each as in xxHash64: a large tensor is hashed about as fast as it can be read.
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

}  // namespace

bool is_over(const Layout& layout, const DeviceMesh& axes) {
  return &layout.mesh_shape() == &detail::MeshAccess::state(axes).shape();
}

std::vector<int> replicated_along(const LayoutRef& layout, const DeviceMesh& axes) {
  std::vector<int> along;
  if (layout == nullptr || !is_over(*layout, axes)) return along;
  for (const int a : axes.root_axes())
    if (layout->mesh_shape().size(a) > 1 && is_replicate(layout->placements[static_cast<std::size_t>(a)]))
      along.push_back(a);
  return along;
}

const ReplicaBits::Holders& ReplicaBits::holders_along(const std::vector<int>& along) {
  if (const auto known = holders_.find(along); known != holders_.end()) return known->second;
  const MeshShape root = axes_.root().shape();
  std::map<std::vector<int>, std::vector<int>> by_place;  // coordinates on the other axes -> ranks
  const std::vector<int> ranks = axes_.ranks();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    std::vector<int> place = root.coordinates(ranks[r]);
    for (const int axis : along) place[static_cast<std::size_t>(axis)] = 0;
    by_place[place].push_back(static_cast<int>(r));
  }
  Holders& made = holders_[along];
  made.along = along;
  for (auto& [place, set] : by_place) {
    if (std::find(set.begin(), set.end(), axes_.rank()) != set.end()) made.own = made.sets.size();
    made.sets.push_back(std::move(set));
  }
  return made;
}

void ReplicaBits::add(const ConstTensorView& data, const std::vector<int>& along) {
  tensors_.push_back({data.data, data.bytes(), &holders_along(along)});
}

struct ReplicaBits::Block {
  Replica* tensor;
  const std::byte* data;
  std::int64_t bytes;
  std::uint64_t hash;
};

void ReplicaBits::hash_all() {
  std::array<Block, kBlocksAtOnce> blocks;
  std::size_t n = 0;
  Tensor staging;
  for (Replica& tensor : tensors_)
    for (std::int64_t at = 0; at < tensor.bytes; at += kBlockBytes) {
      blocks[n++] = {&tensor, tensor.data + at, std::min(kBlockBytes, tensor.bytes - at), 0};
      if (n == kBlocksAtOnce) hash_blocks(std::span(blocks).first(std::exchange(n, 0)), staging);
    }
  hash_blocks(std::span(blocks).first(n), staging);
}

void ReplicaBits::hash_blocks(std::span<Block> blocks, Tensor& staging) const {
  std::int64_t bytes = 0;
  if (compute_ != nullptr && compute_->device() != Device{} && !blocks.empty()) {
    if (!staging)
      staging = Tensor(axes_.context(), {kBlockBytes * static_cast<std::int64_t>(blocks.size())}, DType::u8);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::byte* const here = staging.data() + static_cast<std::int64_t>(i) * kBlockBytes;
      compute_->runtime().copy(blocks[i].data, compute_->device(), here, {},
                               {static_cast<std::size_t>(blocks[i].bytes)}, compute_->stream());
      blocks[i].data = here;
    }
    compute_->wait();
  }
  for (const Block& block : blocks) bytes += block.bytes;
  threads::run(compute_, blocks.size(), bytes / 8, [&](std::size_t i) {
    BitHash hash;
    hash.add(blocks[i].data, static_cast<std::size_t>(blocks[i].bytes));
    blocks[i].hash = hash.value();
  });
  for (const Block& block : blocks) block.tensor->hash = digest_of(block.tensor->hash, block.hash);
}

std::vector<std::uint64_t> ReplicaBits::compare(std::string_view what, const ListDigest& digest,
                                                std::span<const std::uint64_t> own,
                                                const std::function<ListEntries()>& list,
                                                const std::optional<Error>& fault) {
  if (!fault) hash_all();
  // The caller's words, then one hash for each set of axes along which a tensor is replicated.
  std::vector<const Holders*> kinds;
  std::vector<std::uint64_t> words(own.begin(), own.end());
  for (const Replica& tensor : tensors_) {
    const auto kind = std::find(kinds.begin(), kinds.end(), tensor.holders);
    const std::size_t at = own.size() + static_cast<std::size_t>(kind - kinds.begin());
    if (kind == kinds.end()) {
      kinds.push_back(tensor.holders);
      words.push_back(0);
    }
    words[at] = digest_of(words[at], tensor.hash);
  }
  const std::vector<std::uint64_t> all = gather_with_list(what, axes_, digest, words, list, fault);
  const auto told = [&](int rank, std::size_t word) {
    return all[static_cast<std::size_t>(rank) * words.size() + word];
  };
  bool differs = false;
  for (std::size_t k = 0; k < kinds.size(); ++k)
    for (const std::vector<int>& set : kinds[k]->sets)
      for (const int r : set) differs = differs || told(r, own.size() + k) != told(set[0], own.size() + k);
  if (differs) {
    const auto count = static_cast<std::int64_t>(tensors_.size());
    Tensor hashes(axes_.context(), {count}, DType::u64, Memory::shared);
    hashes_ = Tensor(axes_.context(), {count * axes_.size()}, DType::u64, Memory::shared);
    for (std::size_t i = 0; i < tensors_.size(); ++i) hashes.as<std::uint64_t>()[i] = tensors_[i].hash;
    gather_on_host(axes_.group(), hashes, hashes_);
  }
  std::vector<std::uint64_t> callers;
  for (int r = 0; r < axes_.size(); ++r)
    for (std::size_t w = 0; w < own.size(); ++w) callers.push_back(told(r, w));
  return callers;
}

bool ReplicaBits::same(std::size_t i, std::size_t set) const {
  if (same_everywhere()) return true;
  const std::vector<int>& ranks = tensors_[i].holders->sets[set];
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int r) { return hash_of_rank(r, i) == hash_of_rank(ranks[0], i); });
}

bool ReplicaBits::same(std::size_t i) const {
  for (std::size_t s = 0; s < holders(i).size(); ++s)
    if (!same(i, s)) return false;
  return true;
}

std::vector<int> ReplicaBits::drifted(std::size_t i) const {
  std::vector<int> ranks;
  for (std::size_t s = 0; s < holders(i).size(); ++s) {
    if (same(i, s)) continue;
    std::map<std::uint64_t, std::vector<int>> by_hash;
    for (const int r : holders(i)[s]) by_hash[hash_of_rank(r, i)].push_back(r);
    std::size_t most = 0, as_many = 0;
    for (const auto& [hash, those] : by_hash) most = std::max(most, those.size());
    for (const auto& [hash, those] : by_hash) as_many += those.size() == most;
    for (const auto& [hash, those] : by_hash)
      if (as_many > 1 || those.size() < most) ranks.insert(ranks.end(), those.begin(), those.end());
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

void ReplicaBits::expect_same(std::string_view what,
                              const std::function<std::string_view(std::size_t)>& name) const {
  if (same_everywhere()) return;
  constexpr std::size_t kNamed = 3;  // of the others
  std::size_t first = 0;
  while (first < size() && same(first)) ++first;
  if (first == size()) return;
  const std::vector<int> ranks = drifted(first);
  std::vector<std::string> along, others;
  for (const int a : tensors_[first].holders->along) along.push_back(axes_.root().shape().name(a));
  std::size_t more = 0;
  for (std::size_t i = first + 1; i < size(); ++i)
    if (!same(i) && ++more <= kNamed) others.push_back(fmt::format("\"{}\"", name(i)));
  std::string also;
  if (more > 0)
    also = fmt::format("; replicas of {}{} differ, too", fmt::join(others, ", "),
                       more > kNamed ? fmt::format(" and {} more", more - kNamed) : "");
  const DeviceMesh mesh = axes_.root().submesh(along);
  throw Error(Failure{ErrorCode::mismatch,
                      fmt::format("{}: \"{}\" is Replicate on {}={}, but on {} it has other bits{}", what,
                                  name(first), mesh.name(), mesh.size(), name_axis_ranks(axes_, ranks), also),
                      Op::none, kNoCall, ranks});
}

}  // namespace weft
