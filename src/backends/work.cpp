#include "weft/backends/work.hpp"

#include "backends/group_state.hpp"

namespace weft {

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    if (group_) drop();
    group_ = other.group_;
    slot_ = other.slot_;
    ticket_ = other.ticket_;
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
  return ask([&] { return group_->poll(slot_, ticket_); });
}

void Work::wait() {
  ask([&] { return group_->wait(slot_, ticket_, std::nullopt); });
}

bool Work::wait_for(Duration limit) {
  return ask([&] { return group_->wait(slot_, ticket_, limit); });
}

}  // namespace weft
