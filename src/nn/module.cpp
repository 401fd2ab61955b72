#include "weft/nn/module.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// Enters what runs around a pass, and leaves it, in reverse order, however the pass ends.
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
  /// The end of a pass that did not throw: an error of leave() goes on, after the others were left, too.
  void leave() {
    while (entered_ > 0)
      if (const auto& last = all_[--entered_].leave) last(module_, frame_);
  }

 private:
  void leave_quietly() noexcept {
    while (entered_ > 0) try {
        leave();
      } catch (...) {  // the error that ended the pass is the one to tell
      }
  }
  const std::vector<Module::Around> all_;
  Module& module_;
  Frame& frame_;
  std::size_t entered_ = 0;
};

enum class Direction : unsigned char { forward, backward };

// Moves the tensors that this boundary is for across it. All transfers are begun before the first is finished. Throws
// bad_argument where there is no such tensor: without the boundary it would go on as it is.
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

std::string joined(const std::string& path, std::string_view name) {
  return path.empty() ? std::string(name) : fmt::format("{}.{}", path, name);
}

std::string child_names(const Module& module) {
  std::vector<std::string_view> names;
  for (const auto& [name, child] : module.children()) names.push_back(name);
  return names.empty() ? "no children" : fmt::format("{}", fmt::join(names, ", "));
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
  // The first hook of that point behind `id`; null: none.
  const Numbered* after(int id, HookPoint point) const {
    for (const Numbered& h : hooks)
      if (h.id > id && h.point == point) return &h;
    return nullptr;
  }
};

