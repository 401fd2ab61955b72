#include "support/recording_backend.hpp"

#include <gtest/gtest.h>

#include "weft/backends/plugin.hpp"

namespace weft::test {
namespace {

// A call's state, in the scratch of its slot.
struct State {
  Fate::Kind kind;
  int polls;     // left
  int let_go;    // let_go() calls before it was posted
  Failure* why;  // of one that fails
};
static_assert(sizeof(State) <= sizeof(OpState::scratch));

State& state(OpState& s) { return *reinterpret_cast<State*>(s.scratch.data()); }

}  // namespace

class Recording::RecordingBackend final : public Backend {
 public:
  explicit RecordingBackend(Recording& r) : r_(r) {
    traits_ = *known_traits("shm");  // everything
    traits_.name = "recording";
    traits_.spin = false;
    traits_.device = r.device_;
    traits_.ops &= ~r.lacked_;
  }
  ~RecordingBackend() override {
    const std::lock_guard lock(r_.mutex_);
    ++r_.destroyed_;
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    s.scratch = {};
    r_.posted_.push_back(s);
    Fate fate = r_.fate_(s);
    Failure* why = nullptr;
    if (fate.kind == Fate::fail) {
      causes_.push_back(std::make_unique<Failure>(std::move(fate.why)));
      why = causes_.back().get();
    }
    state(s) = {fate.kind, fate.polls, r_.let_go_, why};
  }

  Step poll(OpState& s) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    ++r_.polls_;
    State& st = state(s);
    if (st.kind == Fate::never) return st.let_go < r_.let_go_ ? Step::done : Step::pending;
    if (st.polls-- > 0) return Step::pending;
    if (st.kind == Fate::finish) return Step::done;
    if (!cause()) first_cause_ = std::make_unique<Failure>(*st.why);
    return Step::failed;
  }

  bool healthy() noexcept override {
    const std::lock_guard lock(r_.mutex_);
    return cause() == nullptr;
  }

  std::vector<int> missing(const OpState&, std::string& story) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    story = r_.story_;
    return r_.missing_;
  }

  void fail(const Failure& why) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    r_.failed_.push_back(why);
    if (!cause()) first_cause_ = std::make_unique<Failure>(why);
  }

  Failure failure() const override {
    const std::lock_guard lock(r_.mutex_);
    return *cause();
  }

  bool quiet() const noexcept override {
    const std::lock_guard lock(r_.mutex_);
    return r_.quiet_;
  }

  std::unique_ptr<PlannedExchange> plan_exchange(const ExchangePlan&) override {
    return std::make_unique<PlannedExchange>();
  }

  void batch(bool begin) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    EXPECT_EQ(begin, r_.batches_.size() % 2 == 0) << "begin and end come in turn";
    r_.batches_.push_back(r_.posted_.size());
  }

  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override {
    const std::lock_guard lock(r_.mutex_);
    r_.quiesces_ += deadline.passed() ? 0 : 1;
    r_.exposed_.assign(exposed.begin(), exposed.end());
    return r_.quiet_;
  }

  void announce_sleep(bool asleep) noexcept override {
    std::function<void()> hook;
    {
      const std::lock_guard lock(r_.mutex_);
      if (asleep) hook = r_.on_sleep_;
    }
    if (hook) hook();
  }

 private:
  // The reason why this group, or every group, has failed; null: it has not. Under the lock.
  const Failure* cause() const { return first_cause_ ? first_cause_.get() : r_.lost_.get(); }

  Recording& r_;
  Traits traits_;
  std::unique_ptr<Failure> first_cause_;
  std::vector<std::unique_ptr<Failure>> causes_;
};

BackendFactory Recording::factory() {
  return [this](const GroupInit& b) -> std::unique_ptr<Backend> {
    {
      const std::lock_guard lock(mutex_);
      made_.push_back({b.token, b.name, b.rank, b.size, b.process_rank});
    }
    return std::make_unique<RecordingBackend>(*this);
  };
}

void Recording::decide(std::function<Fate(const OpState&)> fate) {
  const std::lock_guard lock(mutex_);
  fate_ = std::move(fate);
}

void Recording::decide(const Fate& fate) {
  decide([fate](const OpState&) { return fate; });
}

void Recording::let_go() {
  const std::lock_guard lock(mutex_);
  ++let_go_;
}

void Recording::on_sleep(std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  on_sleep_ = std::move(hook);
}

void Recording::miss(std::vector<int> ranks, std::string story) {
  const std::lock_guard lock(mutex_);
  missing_ = std::move(ranks);
  story_ = std::move(story);
}

void Recording::lose(const Failure& why) {
  const std::lock_guard lock(mutex_);
  if (!lost_) lost_ = std::make_unique<Failure>(why);
}

void Recording::move_device_memory() {
  const std::lock_guard lock(mutex_);
  device_ = true;
}
void Recording::lack(OpSet ops) {
  const std::lock_guard lock(mutex_);
  lacked_ = ops;
}

void Recording::set_quiet(bool quiet) {
  const std::lock_guard lock(mutex_);
  quiet_ = quiet;
}

std::vector<OpState> Recording::posted() const {
  const std::lock_guard lock(mutex_);
  return posted_;
}

std::vector<Recording::Made> Recording::made() const {
  const std::lock_guard lock(mutex_);
  return made_;
}

std::vector<Failure> Recording::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

std::vector<MemoryRange> Recording::exposed() const {
  const std::lock_guard lock(mutex_);
  return exposed_;
}

std::vector<std::size_t> Recording::batches() const {
  const std::lock_guard lock(mutex_);
  return batches_;
}

int Recording::quiesces() const {
  const std::lock_guard lock(mutex_);
  return quiesces_;
}

int Recording::polls() const {
  const std::lock_guard lock(mutex_);
  return polls_;
}

int Recording::destroyed() const {
  const std::lock_guard lock(mutex_);
  return destroyed_;
}

}  // namespace weft::test
