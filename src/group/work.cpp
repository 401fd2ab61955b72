#include "weft/group/work.hpp"

#include "group/group_state.hpp"

namespace weft {

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    if (group_) drop();
    take(other);
  }
  return *this;
}

void Work::take(Work& other) noexcept {
  group_ = std::exchange(other.group_, nullptr);
  slot_ = other.slot_;
  ticket_ = other.ticket_;
  more_ = std::move(other.more_);
}

// The first Work of a chain was given back: the next becomes the first.
void Work::finish() noexcept {
  group_ = nullptr;
  if (more_) {
    const std::unique_ptr<Work> next = std::move(more_);
    take(*next);
  }
}

void Work::drop() noexcept {
  for (; group_; finish()) group_->dropped(slot_, ticket_);
}

void Work::spend() noexcept {
  for (; group_; finish()) group_->give_back();
}

// A call that failed has thrown its Error: its Work is spent, and so are those that are chained to it, since
// the group has failed. It is up to the caller to quiesce().
template <class Ask>
bool Work::ask(const Ask& ask) {
  for (; group_; finish()) {
    bool finished = false;
    try {
      finished = ask();
    } catch (...) {
      spend();
      throw;
    }
    if (!finished) return false;
  }
  return true;
}

bool Work::done() {
  return ask([&] { return group_->poll(slot_, ticket_); });
}

void Work::wait() {
  ask([&] { return group_->wait(slot_, ticket_, std::nullopt); });
}

bool Work::wait_for(Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  bool first = true;
  return ask(
      [&] { return group_->wait(slot_, ticket_, std::exchange(first, false) ? limit : deadline.left()); });
}

void Work::wait_on(Stream stream) {
  if (!group_ || !group_->streams()) return wait();
  // They stay in the chain: wait() or done() still tell how they ended.
  try {
    for (const Work* w = this; w != nullptr && w->group_ != nullptr; w = w->more_.get())
      w->group_->wait_on(w->slot_, w->ticket_, stream);
  } catch (...) {
    if (group_->failure()) spend();  // else it is the stream that cannot wait
    throw;
  }
}

}  // namespace weft