namespace {

// The handle that removes a hook. The module may have moved, or ended, by then.
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
  while (const Hooks::Numbered* const next =
             hooks->after(done, point)) {  // a hook may add one, or take any away
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

ShardRule Module::shard_rule(Split split) const {
  ShardRule rule;
  rule.refused = split == Split::column ? "cannot be split by columns" : "cannot be split by rows";
  return rule;
}

SpaceRule Module::space_rule(const DeviceMesh&, std::span<const int>) const { return {}; }

Tensors Passes::own_forward(Module& module, Inputs x, Frame& frame) { return module.do_forward(x, frame); }
Tensors Passes::own_backward(Module& module, Inputs dy, Frame& frame) {
  return module.do_backward(dy, frame);
}

Tensors Module::forward(Inputs x, Frame& frame) {
  Scopes scopes(around(false), *this, frame);
  Tensors in(x.begin(), x.end());
  run(HookPoint::pre_forward, in, frame);
  for (const PlacedBoundary& placed : before_) cross(placed, Direction::forward, {path_, "x"}, in);
  expect_here("input", in, frame);
  Tensors out = passes_ ? passes_->forward(*this, in, frame) : do_forward(in, frame);
  for (const PlacedBoundary& placed : after_) cross(placed, Direction::forward, {path_, "y"}, out);
  finish_forward(out, frame);
  for (const auto& [name, parameter] : own_) frame.count_use(*parameter);
  run(HookPoint::post_forward, out, frame);
  scopes.leave();
  return out;
}

Tensors Module::backward(Inputs dy, Frame& frame) {
  const Frame::Nested nested(frame);
  Scopes scopes(around(true), *this, frame);
  Tensors in(dy.begin(), dy.end());
  run(HookPoint::pre_backward, in, frame);
  expect_here("gradient", in, frame);
  begin_backward(in, frame);
  for (auto placed = after_.rbegin(); placed != after_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dy"}, in);
  expect_here("gradient", in, frame);
  Tensors out = passes_ ? passes_->backward(*this, in, frame) : do_backward(in, frame);
  for (const auto& [name, parameter] : own_)
    if (frame.drop_use(*parameter)) parameter->announce_final();
  for (auto placed = before_.rbegin(); placed != before_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dx"}, out);
  run(HookPoint::post_backward, out, frame);
  scopes.leave();
  if (nested.outermost()) run(HookPoint::end_of_backward, out, frame);
  return out;
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

void Module::add(std::string name, Module& child) {
  const bool taken =
      std::any_of(children_.begin(), children_.end(), [&](const Child& c) { return c.first == name; });
  bool circle = false;
  for (const Module* up = this; up != nullptr; up = up->parent_) circle |= up == &child;
  if (name.empty() || name.find('.') != std::string::npos || taken || child.parent_ != nullptr || circle)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": cannot add child \"{}\": {}", path_, name,
                            taken                      ? "the name is taken"
                            : circle                   ? "it is this module, or above it"
                            : child.parent_ != nullptr ? "it has a parent already"
                                                       : "a name is not empty and holds no dot"));
  child.parent_ = this;
  child.set_path(joined(path_, name));
  children_.emplace_back(std::move(name), &child);
}

// Throws bad_argument where a parameter or buffer cannot have this name here.
void Module::expect_new_name(std::string_view what, std::string_view name) const {
  const auto is_it = [&](const auto& entry) { return entry.first == name; };
  const bool taken = std::ranges::any_of(own_, is_it) || std::ranges::any_of(own_buffers_, is_it);
  if (name.empty() || name.find('.') != std::string_view::npos || taken)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": cannot add {} \"{}\": {}", path_, what, name,
                            taken ? "the name is taken" : "a name is not empty and holds no dot"));
}

namespace {

template <class Ref>
const Ref& expect_given(std::string_view call, std::string_view path, std::string_view name, const Ref& ref) {
  if (ref == nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("{}: \"{}\" got null for \"{}\"", call, path, name));
  return ref;
}

}  // namespace

ParameterRef Module::add(std::string name, ParameterRef parameter) {
  expect_new_name("parameter", name);
  expect_given("add", path_, name, parameter);
  if (parameter->holders_ > 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("module \"{}\": cannot add parameter \"{}\": it is \"{}\" of another module; tie() "
                    "shares one",
                    path_, name, parameter->path_));
  parameter->path_ = joined(path_, name);
  ++parameter->holders_;
  own_.emplace_back(std::move(name), parameter);
  return parameter;
}

ModuleBufferRef Module::add(std::string name, ModuleBufferRef buffer) {
  expect_new_name("buffer", name);
  expect_given("add", path_, name, buffer);
  buffer->path_ = joined(path_, name);
  own_buffers_.emplace_back(std::move(name), buffer);
  return buffer;
}

void Module::rename_parameter(std::string_view name, std::string to) {
  expect_new_name("parameter", to);
  const auto own = std::ranges::find_if(own_, [&](const auto& entry) { return entry.first == name; });
  if (own == own_.end())
    throw Error(ErrorCode::bad_argument,
                fmt::format("rename_parameter: \"{}\" has no parameter \"{}\"", path_, name));
  own->second->path_ = joined(path_, to);
  own->first = std::move(to);
}

ParameterRef Module::tie(std::string_view name, ParameterRef parameter) {
  expect_given("tie", path_, name, parameter);
  for (auto& [own_name, own] : own_) {
    if (own_name != name) continue;
    if (!(own->global_shape() == parameter->global_shape()))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("tie: \"{}\" is {}, \"{}\" is {}", own->path(), to_string(own->global_shape()),
                              parameter->path(), to_string(parameter->global_shape())));
    own = parameter;
    ++own->holders_;
    tied_.push_back(own_name);
    return parameter;
  }
  throw Error(ErrorCode::bad_argument, fmt::format("tie: \"{}\" has no parameter \"{}\"", path_, name));
}

void Module::expect_count(Inputs x, std::size_t count, const char* what) const {
  if (x.size() != count)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": got {} {}; expected {}", path_, x.size(), what, count));
}

// A layer computes on its Frame's device and stream, so its parameters and tensors must be there.
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
  for (const auto& [name, parameter] : own_)
    if (parameter->materialised()) expect(parameter->master_, [&] { return name; });
  for (const auto& [name, buffer] : own_buffers_)
    if (buffer->materialised()) expect(buffer->tensor_, [&] { return name; });
}

