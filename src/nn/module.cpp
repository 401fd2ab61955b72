#include "weft/nn/module.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "weft/base/error.hpp"

namespace weft {
namespace {

void run(const std::vector<Module::Hook>& hooks, Module& module, Tensors& tensors, Frame& frame) {
  for (const Module::Hook& hook : hooks) hook(module, tensors, frame);
}

enum class Direction : unsigned char { forward, backward };

// Takes the tensors that the boundary is for across it: all of them are on their way at once.
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

Tensors Module::forward(Inputs x, Frame& frame) {
  Tensors in(x.begin(), x.end());
  run(hooks_.pre_forward, *this, in, frame);
  for (const PlacedBoundary& placed : before_) cross(placed, Direction::forward, {path_, "x"}, in);
  Tensors out = do_forward(in, frame);
  for (const PlacedBoundary& placed : after_) cross(placed, Direction::forward, {path_, "y"}, out);
  finish_forward(out, frame);
  for (const auto& [name, parameter] : own_) frame.count_use(*parameter);
  run(hooks_.post_forward, *this, out, frame);
  return out;
}

Tensors Module::backward(Inputs dy, Frame& frame) {
  Tensors in(dy.begin(), dy.end());
  run(hooks_.pre_backward, *this, in, frame);
  begin_backward(in, frame);
  for (auto placed = after_.rbegin(); placed != after_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dy"}, in);
  Tensors out = do_backward(in, frame);
  for (const auto& [name, parameter] : own_)
    if (frame.drop_use(*parameter)) parameter->announce_final();
  for (auto placed = before_.rbegin(); placed != before_.rend(); ++placed)
    cross(*placed, Direction::backward, {path_, "dx"}, out);
  run(hooks_.post_backward, *this, out, frame);
  return out;
}

void Module::add_before(BoundaryRef boundary, int input) { before_.push_back({std::move(boundary), input}); }
void Module::add_after(BoundaryRef boundary, int output) { after_.push_back({std::move(boundary), output}); }

void Module::finish_forward(Tensors&, Frame&) {}
void Module::begin_backward(Inputs, Frame&) {}

void Module::add(std::string name, Module& child) {
  const bool taken =
      std::any_of(children_.begin(), children_.end(), [&](const Child& c) { return c.first == name; });
  if (name.empty() || name.find('.') != std::string::npos || taken || child.parent_ != nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": cannot add child \"{}\": {}", path_, name,
                            taken                      ? "the name is taken"
                            : child.parent_ != nullptr ? "it has a parent already"
                                                       : "a name is not empty and holds no dot"));
  child.parent_ = this;
  child.set_path(joined(path_, name));
  children_.emplace_back(std::move(name), &child);
}

ParameterRef Module::add(std::string name, ParameterRef parameter) {
  const bool taken = std::any_of(own_.begin(), own_.end(), [&](const auto& p) { return p.first == name; });
  if (name.empty() || name.find('.') != std::string::npos || taken)
    throw Error(ErrorCode::bad_argument,
                fmt::format("module \"{}\": cannot add parameter \"{}\": {}", path_, name,
                            taken ? "the name is taken" : "a name is not empty and holds no dot"));
  parameter->path_ = joined(path_, name);
  ++parameter->holders_;
  own_.emplace_back(std::move(name), parameter);
  return parameter;
}

ParameterRef Module::tie(std::string_view name, ParameterRef parameter) {
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

void Module::set_path(std::string path) {
  path_ = std::move(path);
  for (auto& [name, parameter] : own_)
    if (std::find(tied_.begin(), tied_.end(), name) == tied_.end()) parameter->path_ = joined(path_, name);
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

void Module::visit(const std::function<void(Module&)>& see) {
  see(*this);
  for (const auto& [name, child] : children_) child->visit(see);
}

Module& Sequential::append(std::unique_ptr<Module> child) {
  Module& added = *child;
  owned_.push_back(std::move(child));
  add(std::to_string(owned_.size() - 1), added);
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
  for (Parameter* p : root.parameters())
    if (p->layout() == nullptr) p->set_layout(replicated_layout(mesh, p->global_shape()));
}

void materialise(Module& root, Context& context, Memory memory) {
  for (Parameter* p : root.parameters()) p->materialise(context, memory);
}

}  // namespace weft
