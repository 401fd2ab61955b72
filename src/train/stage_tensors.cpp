#include "train/stage_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>

#include "weft/base/error.hpp"

namespace weft {
namespace {

using Words = std::vector<std::int64_t>;

// A name, dtype and layout as numbers, and back.
void add_words(Words& words, const MutableNamedView& t) {
  const auto add_list = [&](const auto& list) {
    words.push_back(static_cast<std::int64_t>(list.size()));
    words.insert(words.end(), list.begin(), list.end());
  };
  add_list(t.name);
  words.push_back(static_cast<std::int64_t>(t.data.dtype));
  const Layout& l = *t.layout;
  words.push_back(l.global.rank());
  for (int dim = 0; dim < l.global.rank(); ++dim) words.push_back(l.global[dim]);
  for (const Placement& p : l.placements) words.push_back(is_shard(p) ? std::get<Shard>(p).dim : -1);
  for (const int axis : l.nesting) words.push_back(axis);
  words.push_back(l.segments.dim);
  add_list(l.segments.sizes);
}

class WordReader {
 public:
  explicit WordReader(std::span<const std::int64_t> words) : words_(words) {}
  bool done() const { return at_ == words_.size(); }
  std::int64_t next() { return words_[at_++]; }
  std::span<const std::int64_t> list() {
    const auto size = static_cast<std::size_t>(next());
    at_ += size;
    return words_.subspan(at_ - size, size);
  }
  std::string name() {
    std::string text;
    for (const std::int64_t c : list()) text += static_cast<char>(c);
    return text;
  }
  LayoutRef layout(const DeviceMesh& root) {
    Shape global;
    std::vector<std::int64_t> dims;
    for (std::int64_t i = next(); i > 0; --i) dims.push_back(next());
    global = Shape(dims);
    Placements placements;
    std::vector<std::string_view> nesting;
    for (int axis = 0; axis < root.shape().axis_count(); ++axis) {
      const std::int64_t dim = next();
      placements.push_back(dim < 0 ? Placement(Replicate{}) : Placement(Shard{static_cast<int>(dim)}));
    }
    for (int axis = 0; axis < root.shape().axis_count(); ++axis)
      nesting.push_back(root.shape().name(static_cast<int>(next())));
    LayoutRef l = make_layout(root, std::move(placements), global)->nested(nesting);
    const auto segmented = static_cast<int>(next());
    const std::span<const std::int64_t> sizes = list();
    return sizes.empty() ? l : l->segmented(segmented, {sizes.begin(), sizes.end()});
  }

 private:
  std::span<const std::int64_t> words_;
  std::size_t at_ = 0;
};

}  // namespace

StageTensors::StageTensors(const DeviceMesh& stages, std::span<const MutableNamedView> own)
    : stages_(stages) {
  Words mine;
  for (const MutableNamedView& t : own) add_words(mine, t);
  ProcessGroup& group = stages.group();
  const auto ranks = static_cast<std::size_t>(group.size());
  Words size{static_cast<std::int64_t>(mine.size())}, sizes(ranks);
  group.all_gather(size, sizes).wait();
  Words all(static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})));
  group.all_gather_v(mine, all, Blocks{sizes}).wait();
  const DeviceMesh root = stages.root();
  std::size_t begin = 0;
  std::map<std::string, std::size_t> numbers;  // of items
  for (std::size_t owner = 0; owner < ranks; ++owner) {
    const auto count_of = static_cast<std::size_t>(sizes[owner]);
    WordReader reader(std::span<const std::int64_t>(all).subspan(begin, count_of));
    begin += count_of;
    for (std::size_t i = 0; !reader.done(); ++i) {
      Item item{reader.name(),
                static_cast<DType>(reader.next()),
                static_cast<int>(owner),
                nullptr,
                nullptr,
                nullptr,
                {}};
      item.whole = reader.layout(root);
      if (group.rank() == item.owner) item.own = own[i].data.data;
      if (const auto [first, is_new] = numbers.emplace(item.name, items_.size()); !is_new) {
        Item& earlier = items_[first->second];
        if (earlier.dtype != item.dtype || earlier.whole != item.whole)
          throw Error(ErrorCode::bad_argument,
                      fmt::format("checkpoint of stages: two stages have another \"{}\"", item.name));
        if (earlier.own == nullptr) earlier.own = item.own;
        continue;
      }
      item.divided = item.whole;
      // A tensor without dimensions, or with segments that are cut one by one, stays whole on all ranks.
      if (item.whole->global.rank() > 0 && item.whole->segments.sizes.empty()) {
        item.divided = item.whole->with(stages, Shard{0})->shard_inside(stages, 0);
        for (const int rank : stages.ranks()) item.counts.push_back(item.divided->local_shape(rank).count());
      }
      item.part.resize(
          static_cast<std::size_t>(item.divided->local_shape().count() * size_bytes(item.dtype)));
      items_.push_back(std::move(item));
    }
  }
}

std::vector<MutableNamedView> StageTensors::views() {
  std::vector<MutableNamedView> all;
  for (Item& item : items_) {
    const Shape& shape = item.divided->local_shape();
    all.push_back({item.name, {item.part.data(), item.dtype, {}, shape, row_major(shape)}, item.divided});
  }
  return all;
}

void StageTensors::spread() {
  std::vector<std::byte> whole;
  for (Item& item : items_) {
    if (count(item) == 0) continue;
    whole.resize(static_cast<std::size_t>(count(item) * size_bytes(item.dtype)));
    std::byte* const from = item.owner == stages_.rank() ? item.own : whole.data();
    stages_.group().broadcast(Buffer(from, count(item), item.dtype), item.owner).wait();
    const auto own = item.counts.begin() + stages_.rank();
    const std::int64_t first =
        item.counts.empty() ? 0 : std::accumulate(item.counts.begin(), own, std::int64_t{0});
    if (!item.part.empty())
      std::memcpy(item.part.data(), from + first * size_bytes(item.dtype), item.part.size());
  }
}

void StageTensors::collect() {
  std::vector<std::byte> whole;
  for (Item& item : items_) {
    if (count(item) == 0) continue;
    const std::byte* from = item.part.data();
    const auto bytes = static_cast<std::size_t>(count(item) * size_bytes(item.dtype));
    if (!item.counts.empty()) {
      whole.resize(bytes);
      const std::int64_t mine = item.counts[static_cast<std::size_t>(stages_.rank())];
      stages_.group()
          .all_gather_v(ConstBuffer(item.part.data(), mine, item.dtype),
                        Buffer(whole.data(), count(item), item.dtype), Blocks{item.counts})
          .wait();
      from = whole.data();
    }
    if (item.own != nullptr) std::memcpy(item.own, from, bytes);
  }
}

}  // namespace weft
