#include "mesh/layout_table.hpp"

#include <utility>
#include <vector>

namespace weft {

void add_to(Fnv1a& hash, const LayoutSpec& spec) {
  const auto mix = [&hash](auto value) { hash.add_at_once(static_cast<std::uint64_t>(value)); };
  for (const Placement& p : spec.placements) {
    mix(p.index());
    if (const Shard* s = std::get_if<Shard>(&p)) mix(s->dim);
    if (const Partial* q = std::get_if<Partial>(&p)) mix(q->op.kind);
  }
  mix(spec.global.rank());
  for (const std::int64_t n : spec.global) mix(n);
  for (const int axis : spec.nesting) mix(axis);
  mix(spec.segments.dim);
  for (const std::int64_t n : spec.segments.sizes) mix(n);
}

LayoutTable::~LayoutTable() {
  for (std::atomic<Entry*>& list : lists_)
    for (Entry* e = list.load(); e != nullptr;) delete std::exchange(e, e->next.load());
  free_all(removed_);
}

// All accesses to lists and to finding_ are sequentially consistent. remove() first removes the entry from
// its list and then reads finding_. find() first counts itself and then reads the list. So either remove()
// sees the call of find(), or the call does not see the entry.
LayoutRef LayoutTable::find(std::size_t hash, const LayoutSpec& spec) const {
  struct Counted {
    std::atomic<int>& count;
    explicit Counted(std::atomic<int>& c) : count(c) { ++count; }
    ~Counted() { --count; }
  } const counted(finding_);
  for (const Entry* e = lists_[hash % lists_.size()].load(); e != nullptr; e = e->next.load()) {
    if (e->hash != hash) continue;
    if (LayoutRef layout = e->layout.lock(); layout != nullptr && *layout == spec) return layout;
  }
  return nullptr;
}

LayoutRef LayoutTable::intern(const std::shared_ptr<MeshState>& mesh, LayoutSpec spec) {
  Fnv1a sum;
  add_to(sum, spec);
  const std::size_t hash = sum.value;
  if (LayoutRef found = find(hash, spec)) return found;
  auto entry = std::make_unique<Entry>();
  entry->hash = hash;
  std::unique_ptr<const Layout> fresh(new Layout(mesh, std::move(spec)));
  Entry* const own = entry.release();
  const LayoutRef layout(fresh.release(), [this, own](const Layout* gone) {
    remove(own);
    delete gone;  // may end the mesh, and this table with it
  });
  own->layout = layout;
  // Another thread may have made it in the meantime. References that are held meanwhile are released after
  // the lock, because releasing the last one takes the lock.
  std::vector<LayoutRef> held;
  const std::lock_guard lock(changing_);
  std::atomic<Entry*>& list = list_of(hash);
  for (Entry* e = list.load(); e != nullptr; e = e->next.load()) {
    if (e->hash != hash) continue;
    held.push_back(e->layout.lock());
    if (held.back() != nullptr && *held.back() == *layout) return held.back();
  }
  own->next = list.load();
  list = own;
  return layout;
}

void LayoutTable::remove(Entry* entry) noexcept {
  Entry* freed = nullptr;
  {
    const std::lock_guard lock(changing_);
    std::atomic<Entry*>* at = &list_of(entry->hash);
    while (at->load() != nullptr && at->load() != entry) at = &at->load()->next;
    if (at->load() == entry) *at = entry->next.load();
    entry->next_removed = std::exchange(removed_, entry);
    if (finding_ == 0) freed = std::exchange(removed_, nullptr);
  }
  free_all(freed);
}

void LayoutTable::free_all(Entry* removed) noexcept {
  while (removed != nullptr) delete std::exchange(removed, removed->next_removed);
}

std::size_t LayoutTable::size() const {
  const std::lock_guard lock(changing_);
  std::size_t count = 0;
  for (const std::atomic<Entry*>& list : lists_)
    for (const Entry* e = list.load(); e != nullptr; e = e->next.load()) ++count;
  return count;
}

}  // namespace weft
