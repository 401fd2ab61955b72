#include "weft/train/activation_checkpointing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/window_attention.hpp"
#include "weft/tp/plan.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse_ac(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "apply_ac: " + text);
}

bool is_attention(const Module& m) {
  return dynamic_cast<const Attention*>(&m) != nullptr ||
         dynamic_cast<const CrossAttention*>(&m) != nullptr ||
         dynamic_cast<const WindowAttention*>(&m) != nullptr;
}

std::string path_below(const Module& root, const Module& m) {
  return root.path().empty() ? m.path() : m.path().substr(root.path().size() + 1);
}

std::vector<Module*> selected(Module& root, const AcPolicy& policy) {
  if (name(policy.mode) == "?")
    refuse_ac(fmt::format("mode is {}; expected none, full or selective", static_cast<int>(policy.mode)));
  if (policy.every < 1) refuse_ac(fmt::format("every is {}; expected 1 or more", policy.every));
  if (policy.every > 1 && policy.mode != AcMode::full)
    refuse_ac(fmt::format("every is {} with mode {}; it is for mode full", policy.every, name(policy.mode)));
  if (policy.mode == AcMode::full && policy.modules.empty())
    refuse_ac("mode full needs patterns of the blocks; modules is empty");
  std::vector<bool> matched(policy.modules.size(), false);
  std::vector<Module*> found;
  root.visit([&](Module& m) {
    if (&m == &root) return;
    bool is_one = policy.modules.empty() && is_attention(m);
    for (std::size_t i = 0; i < policy.modules.size(); ++i)
      if (matches(policy.modules[i], path_below(root, m))) is_one = matched[i] = true;
    if (is_one) found.push_back(&m);
  });
  for (std::size_t i = 0; i < matched.size(); ++i)
    if (!matched[i]) refuse_ac(fmt::format("\"{}\" matches no module below the root", policy.modules[i]));
  if (policy.mode == AcMode::none) return {};
  if (found.empty())
    refuse_ac("mode selective found no attention; expected one, or patterns of paths in modules");
  std::vector<Module*> chosen;
  for (std::size_t i = 0; i < found.size(); i += static_cast<std::size_t>(policy.every))
    chosen.push_back(found[i]);
  for (const Module* outer : chosen)
    for (const Module* inner : chosen)
      if (inner->path().starts_with(outer->path() + "."))
        refuse_ac(fmt::format("\"{}\" is inside \"{}\", which runs again as a whole; expected one of them",
                              inner->path(), outer->path()));
  return chosen;
}

}  // namespace

std::string_view name(AcMode mode) noexcept {
  switch (mode) {
    case AcMode::none: return "none";
    case AcMode::full: return "full";
    case AcMode::selective: return "selective";
  }
  return "?";
}

AcMode ac_mode_of(std::string_view text) {
  for (const AcMode mode : {AcMode::none, AcMode::full, AcMode::selective})
    if (text == name(mode)) return mode;
  refuse_ac(fmt::format("mode is \"{}\"; expected none, full or selective", text));
}

std::vector<std::string> apply_ac(Module& root, const AcPolicy& policy) {
  const std::vector<Module*> chosen = selected(root, policy);
  root.visit([&](const Module& m) {
    if (!chosen.empty() && m.recompute())
      refuse_ac(fmt::format("\"{}\" runs again already; apply_ac() is called once", m.path()));
  });
  std::vector<std::string> paths;
  for (Module* m : chosen) {
    m->set_recompute(
        Module::Recompute{.compare_outputs = policy.compare_outputs, .check_state = policy.check_state});
    paths.push_back(m->path());
  }
  return paths;
}

void ActivationProfile::add(Blocks& to, Inputs tensors) {
  for (const Tensor& t : tensors)
    if (t.storage().bytes() > 0) to[t.storage().data()] = static_cast<std::int64_t>(t.storage().bytes());
}

namespace {

std::int64_t sum_of(const std::map<const void*, std::int64_t>& blocks) {
  std::int64_t sum = 0;
  for (const auto& [memory, bytes] : blocks) sum += bytes;
  return sum;
}

std::size_t entry_count(const Frame& frame) {
  std::size_t n = 0;
  frame.visit_kept([&n](const Module&, const Tensors&) { ++n; });
  return n;
}

}  // namespace

std::int64_t kept_bytes(const Frame& frame) {
  std::map<const void*, std::int64_t> blocks;
  frame.visit_kept([&](const Module&, const Tensors& tensors) {
    for (const Tensor& t : tensors)
      if (t) blocks[t.storage().data()] = static_cast<std::int64_t>(t.storage().bytes());
  });
  return sum_of(blocks);
}

