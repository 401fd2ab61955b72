// A module's two passes, and what is attached to them: boundaries, hooks, and scopes around a pass.
#include <fmt/format.h>

#include <algorithm>

#include "nn/state_hashes.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/module.hpp"

namespace weft {
namespace {

// Enters the scopes around a pass, and leaves them, in reverse order, however the pass ends.
class Scopes {
 public:
  Scopes(std::vector<Module::Around> all, Module& module, Frame& frame)
      : all_(std::move(all)), module_(module), frame_(frame) {
    try {
      for (const Module::Around& around : all_) {
        if (around.enter) around.enter(module_, frame_);
        ++entered_;
      }
    } catch (...) {
      leave_quietly();
      throw;
    }
  }
  Scopes(const Scopes&) = delete;
  Scopes& operator=(const Scopes&) = delete;
  ~Scopes() { leave_quietly(); }
  bool any() const noexcept { return !all_.empty(); }
  /// Call it at the end of a pass that did not throw. It rethrows an error of leave() after all other scopes
  /// were left, too.
  void leave() {
    while (entered_ > 0)
      if (const auto& last = all_[--entered_].leave) last(module_, frame_);
  }

 private:
  void leave_quietly() noexcept {
    while (entered_ > 0) try {
        leave();
      } catch (...) {  // the error that ended the pass is reported
      }
  }
  const std::vector<Module::Around> all_;
  Module& module_;
  Frame& frame_;
  std::size_t entered_ = 0;
};

enum class Direction : unsigned char { forward, backward };

// Moves the tensors for which this boundary exists across it. All transfers begin before the first one is
// finished. Throws bad_argument if there is no such tensor. Otherwise the pass would continue without the
// boundary.
void cross(const Module::PlacedBoundary& placed, Direction direction, const TensorName& what,
           Tensors& tensors) {
  std::vector<std::pair<Tensor*, Transfer>> under_way;
  int index = 0;  // among the floating-point tensors
  for (Tensor& t : tensors) {
    if (!is_floating(t.dtype())) continue;
    if (placed.index == Module::kEvery || placed.index == index)
      under_way.emplace_back(&t, direction == Direction::forward ? placed.boundary->start_forward(t, what)
                                                                 : placed.boundary->start_backward(t, what));
    ++index;
  }
  if (placed.index >= index)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: a boundary is for number {} of the floating-point tensors; there are {}",
                            what.text(), placed.index, index));
  for (auto& [tensor, transfer] : under_way) *tensor = transfer.finish();
}

}  // namespace

struct Module::Hooks {
  struct Numbered {
    int id;
    HookPoint point;
    Hook hook;
  };
  struct NumberedAround {
    int id;
    bool backward;
    Around around;
  };
  std::vector<Numbered> hooks;  // by rising id
  std::vector<NumberedAround> around;
  int next = 0;

  void remove(int id) {
    std::erase_if(hooks, [id](const Numbered& h) { return h.id == id; });
    std::erase_if(around, [id](const NumberedAround& a) { return a.id == id; });
  }
  // The first hook of that point behind `id`. Null if there is none.
  const Numbered* after(int id, HookPoint point) const {
    for (const Numbered& h : hooks)
      if (h.id > id && h.point == point) return &h;
    return nullptr;
  }
};

namespace {

// The handle that removes a hook. By then the module may have moved, or been destroyed.
template <class Hooks>
HookHandle handle_of(const std::shared_ptr<Hooks>& hooks, int id) {
  return HookHandle([weak = std::weak_ptr(hooks), id] {
    if (const auto alive = weak.lock()) alive->remove(id);
  });
}

}  // namespace

HookHandle Module::add_hook(HookPoint point, Hook hook) {
  if (hook == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": add_hook: hook is empty; expected a function", path_));
  if (hooks_ == nullptr) hooks_ = std::make_shared<Hooks>();
  hooks_->hooks.push_back({hooks_->next, point, std::move(hook)});
  return handle_of(hooks_, hooks_->next++);
}

HookHandle Module::add_around(bool backward, Around around) {
  if (hooks_ == nullptr) hooks_ = std::make_shared<Hooks>();
  hooks_->around.push_back({hooks_->next, backward, std::move(around)});
  return handle_of(hooks_, hooks_->next++);
}
HookHandle Module::around_forward(Around around) { return add_around(false, std::move(around)); }
HookHandle Module::around_backward(Around around) { return add_around(true, std::move(around)); }

void Module::run(HookPoint point, Tensors& tensors, Frame& frame) {
  if (hooks_ == nullptr) return;
  const std::shared_ptr<Hooks> hooks = hooks_;
  int done = -1;
  // A hook may add another hook, or remove any.
  while (const Hooks::Numbered* const next = hooks->after(done, point)) {
    done = next->id;
    const Hook hook = next->hook;
    hook(*this, tensors, frame);
  }
}

std::vector<Module::Around> Module::around(bool backward) const {
  std::vector<Around> list;
  if (hooks_ != nullptr)
    for (const Hooks::NumberedAround& a : hooks_->around)
      if (a.backward == backward) list.push_back(a.around);
  return list;
}

Tensors Passes::own_forward(Module& module, Inputs x, Frame& frame) { return module.do_forward(x, frame); }
Tensors Passes::own_backward(Module& module, Inputs dy, Frame& frame) {
  return module.do_backward(dy, frame);
}