void Module::set_path(std::string path) {
  path_ = std::move(path);
  for (auto& [name, parameter] : own_)
    if (std::find(tied_.begin(), tied_.end(), name) == tied_.end()) parameter->path_ = joined(path_, name);
  for (auto& [name, buffer] : own_buffers_) buffer->path_ = joined(path_, name);
  for (auto& [name, child] : children_) child->set_path(joined(path_, name));
}

Module& Module::get(std::string_view path) {
  Module* at = this;
  std::string_view rest = path;
  while (!rest.empty()) {
    const std::string_view step = rest.substr(0, rest.find('.'));
    const auto found = std::find_if(at->children_.begin(), at->children_.end(),
                                    [&](const Child& c) { return c.first == step; });
    if (found == at->children_.end())
      throw Error(ErrorCode::bad_argument, fmt::format("get \"{}\": \"{}\" has no child \"{}\"; it has {}",
                                                       path, at->path_, step, child_names(*at)));
    at = found->second;
    rest.remove_prefix(std::min(rest.size(), step.size() + 1));
  }
  return *at;
}

ParameterRef Module::parameter(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  Module& holder = dot == std::string_view::npos ? *this : get(path.substr(0, dot));
  const std::string_view last = dot == std::string_view::npos ? path : path.substr(dot + 1);
  for (const auto& [name, parameter] : holder.own_)
    if (name == last) return parameter;
  throw Error(ErrorCode::bad_argument,
              fmt::format("parameter \"{}\": \"{}\" has no parameter \"{}\"", path, holder.path_, last));
}

std::vector<Parameter*> Module::parameters() const {
  std::vector<Parameter*> all;
  const std::function<void(const Module&)> collect = [&](const Module& m) {
    for (const auto& [name, parameter] : m.own_)
      if (std::find(all.begin(), all.end(), parameter.get()) == all.end()) all.push_back(parameter.get());
    for (const auto& [name, child] : m.children_) collect(*child);
  };
  collect(*this);
  return all;
}

std::vector<ModuleBuffer*> Module::buffers() const {
  std::vector<ModuleBuffer*> all;
  const std::function<void(const Module&)> collect = [&](const Module& m) {
    for (const auto& [name, buffer] : m.own_buffers_) all.push_back(buffer.get());
    for (const auto& [name, child] : m.children_) collect(*child);
  };
  collect(*this);
  return all;
}

void Module::visit(const std::function<void(Module&)>& see) {
  see(*this);
  for (const auto& [name, child] : children_) child->visit(see);
}

Module& Sequential::append(std::unique_ptr<Module> child) {
  return append(std::to_string(owned_.size()), std::move(child));
}

Module& Sequential::append(std::string name, std::unique_ptr<Module> child) {
  expect_given("append", path(), name, child);
  Module& added = *child;
  add(std::move(name), added);
  owned_.push_back(std::move(child));
  return added;
}

Tensors Sequential::do_forward(Inputs x, Frame& frame) {
  Tensors tensors(x.begin(), x.end());
  for (const auto& child : owned_) tensors = child->forward(tensors, frame);
  return tensors;
}

Tensors Sequential::do_backward(Inputs dy, Frame& frame) {
  Tensors tensors(dy.begin(), dy.end());
  for (auto child = owned_.rbegin(); child != owned_.rend(); ++child)
    tensors = (*child)->backward(tensors, frame);
  return tensors;
}

void replicate(Module& root, const DeviceMesh& mesh) {
  given_mesh("replicate", mesh, "mesh");
  for (Parameter* p : root.parameters())
    if (p->layout() == nullptr) p->set_layout(replicated_layout(mesh, p->global_shape()));
  for (ModuleBuffer* b : root.buffers())
    if (b->layout() == nullptr) b->set_layout(replicated_layout(mesh, b->global_shape()));
}

void materialise(Module& root, Compute& compute, Memory memory) {
  for (Parameter* p : root.parameters()) p->materialise(compute, memory);
  for (ModuleBuffer* b : root.buffers()) b->materialise(compute, memory);
}

}  // namespace weft
