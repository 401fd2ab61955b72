#include "weft/nn/module.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

std::string joined(const std::string& path, std::string_view name) {
  return path.empty() ? std::string(name) : fmt::format("{}.{}", path, name);
}

std::string child_names(const Module& module) {
  std::vector<std::string_view> names;
  for (const auto& [name, child] : module.children()) names.push_back(name);
  return names.empty() ? "no children" : fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

ShardRule Module::shard_rule(Split split) const {
  ShardRule rule;
  rule.refused = split == Split::column ? "cannot be split by columns" : "cannot be split by rows";
  return rule;
}

SpaceRule Module::space_rule(const DeviceMesh&, std::span<const int>) const { return {}; }

bool Module::set_output_dtype(DType) { return false; }

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

// Throws bad_argument if a parameter or buffer cannot have this name here.
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
