#include "weft/backends/work.hpp"

#include "backends/group_state.hpp"

namespace weft {

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    if (group_) drop();
    group_ = other.group_;
    slot_ = other.slot_;
    ticket_ = other.ticket_;
    more_ = std::move(other.more_);
    other.group_ = nullptr;
  }
  return *this;
}

void Work::finish() noexcept {
  group_->release();
  group_ = nullptr;
}

void Work::drop() noexcept {
  group_->dropped(slot_, ticket_);
  finish();
}

// A call that failed has told so: its ticket is spent, and quiesce() is the caller's to call.
template <class Ask>
bool Work::ask(const Ask& ask) {
  if (group_ == nullptr) return true;
  bool finished = false;
  try {
    finished = ask();
  } catch (...) {
    finish();
    throw;
  }
  if (finished) finish();
  return finished;
}

bool Work::done() {
  const bool all = ask([&] { return group_->poll(slot_, ticket_); });
  return all && (!more_ || more_->done());
}

void Work::wait() {
  ask([&] { return group_->wait(slot_, ticket_, std::nullopt); });
  if (more_) more_->wait();
}

bool Work::wait_for(Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  if (!ask([&] { return group_->wait(slot_, ticket_, limit); })) return false;
  return !more_ || more_->wait_for(deadline.left());
}

void Work::wait_on(void* stream) {
  if (group_ != nullptr && !group_->wait_on(slot_, ticket_, stream))
    ask([&] { return group_->wait(slot_, ticket_, std::nullopt); });
  if (more_) more_->wait_on(stream);
}

}  // namespace weft
