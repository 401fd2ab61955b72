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

bool Work::done() {
  if (group_ == nullptr) return true;
  if (!group_->poll(slot_, ticket_)) return false;
  finish();
  return true;
}

void Work::wait() {
  if (group_ == nullptr) return;
  group_->wait(slot_, ticket_, std::nullopt);
  finish();
}

bool Work::wait_for(Duration limit) {
  if (group_ == nullptr) return true;
  if (!group_->wait(slot_, ticket_, limit)) return false;
  finish();
  return true;
}

}  // namespace weft