ActivationProfile::ActivationProfile(Module& root, Inputs x, Frame& frame) : root_(&root) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "activation profile: " + text);
  };
  root.visit([&](const Module& m) {
    if (m.recompute()) refuse(fmt::format("\"{}\" runs again; expected a model before apply_ac()", m.path()));
  });
  for (const Parameter* p : root.parameters())
    if (p->has_gradient()) refuse(fmt::format("\"{}\" has a gradient; expected none", p->path()));
  Compute& compute = frame.compute();
  std::vector<std::pair<Tensor, Tensor>> buffers;  // each, and what it was
  for (const ModuleBuffer* b : root.buffers())
    if (b->materialised()) {
      buffers.emplace_back(b->tensor(), compute.make(b->tensor().shape(), b->tensor().dtype()));
      copy(compute.context(), b->tensor().view(), buffers.back().second.view(), compute.stream());
    }
  Tensors y;
  record_forward(root, x, frame, y);
  record_backward(root, y, frame);
  for (Parameter* p : root.parameters()) p->zero_gradient();
  for (const auto& [now, before] : buffers)
    copy(compute.context(), before.view(), now.view(), compute.stream());
  alive_.clear();
}

void ActivationProfile::record_forward(Module& root, Inputs x, Frame& frame, Tensors& y) {
  std::vector<std::size_t> open;  // places in runs_
  std::vector<HookHandle> hooks;
  root.visit([&](Module& m) {
    hooks.push_back(m.add_hook(Module::HookPoint::pre_forward, [&](Module& module, Tensors& in, Frame& f) {
      alive_.push_back(in);
      open.push_back(runs_.size());
      runs_.push_back({&module, {}, entry_count(f), 0});
      add(runs_.back().inputs, in);
    }));
    hooks.push_back(m.add_hook(Module::HookPoint::post_forward, [&](Module&, Tensors&, Frame& f) {
      runs_[open.back()].last = entry_count(f);
      open.pop_back();
    }));
  });
  y = root.forward(x, frame);
  frame.visit_kept([&](const Module&, const Tensors& tensors) {
    alive_.push_back(tensors);
    add(entries_.emplace_back(), tensors);
  });
}

// Until its backward is done, a module holds the gradients that it was given, those that the modules inside
// it returned, and the tensors that it pops itself.
void ActivationProfile::record_backward(Module& root, const Tensors& dy, Frame& frame) {
  std::vector<Blocks> held;  // by the modules whose backward is under way, the outermost first
  std::map<const Module*, Blocks> own;
  frame.visit_kept([&](const Module& of, const Tensors& tensors) { add(own[&of], tensors); });
  const auto note = [&](const Frame& f) {
    Moment now{entry_count(f), {}};
    for (const Blocks& of_module : held) now.gradients.insert(of_module.begin(), of_module.end());
    for (const Tensor& t : dy) now.gradients.erase(t.storage().data());
    moments_.push_back(std::move(now));
  };
  std::vector<HookHandle> hooks;
  root.visit([&](Module& m) {
    hooks.push_back(m.add_hook(Module::HookPoint::pre_backward, [&](Module& module, Tensors& in, Frame& f) {
      alive_.push_back(in);
      add(held.emplace_back(own[&module]), in);
      note(f);
    }));
    hooks.push_back(m.add_hook(Module::HookPoint::post_backward, [&](Module&, Tensors& out, Frame& f) {
      alive_.push_back(out);
      add(held.back(), out);
      note(f);
      held.pop_back();
      if (!held.empty()) add(held.back(), out);
    }));
  });
  root.backward(dy, frame);
}

ActivationBytes ActivationProfile::predict(const AcPolicy& policy) const {
  const std::vector<Module*> chosen = selected(*root_, policy);
  std::vector<const Run*> again;  // in the order of the pass
  for (const Run& run : runs_)
    if (std::ranges::count(chosen, run.module) > 0 && (again.empty() || run.first >= again.back()->last))
      again.push_back(&run);
  // The memory that the Frame and the scratch Frame hold where backward has so many entries of the profile
  // left: inputs in the place of the entries of modules that run again, except for the module that runs again
  // just then.
  const auto held = [&](std::size_t entries) {
    Blocks blocks;
    std::size_t next = 0;
    for (const Run* run : again) {
      if (run->first >= entries) break;
      for (; next < run->first; ++next) blocks.insert(entries_[next].begin(), entries_[next].end());
      blocks.insert(run->inputs.begin(), run->inputs.end());
      next = entries > run->first && entries < run->last ? run->first : run->last;
    }
    for (; next < entries; ++next) blocks.insert(entries_[next].begin(), entries_[next].end());
    return blocks;
  };
  ActivationBytes result{.kept = sum_of(held(entries_.size()))};
  for (const Moment& moment : moments_) {
    Blocks blocks = held(moment.entries);
    for (const Run* run : again)  // that runs again now: its first moment has all of its entries
      if (run->last == moment.entries)
        for (std::size_t i = run->first; i < run->last; ++i)
          blocks.insert(entries_[i].begin(), entries_[i].end());
    blocks.insert(moment.gradients.begin(), moment.gradients.end());
    result.peak = std::max(result.peak, sum_of(blocks));
  }
  return result;
}

}  // namespace weft
