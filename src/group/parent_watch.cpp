#include "group/parent_watch.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/parse_number.hpp"
#include "group/rank_list.hpp"
#include "store/table.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

// the length of a short wait, after which the parent is checked
constexpr Duration kPiece = std::chrono::milliseconds(200);
constexpr Duration kStoreAnswer = std::chrono::milliseconds(500);  // how long the store may take to answer

// Members that do not give up because of the parent's failure arrive within this time.
constexpr Duration kPatienceOfMembers = std::chrono::seconds(2);

// Returns whether the rank that wrote this text arrived last: that rank combines the texts. The text is
// "build size place info", see join.cpp.
bool came_last(std::string_view text, std::size_t ranks) {
  next_word(text);
  next_word(text);
  return parse_integer<std::size_t>(next_word(text)) == ranks;
}

}  // namespace

class ParentWatch::WatchingStore final : public ForwardingStore {
 public:
  WatchingStore(std::shared_ptr<Store> store, const ParentWatch& watch)
      : ForwardingStore(std::move(store)), watch_(&watch) {}
  void end() {
    const std::lock_guard lock(mutex_);
    watch_ = nullptr;
  }
  std::string get(std::string_view key, Deadline deadline) override {
    const auto began = Clock::now();
    while (watches()) {
      const Deadline piece = deadline.left() <= kPiece ? deadline : Deadline::after(kPiece);
      try {
        return ForwardingStore::get(key, piece);
      } catch (const Error& e) {
        if (e.code() != ErrorCode::timeout || !piece.passed()) throw;
        look(key);
        if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, Clock::now() - began));
      }
    }
    return ForwardingStore::get(key, deadline);
  }

 private:
  bool watches() {
    const std::lock_guard lock(mutex_);
    return watch_ != nullptr;
  }
  void look(std::string_view key) {
    const std::lock_guard lock(mutex_);
    if (watch_ != nullptr) watch_->look(key, *this);
  }
  std::mutex mutex_;
  const ParentWatch* watch_;
};

ParentWatch::ParentWatch(GroupState& parent, std::string_view name, std::span<const int> members)
    : parent_(parent),
      name_(name),
      members_(members.begin(), members.end()),
      known_(parent.failure().has_value()) {
  if (parent.member.store != nullptr) store_ = std::make_shared<WatchingStore>(parent.member.store, *this);
}

std::shared_ptr<Store> ParentWatch::store() const { return store_; }

void ParentWatch::end() noexcept {
  if (store_ != nullptr) store_->end();
}

// Returns the members that have not arrived and are lost to the parent. Ranks write their texts next to the
// key for which they wait. A rank that has written its own text has done all that the others need. It may
// then be lost. Only the last rank to arrive must also write the key that holds all texts.
std::vector<int> ParentWatch::lost(std::string_view key, Store& store) const {
  const std::string folder(key.substr(0, key.rfind('/') + 1));
  std::vector<int> gone = parent_.gone(), lost;
  if (const auto why = parent_.failure(); why && why->code == ErrorCode::peer_lost)
    gone.insert(gone.end(), why->ranks.begin(), why->ranks.end());
  const bool all_texts = key.substr(folder.size()) == "all";
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (!holds(gone, members_[i])) continue;
    const auto text = store.try_get(folder + std::to_string(i), Deadline::after(kStoreAnswer));
    if (!text || (all_texts && came_last(*text, members_.size()))) lost.push_back(members_[i]);
  }
  return lost;
}

// Called after a wait for `key` that ended without the key.
void ParentWatch::look(std::string_view key, Store& store) const {
  const bool failed = parent_.look_after();
  const std::vector<int> missing = lost(key, store);
  const bool hopeless = failed && !known_ && Clock::now() - began_ >= kPatienceOfMembers;
  if ((missing.empty() && !hopeless) || store.try_get(key, Deadline::after(kStoreAnswer))) return;
  // Other ranks may wait for ranks that fail because of this failure.
  if (!failed)
    parent_.fail(
        Failure{.code = ErrorCode::peer_lost,
                .text = fmt::format("{} left the group before joining \"{}\"", name_ranks(missing), name_),
                .ranks = missing});
  const std::optional<Failure> why = parent_.failure();
  if (!why) return;
  Failure told{
      .code = why->code,
      .text = fmt::format("group \"{}\": in group \"{}\": {}", name_, parent_.member.name, why->text),
      .ranks = {}};
  for (std::size_t i = 0; i < members_.size(); ++i)
    if (holds(why->ranks, members_[i])) told.ranks.push_back(static_cast<int>(i));
  throw Error(std::move(told));
}

std::optional<Error> ParentWatch::cause(const Error& e) const {
  const bool may_be_a_consequence = e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer_lost ||
                                    e.code() == ErrorCode::aborted || e.code() == ErrorCode::mismatch;
  if (!may_be_a_consequence || known_ || !parent_.look_after()) return std::nullopt;
  std::optional<Failure> why = parent_.failure();
  if (!why) return std::nullopt;
  why->text = fmt::format("subgroup \"{}\": {} [group \"{}\", rank {}]", name_, why->text,
                          parent_.member.name, parent_.member.rank);
  return Error(std::move(*why));
}

}  // namespace weft
