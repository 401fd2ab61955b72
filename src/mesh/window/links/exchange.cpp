#include "mesh/window/links/exchange.hpp"

#include <fmt/format.h>

#include <mutex>
#include <utility>
#include <vector>

#include "base/mutant.hpp"
#include "mesh/window/named.hpp"
#include "weft/base/error.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

// Exchanges that a thread was stuck in when the program destroyed them. What they hold is the Context's, and ends with it: that thread has
// come back by then.
class StuckExchanges {
 public:
  explicit StuckExchanges(Context&) {}
  ~StuckExchanges() {
    for (OverLinks* const x : all_) delete x;
  }
  StuckExchanges(const StuckExchanges&) = delete;
  StuckExchanges& operator=(const StuckExchanges&) = delete;
  void add(OverLinks* x) {
    const std::lock_guard lock(mutex_);
    all_.push_back(x);
  }

 private:
  std::mutex mutex_;
  std::vector<OverLinks*> all_;
};

}  // namespace

OverLinks::OverLinks(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields,
                     Stream stream)
    : Exchange(std::move(plan), program, fields, stream),
      links_(plan_->links.get()),
      outs_(program_->to.size()),
      ins_(program_->from.size()),
      left_(outs_.size() + ins_.size() + (program_->adjoint ? 1 : 0)) {
  links_->check_group();
  bool added = false;
  try {
    {
      const Links::Owning owning(*links_, links_->deadline(), true);
      if (!owning) {
        links_->check_group();
        links_->raise_stuck(*this);
      }
      for (std::size_t i = 0; i < outs_.size(); ++i) {
        outs_[i].end = &links_->to(program_->to[i].rank);
        outs_[i].ticket = outs_[i].end->tickets++;
      }
      for (std::size_t i = 0; i < ins_.size(); ++i) {
        ins_[i].end = &links_->from(program_->from[i].rank);
        ins_[i].ticket = ins_[i].end->tickets++;
      }
      links_->add(*this);
      added = true;
      for (std::size_t i = 0; i < outs_.size(); ++i) send(outs_[i], program_->to[i]);
      links_->tell();
    }
    links_->send_due();
    if (program_->adjoint) return;
    copy_own();  // it is in flight meanwhile, even where it has nothing to receive: so its memory is not moved
    fill();
  } catch (...) {
    if (!added) throw;
    broke(std::current_exception());
    give_up();
    throw;
  }
}

// False: it cannot be destroyed.
bool OverLinks::end() noexcept {
  if (plan_->mesh.context().forked()) return true;  // it is the parent's: its links are not mapped here
  if (!given_up_ && !over_) {
    const bool over = [&] {
      const Links::Owning owning(*links_);
      if (owning && complete()) links_->remove(*this);
      return owning && complete();
    }();
    if (!over) {
      links_->fail_dropped(dropped());
      give_up();
    }
  }
  links_->send_due();
  return !abandoned.load(std::memory_order_relaxed) || links_->take_back(*this);
}

OverLinks::~OverLinks() {
  if (came_ && !plan_->mesh.context().forked()) keep(std::move(*came_));
}

void OverLinks::operator delete(OverLinks* x, std::destroying_delete_t) {
  if (!x->end()) {
    if (std::exchange(x->kept_, true)) return;  // the Context ends, and that thread is still stuck
    try {
      x->plan_->mesh.context().attached<StuckExchanges>().add(x);
    } catch (...) {  // out of memory: it stays for ever
    }
    return;
  }
  x->~OverLinks();
  ::operator delete(x);
}

bool OverLinks::done() try {
  plan_->mesh.context().check_fork(name());
  try {
    const Links::State state = links_->ask(*this);
    if ((over_ = state == Links::State::complete)) return true;
    if (state == Links::State::in_flight) {
      const auto now = Clock::now();  // and no Deadline: done() is not a wait, which an Interrupt ends
      if (!asked_since_) asked_since_ = now;
      const Duration waited = now - *asked_since_ - suspended_since(*asked_since_);
      const bool ends = WEFT_MUTANT("interrupt_ends_done") &&
                        (Deadline::after(std::chrono::hours(1)).passed() || interrupted());
      if (waited < links_->deadline() && !ends) return false;
      if ((over_ = links_->finish(*this, true))) return true;
    }
  } catch (...) {
    give_up();
    if (!broken()) throw;
  }
  raise();
} catch (const Error& e) {
  throw_it(e);
}