Tensors Module::forward(Inputs x, Frame& frame) {
  // A Frame that keeps nothing in a training pass is that of a module that runs again.
  if (recompute_ && (frame.recomputing() || (!frame.keeps() && frame.pass().training)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("activation checkpointing: \"{}\" runs again by itself, and inside a module that "
                            "runs again as a whole; expected one of them (one apply_ac() of the root)",
                            path_));
  Scopes scopes(around(false), *this, frame);
  Tensors out;
  if (recompute_ && frame.keeps()) {
    Frame::Checkpoint checkpoint(frame, *this, Tensors(x.begin(), x.end()), recompute_->compare_outputs);
    out = run_forward(x, frame);
    checkpoint.keep();
  } else {
    out = run_forward(x, frame);
  }
  scopes.leave();
  return out;
}

// The pass inside the scopes around it.
Tensors Module::run_forward(Inputs x, Frame& frame) {
  Tensors in(x.begin(), x.end());
  run(HookPoint::pre_forward, in, frame);
  for (const PlacedBoundary& placed : before_) cross(placed, Direction::forward, {path_, "x"}, in);
  expect_here("input", in, frame);
  Tensors out = passes_ ? passes_->forward(*this, in, frame) : do_forward(in, frame);
  for (const PlacedBoundary& placed : after_) cross(placed, Direction::forward, {path_, "y"}, out);
  finish_forward(out, frame);
  for (const auto& [name, parameter] : own_) frame.count_use(*parameter);
  run(HookPoint::post_forward, out, frame);
  frame.note_outputs(*this, out);
  return out;
}

Tensors Module::backward(Inputs dy, Frame& frame) {
  const Frame::Nested nested(frame);
  Scopes scopes(around(true), *this, frame);
  Tensors out;
  if (frame.has_checkpoint(*this)) {
    Tensors x;
    Frame scratch = frame.pop_checkpoint(x);
    run_again(x, scratch);
    x.clear();  // the scratch Frame has what backward needs
    out = run_backward(dy, scratch, scopes.any());
  } else {
    out = run_backward(dy, frame, scopes.any());
  }
  scopes.leave();
  if (nested.outermost()) run(HookPoint::end_of_backward, out, frame);
  return out;
}

// The second forward pass of a module that kept only its inputs.
void Module::run_again(const Tensors& x, Frame& scratch) {
  const bool checks = recompute_ && recompute_->check_state;
  Context& context = scratch.compute().context();
  const std::vector<std::pair<std::string, std::uint64_t>> before =
      checks ? hashes_of_state(context, *this) : std::vector<std::pair<std::string, std::uint64_t>>();
  run_forward(x, scratch);
  scratch.end_recomputing();
  if (!checks) return;
  const auto after = hashes_of_state(context, *this);
  for (std::size_t i = 0; i < after.size(); ++i)
    if (after[i] != before[i])
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("activation checkpointing: \"{}\" changed while the forward of \"{}\" ran again; "
                      "a module that changes state does so in Frame::once()",
                      after[i].first, path_));
}

// The pass inside the scopes around it. `in_scope`: there are some, so all work that was left over is done.
Tensors Module::run_backward(Inputs dy, Frame& frame, bool in_scope) {
  Tensors in(dy.begin(), dy.end());
  run(HookPoint::pre_backward, in, frame);
  expect_here("gradient", in, frame);
  begin_backward(in, frame);
  for (auto placed = after_.rbegin(); placed != after_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dy"}, in);
  expect_here("gradient", in, frame);
  Tensors out = passes_ ? passes_->backward(*this, in, frame) : do_backward(in, frame);
  for (const auto& [name, parameter] : own_)
    if (frame.drop_use(*parameter)) frame.later([p = parameter](Frame&) { p->announce_final(); });
  if (in_scope) frame.run_left_over();
  for (auto placed = before_.rbegin(); placed != before_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dx"}, out);
  run(HookPoint::post_backward, out, frame);
  return out;
}

Tensors Module::backward(Inputs dy, Frame& frame, LeftOver& left_over) {
  const Frame::Leaving leaving(frame, left_over);
  return backward(dy, frame);
}

void Module::add_before(BoundaryRef boundary, int input) {
  expect_boundary("add_before", boundary, input);
  before_.push_back({std::move(boundary), input});
}
void Module::add_after(BoundaryRef boundary, int output) {
  expect_boundary("add_after", boundary, output);
  after_.push_back({std::move(boundary), output});
}
void Module::expect_boundary(std::string_view call, const BoundaryRef& boundary, int index) const {
  if (boundary == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": {}: boundary is null; expected one", path_, call));
  if (index < kEvery)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("module \"{}\": {} of number {}; expected 0 or more, or kEvery", path_, call, index));
}

void Module::finish_forward(Tensors&, Frame&) {}
void Module::begin_backward(Inputs, Frame&) {}

void Module::expect_count(Inputs x, std::size_t count, const char* what) const {
  if (x.size() != count)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": got {} {}; expected {}", path_, x.size(), what, count));
}

// A layer computes on its Frame's device and stream, so its parameters and tensors must be on that device.
void Module::expect_here(const char* what, Inputs x, const Frame& frame) const {
  const Stream stream = frame.compute().stream();
  const auto expect = [&](const Tensor& t, const auto& name) {
    if (!t && t.count() > 0)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("\"{}\": {} has no memory: it is empty or was moved from", path_, name()));
    if (t.stream() != stream)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("\"{}\": {} {}", path_, name(), elsewhere_text(t, stream, "the Frame")));
  };
  for (std::size_t i = 0; i < x.size(); ++i) expect(x[i], [&] { return fmt::format("{} {}", what, i); });
  for (const auto& [name, parameter] : own_) {
    if (!parameter->materialised()) continue;
    expect(parameter->master_, [&name = name] { return name; });
    if (!parameter->has_values_)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("parameter \"{}\" has no values: initialise() the model or load a checkpoint "
                              "first; code that writes master() itself must call write_master()",
                              parameter->path()));
  }
  for (const auto& [name, buffer] : own_buffers_)
    if (buffer->materialised()) expect(buffer->tensor_, [&name = name] { return name; });
}

}  // namespace weft
