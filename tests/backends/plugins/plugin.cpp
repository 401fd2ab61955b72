// One small plug-in, compiled several times with one thing changed in each.
#include <cstddef>
#include <cstdlib>
#include <stdexcept>

#include "backends/plugins/forwarding_backend.hpp"
#include "backends/shm/shm_backend.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"

#ifdef HAS_ENTRY
namespace {
[[maybe_unused]] std::string full_moon() { return "the moon is full"; }

[[maybe_unused]] void throw_number(weft::BackendPlugin&) { throw 42; }
[[maybe_unused]] std::string throwing_obstacle() { throw std::runtime_error("no moon"); }
[[maybe_unused]] weft::Traits throwing_traits() { throw std::runtime_error(""); }

// Only the fields of version 6.0. Such a plug-in does not have the others, so weft must not touch them.
class Older final : public weft::Backend {
 public:
  explicit Older(std::unique_ptr<weft::Backend> inner) : inner_(std::move(inner)) {}
  const weft::Traits& traits() const noexcept override { return inner_->traits(); }
  void post(weft::OpState& s) noexcept override { inner_->post(s); }
  weft::Step poll(weft::OpState& s) noexcept override { return inner_->poll(s); }
  bool healthy() noexcept override { return inner_->healthy(); }
  std::vector<int> missing(const weft::OpState& s, std::string& story) noexcept override {
    return inner_->missing(s, story);
  }
  void fail(const weft::Failure& why) noexcept override { inner_->fail(why); }
  weft::Failure failure() const override { return inner_->failure(); }
  bool quiet() const noexcept override { return inner_->quiet(); }
  bool quiesce(weft::Deadline deadline, std::span<const weft::MemoryRange> exposed) noexcept override {
    return inner_->quiesce(deadline, exposed);
  }
  void announce_sleep(bool asleep) noexcept override { inner_->announce_sleep(asleep); }
  std::vector<int> gone() const noexcept override { return {7}; }
  bool ask(const weft::OpState&) noexcept override { std::abort(); }
  void answer() noexcept override { std::abort(); }
  std::optional<weft::MessageInfo> probe(int, int) noexcept override { std::abort(); }

 private:
  std::unique_ptr<weft::Backend> inner_;
};

[[maybe_unused]] void to_older_minor(weft::BackendPlugin& p) {
  p.abi_minor = 0;
  p.bytes = offsetof(weft::BackendPlugin, obstacle);
  p.obstacle = [] { return std::string("this is beyond the end of the plug-in's struct"); };
  p.make = [](const weft::GroupInit& b) -> std::unique_ptr<weft::Backend> {
    return std::make_unique<Older>(weft::make_shm_backend(b));
  };
}

// Version 6.1: all functions, and none of the operations that came later.
weft::Traits traits_of_minor_one() {
  weft::Traits t = *weft::known_traits("shm");
  t.ops &= weft::op_bit(weft::Op::scan) - 1;
  return t;
}
class MinorOne final : public weft::ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;
  const weft::Traits& traits() const noexcept override { return traits_; }
  void post(weft::OpState& s) noexcept override {
    if (weft::is_scan(s.op)) std::abort();
    ForwardingBackend::post(s);
  }
  bool ask(const weft::OpState&) noexcept override { return false; }

 private:
  const weft::Traits traits_ = traits_of_minor_one();
};
[[maybe_unused]] void to_minor_one(weft::BackendPlugin& p) {
  p.abi_minor = 1;
  p.bytes = offsetof(weft::BackendPlugin, linked_to);
  p.linked_to = "this is beyond the end of the plug-in's struct";
  p.traits = traits_of_minor_one;
  p.make = [](const weft::GroupInit& b) -> std::unique_ptr<weft::Backend> {
    return std::make_unique<MinorOne>(weft::make_shm_backend(b));
  };
}

[[maybe_unused]] void to_make_null(weft::BackendPlugin& p) {
  p.make = [](const weft::GroupInit&) { return std::unique_ptr<weft::Backend>(); };
}

// It guarantees more before there is a group than its group does.
[[maybe_unused]] void to_promise(weft::BackendPlugin& p) {
  p.traits = [] {
    weft::Traits traits = *weft::known_traits("shm");
    traits.guarantees.quiesces = !traits.guarantees.quiesces;
    return traits;
  };
}

// Its group is on several hosts, for example, if it does not see deaths.
[[maybe_unused]] void to_detect_fewer_deaths(weft::BackendPlugin& p) {
  class Blind final : public weft::ForwardingBackend {
   public:
    explicit Blind(std::unique_ptr<weft::Backend> inner)
        : ForwardingBackend(std::move(inner)), traits_(ForwardingBackend::traits()) {
      traits_.guarantees.detects_death = false;
    }
    const weft::Traits& traits() const noexcept override { return traits_; }

   private:
    weft::Traits traits_;
  };
  p.make = [](const weft::GroupInit& b) -> std::unique_ptr<weft::Backend> {
    return std::make_unique<Blind>(weft::make_shm_backend(b));
  };
}

[[maybe_unused]] void to_newer_minor(weft::BackendPlugin& p) {
  p.abi_minor = weft::kBackendAbiMinor + 1;
  p.bytes += 8;
}
}  // namespace

WEFT_BACKEND_PLUGIN {
  static const weft::BackendPlugin plugin = [] {
    weft::BackendPlugin p;
    p.name = NAME;
    p.version = "test";
    p.make = weft::make_shm_backend;
    p.traits = [] { return *weft::known_traits("shm"); };
    CHANGE;
    return p;
  }();
  return &plugin;
}
#endif