void OverLinks::finish() try {
  plan_->mesh.context().check_fork(name());
  try {
    if ((over_ = links_->finish(*this))) return;
  } catch (...) {
    give_up();
    if (!broken()) throw;
  }
  raise();
} catch (const Error& e) {
  throw_it(e);
}

bool OverLinks::step() {
  if (left_ == 0) return false;
  bool moved = false;
  for (std::size_t i = 0; i < outs_.size(); ++i)
    if (outs_[i].phase != Phase::done && send(outs_[i], program_->to[i])) moved = true;
  for (std::size_t i = 0; i < ins_.size(); ++i)
    if (ins_[i].phase < Phase::there && receive(ins_[i], program_->from[i])) moved = true;
  if (program_->adjoint && !added_ && there_ == ins_.size()) {
    add_all();
    moved = true;
  }
  return moved;
}

OverLinks::Wish OverLinks::wish() const {
  for (std::size_t i = 0; i < ins_.size(); ++i)
    if (ins_[i].phase < Phase::there) return {ins_[i].end->rank, true, ins_[i].end->next + 1};
  for (std::size_t i = 0; i < outs_.size(); ++i) {
    const Out& o = outs_[i];
    if (o.phase == Phase::awaiting) return {o.end->rank, false, o.until};
    if (o.phase != Phase::done) return {o.end->rank, false, o.end->next + 1 - kSlots};
  }
  return {plan_->me, true, 1};  // not reached: something is left
}

void OverLinks::append_awaited(std::vector<int>& ranks) const {
  for (std::size_t i = 0; i < ins_.size(); ++i)
    if (ins_[i].phase < Phase::there) ranks.push_back(ins_[i].end->rank);
  for (std::size_t i = 0; i < outs_.size(); ++i)
    if (outs_[i].phase != Phase::done) ranks.push_back(outs_[i].end->rank);
}

bool OverLinks::touches(const std::byte* begin, const std::byte* end) const noexcept {
  const auto meets = [&](const std::byte* data, std::int64_t low, std::int64_t high) {
    return low != high && data + low < end && begin < data + high;
  };
  for (std::size_t f = 0; f < program_->forms.size(); ++f) {
    const Form& form = program_->forms[f];
    const Pair& p = pair(f);
    if (meets(p.part, form.part_low, form.part_high) || meets(p.window, form.window_low, form.window_high))
      return true;
  }
  return false;
}

// The group fails, for all ranks to know, but where a rank has given up: that one has failed it, and knows why.
void OverLinks::broke(std::exception_ptr why) noexcept {
  why_ = why;
  try {
    std::rethrow_exception(std::move(why));
  } catch (const Revoked&) {
  } catch (const Error& e) {
    links_->fail(
        {.code = e.code(), .text = named(name(), e.what()), .ranks = {e.ranks().begin(), e.ranks().end()}});
  } catch (const std::exception& e) {
    links_->fail({.code = ErrorCode::system, .text = named(name(), e.what()), .ranks = {}});
  }
}

bool OverLinks::broken() const noexcept {
  const Links::Owning owning(*links_, Duration::zero());
  return owning && why_ != nullptr;
}

void OverLinks::give_up() noexcept {
  given_up_ = true;
  leave();
  links_->give_up(*this);
}

// A thread that is stuck in a step of it may still write to its fields.
void OverLinks::throw_it(const Error& e) const {
  if (abandoned.load(std::memory_order_relaxed)) throw_with_text(e, named_once(plan_->name, e), false);
  throw_named(plan_->name, e);
}

// Why it has failed.
void OverLinks::raise() {
  if (!given_up_) give_up();
  if (abandoned.load(std::memory_order_relaxed) || !why_) links_->check_group();  // it has ended
  if (!why_) throw Error(ErrorCode::aborted, "this exchange was given up");
  try {
    std::rethrow_exception(why_);
  } catch (const Revoked& r) {
    links_->raise_revoked(r.rank, name());
  }
}

std::unique_ptr<WindowTransfer::Steps> over_links(std::shared_ptr<const Window::Plan> plan,
                                                  const Window::Plan::Program& program, const Judged& fields,
                                                  Stream stream) {
  return std::make_unique<OverLinks>(std::move(plan), program, fields, stream);
}

}  // namespace weft::windows
