// Several windows as one exchange.
#include <fmt/format.h>

#include <memory>

#include "group/persistent/prepared_exchange.hpp"
#include "host/strided/overlap.hpp"
#include "mesh/window/joined.hpp"
#include "mesh/window_errors.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using windows::Exchange;
using windows::Known;
using windows::refuse;

// Adds the exchange of one window to that of all.
void append(ExchangePlan& all, const ExchangePlan& one) {
  const int base = static_cast<int>(all.fields.size());
  all.fields.insert(all.fields.end(), one.fields.begin(), one.fields.end());
  const auto add = [&](std::vector<ExchangePart>& to, const std::vector<ExchangePart>& parts) {
    for (const ExchangePart& part : parts) {
      auto peer = std::ranges::find(to, part.peer, &ExchangePart::peer);
      if (peer == to.end()) peer = to.insert(to.end(), ExchangePart{part.peer, {}});
      for (ExchangeBox box : part.boxes) {
        box.field += base;
        peer->boxes.push_back(std::move(box));
      }
    }
  };
  add(all.sends, one.sends);
  add(all.receives, one.receives);
}

Window::Plan::Joined& join(std::span<const std::shared_ptr<Window::Plan>> plans,
                           std::span<const Known> known) {
  const Window::Plan& first = *plans[0];
  for (const auto& j : first.joined)
    if (std::ranges::equal(j->programs, known, {}, {}, [](const Known& k) { return k.program->id; }))
      return *j;
  auto made = std::make_unique<Window::Plan::Joined>();
  ExchangePlan all;
  all.name = first.name;
  for (const Known& k : known) {
    made->programs.push_back(k.program->id);
    append(all, k.program->plan);
  }
  if (first.group != nullptr) made->exchange = detail::PreparedExchange::make_sound(*first.group, all);
  constexpr std::size_t kMost = 4;
  if (first.joined.size() >= kMost) first.joined.erase(first.joined.begin());  // what is in flight goes on
  first.joined.push_back(std::move(made));
  return *first.joined.back();
}

class OfSeveral final : public windows::Flight {
 public:
  OfSeveral(std::span<const std::shared_ptr<Window::Plan>> plans, std::span<const Known> known,
            Window::Plan::Joined& joined, Stream stream)
      : Flight(*plans[0]) {
    for (std::size_t i = 0; i < plans.size(); ++i)
      exchanges_.push_back(std::make_unique<Exchange>(plans[i], *known[i].program, *known[i].fields, stream));
    if (joined.exchange) set_work(joined.exchange.start(joined.memory, {.stream = stream}));
    for (std::size_t i = 0; i < plans.size(); ++i) {
      if (!joined.exchange) exchanges_[i]->move_own(known[i].fields->memory());
      exchanges_[i]->fill();
    }
  }
  OfSeveral(const OfSeveral&) = delete;
  OfSeveral& operator=(const OfSeveral&) = delete;
  ~OfSeveral() override { drop(); }

 private:
  void leave() const noexcept override {
    for (const auto& x : exchanges_) x->leave();
  }
  std::vector<std::unique_ptr<Exchange>> exchanges_{};
};

// Throws if fields of two windows share memory that is written.
void expect_apart(std::span<const WindowFields> list, const char* name) {
  for (std::size_t i = 1; i < list.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      for (const WindowField& a : list[i].fields)
        for (const WindowField& b : list[j].fields)
          if (share_memory(a.out, b.out) || share_memory(a.in, b.out) || share_memory(b.in, a.out))
            throw Error(ErrorCode::bad_argument,
                        fmt::format("{}: fields of {} {} and of {} {} overlap; expected disjoint memory",
                                    name, name, j, name, i));
}

// Throws if windows are not cut over the same axes, or one is given twice.
void check_together(std::span<const std::shared_ptr<Window::Plan>> plans) {
  const Window::Plan& first = *plans[0];
  const auto axes_of = [](const Window::Plan& plan) { return plan.axes ? plan.axes.name() : "no axis"; };
  for (std::size_t i = 1; i < plans.size(); ++i) {
    const Window::Plan& plan = *plans[i];
    if (!(plan.mesh == first.mesh) || axes_of(plan) != axes_of(first))
      refuse(first, fmt::format("{} {} is cut over {}; expected {} of the same mesh, as {} 0", first.name, i,
                                axes_of(plan), axes_of(first), first.name));
    for (std::size_t j = 0; j < i; ++j)
      if (plans[j] == plans[i])
        refuse(first, fmt::format("{} {} is {} {}; expected each once", first.name, i, first.name, j));
  }
}

}  // namespace

WindowTransfer start_together(std::span<const WindowFields> list, Stream stream) {
  if (list.empty()) return {};
  std::vector<std::shared_ptr<Window::Plan>> plans;
  for (const WindowFields& w : list) plans.push_back(w.window.plan_);
  Window::Plan& first = *plans[0];
  try {
    if (!windows::is_alone(first)) first.mesh.context().check_fork(first.name);
    check_together(plans);
    for (const WindowFields& w : list) stream = windows::stream_for(stream, w.fields);
    std::vector<Known> known;
    for (std::size_t i = 0; i < plans.size(); ++i)
      known.push_back(
          windows::prepare(list[i].window, *plans[i], list[i].fields, stream, windows::Way::fetch));
    Window::Plan::Joined& joined = join(plans, known);
    if (!joined.is_apart(known)) {
      expect_apart(list, first.name);
      joined.set_apart(known);
    }
    return WindowTransfer(std::make_unique<OfSeveral>(plans, known, joined, stream));
  } catch (const Error& e) {
    windows::throw_named(first.name, e);
  }
}

}  // namespace weft
