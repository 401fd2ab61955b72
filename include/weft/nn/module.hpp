// A node of a model's tree: names, parameters, and the two passes. The one rank (thread) that owns the model
// uses it.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "weft/mesh/boundary.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/window.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/module_buffer.hpp"
#include "weft/nn/own_plan.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// The tensors given to a pass, borrowed for the call. It is made from one tensor, a braced list, or Tensors.
class Inputs {
 public:
  Inputs() = default;
  Inputs(const Tensor& one) : tensors_(&one, 1) {}
  Inputs(std::initializer_list<Tensor> list) : tensors_(list.begin(), list.size()) {}
  Inputs(const Tensors& list) : tensors_(list) {}

  const Tensor& operator[](std::size_t i) const noexcept { return tensors_[i]; }
  std::size_t size() const noexcept { return tensors_.size(); }
  bool empty() const noexcept { return tensors_.empty(); }
  const Tensor* begin() const noexcept { return tensors_.data(); }
  const Tensor* end() const noexcept { return tensors_.data() + tensors_.size(); }

 private:
  std::span<const Tensor> tensors_;
};

class Module;

/// A unit that a split must not cut. Each rank must have a whole number of such units.
struct Unit {
  const char* name;  ///< in the plural: "heads", "output features"
  std::int64_t count;
  /// the unit counts only if this layer is split; null: it counts if any layer inside is split
  const Module* cut_by = nullptr;
};

/// The two ways to share the work of a layer. column: each rank computes some of the outputs from all inputs.
/// row: each rank computes a contribution to all outputs from some of the inputs.
enum class Split : unsigned char { column, row };

/// How a module's own parameters are cut if its work is split.
struct ShardRule {
  struct Part {
    Parameter* parameter;
    /// placements on the axes that split the module; parameters that are not named stay whole
    Placement placement;
    Segments segments{};  ///< the segments of the dimension that is cut; each segment is cut on its own
  };
  std::vector<Part> parameters;
  std::vector<Unit> whole_units;  ///< the number of ranks of the axes must divide each of these counts
  std::string refused{};          ///< not empty: the reason why the module cannot be split in this way
  struct BufferPart {
    ModuleBuffer* buffer;
    Placement placement;
    Segments segments{};
  };
  std::vector<BufferPart> buffers{};  ///< buffers that are cut like the parameters
  /// If not empty: the reason why parallelize(root, axis) leaves the module whole by default, for example "a
  /// spectral norm".
  std::string whole_by_default{};
  /// The dimension of inputs and outputs that is cut together with the work. Shard(-1) in a style means this
  /// dimension, the features.
  int features = -1;
};

class HookHandle;

/// Passes that replace the module's own code if its inputs are cut in a way that the module's code does not
/// support. Immutable, so one object may serve several modules. It pushes the tensors that backward needs on
/// the Frame, for that module.
class Passes {
 public:
  virtual ~Passes() = default;
  virtual Tensors forward(Module& module, Inputs x, Frame& frame) const = 0;
  virtual Tensors backward(Module& module, Inputs dy, Frame& frame) const = 0;
  /// Why a module with these passes has no rule for exact mode (docs/exact.md), as the end of a sentence
  /// about the module. Empty: it has one.
  virtual std::string exact_refusal() const { return "has other passes, which have no rule for exact mode"; }

 protected:
  Passes() = default;
  Passes(const Passes&) = default;
  Passes& operator=(const Passes&) = default;
  /// Run the module's own code.
  static Tensors own_forward(Module& module, Inputs x, Frame& frame);
  static Tensors own_backward(Module& module, Inputs dy, Frame& frame);
};

/// A module's own statement of how it computes on maps (batch, channels, height, width) that are cut in
/// space.
struct SpaceRule {
  enum class Kind : unsigned char {
    unknown,  ///< the module does not state a rule
    /// The module's own code is right on any part of a map. Its result for a pixel depends only on that
    /// pixel, or the code reads the layout. In a module with children the rule is for the module's own code
    /// between the children. Each child has its own rule.
    any_part,
    /// The module's own code is right on a window of a map (the inputs of one output). `height` and `width`
    /// describe the window. The rule is for the module and its children.
    window,
    by_passes,  ///< `passes` do the work
    refused     ///< the module cannot compute on parts of maps; `why` gives the reason
  };
  Kind kind = Kind::unknown;
  std::shared_ptr<const Passes> passes{};
  std::string why{};
  /// Parameters with one element per pixel, which are sharded like the maps. dims[i] is the dimension of the
  /// parameter that axis i cuts. -1: none. Other parameters are the same on all ranks.
  struct Pixelwise {
    Parameter* parameter;
    std::vector<int> dims;
  };
  std::vector<Pixelwise> pixelwise{};
  /// A window: output o along one dimension depends only on the inputs o · stride − padding + i · dilation, 0
  /// ≤ i < kernel, in the same way for all o. `edge` gives the values beyond the border. A map of n gives (n
  /// + 2 padding − dilation (kernel − 1) − 1) / stride + 1 outputs, rounded down.
  struct Reach {
    std::int64_t kernel = 1, stride = 1, padding = 0, dilation = 1;
    Edge edge = Edge::zero();
  };
  Reach height{}, width{};
};

/// A layer or a tree of layers. A derived class registers its children and parameters under names in its
/// constructor. The dotted path of a node (`layers.1.attention.q_proj`) never changes afterwards. Parallelism
/// changes layouts of parameters and sets boundaries. Types and paths stay.
///
/// Order: build (shapes, no memory) → parallelise → materialise → initialise → passes.
class Module {
 public:
  Module() = default;
  virtual ~Module() = default;
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // --- the passes: not virtual; the common part of every layer is here ---

  /// Runs in this order: around → pre-forward hooks → boundaries before → do_forward → boundaries after →
  /// finish_forward → post-forward hooks. Throws layout if the layer does not accept the layout of an input,
  /// and bad_argument for wrong shapes.
  Tensors forward(Inputs x, Frame& frame);
  /// Runs the reverse of forward: around → pre-backward hooks → begin_backward → adjoints of the boundaries
  /// after → do_backward → adjoints of the boundaries before → post-backward hooks. `dy` has the gradients of
  /// the outputs of forward. The result has the gradients of the differentiable inputs, in their order.
  Tensors backward(Inputs dy, Frame& frame);
  /// Like the function above, but leaves the gradients of weights to `left_over`, whose run() computes them.
  /// These are the weights of Linear, Embedding, Conv2d and ConvTranspose2d, including layers that compute on
  /// parts of maps. Gradients of biases and norms are small, and this function computes them. A module with a
  /// scope around its backward (fully_shard) leaves nothing over. Its work is done before the scope ends.
  Tensors backward(Inputs dy, Frame& frame, LeftOver& left_over);

  // --- names ---

  /// Dotted path from the root. "" at the root.
  const std::string& path() const noexcept { return path_; }
  /// A descendant by its path relative to this node. "" is this node. If it does not exist, throws
  /// bad_argument. The text says which part of the path exists, and which children there are.
  Module& get(std::string_view path);
  /// A parameter by its path relative to this node ("layers.0.mlp.up_proj.weight"). A tied weight is found
  /// under each of its names.
  ParameterRef parameter(std::string_view path);
  using Child = std::pair<std::string, Module*>;
  const std::vector<Child>& children() const noexcept { return children_; }
  /// This node's own parameters, by name, including tied parameters.
  const std::vector<std::pair<std::string, ParameterRef>>& own_parameters() const noexcept { return own_; }
  const std::vector<std::pair<std::string, ModuleBufferRef>>& own_buffers() const noexcept {
    return own_buffers_;
  }
  /// Every buffer of the tree, in the order of parameters().
  std::vector<ModuleBuffer*> buffers() const;
  /// Every parameter of the tree once, in a fixed order: first a node's own parameters in order of
  /// registration, then those of its children. A tied parameter is at the place of its first name.
  std::vector<Parameter*> parameters() const;
  /// This node, then its descendants, depth first in order of registration.
  void visit(const std::function<void(Module&)>& see);

  /// Units that a split of the module must not cut, such as attention heads.
  using Unit = weft::Unit;
  virtual std::vector<Unit> units() const { return {}; }
  /// How the module is split over ranks that share its work, or why it is not split. The default says that it
  /// cannot be split. A layer that can be split overrides this; parallelize() knows no layer by its type.
  virtual ShardRule shard_rule(Split split) const;

  /// Whether the module's own code, between its children, follows the rules of exact mode (docs/exact.md) if
  /// the Frame says so. Such code makes a sum that parallelism may split over blocks. The default is no.
  virtual bool has_exact_rule() const { return false; }

  /// How the module computes on a part of a map. Axis i of `axes` cuts dimension dims[i]. The default is
  /// unknown.
  virtual SpaceRule space_rule(const DeviceMesh& axes, std::span<const int> dims) const;
  /// From now on `passes` runs the passes. Null: the module's own code runs them. Hooks and boundaries stay
  /// around them.
  void set_passes(std::shared_ptr<const Passes> passes) { passes_ = std::move(passes); }
  const std::shared_ptr<const Passes>& passes() const noexcept { return passes_; }

  /// The plan by which ranks share the work of the layers inside the module. It is the plan that was set for
  /// this instance, otherwise the plan of its kind, and empty if it has none. parallelize(root, axis)
  /// collects the plans of all modules of the tree.
  OwnPlan own_plan() const { return instance_plan_ ? *instance_plan_ : class_plan(); }
  /// Sets the plan of this instance, which replaces the plan of its kind. An empty plan leaves the module
  /// whole. nullopt: the plan of its kind applies again.
  void set_own_plan(std::optional<OwnPlan> plan) { instance_plan_ = std::move(plan); }

  /// From now on the module's outputs have this dtype, f32 or bf16, whatever its inputs have. Returns false,
  /// and changes nothing, if the module has no such choice: its outputs have the dtype of its inputs. Linear
  /// and Embedding have the choice, and modules that end in one. Throws bad_argument for another dtype.
  virtual bool set_output_dtype(DType dtype);

  // --- activation checkpointing; apply_ac() (weft/train/activation_checkpointing.hpp) sets it ---

  struct Recompute {
    /// Compares the hashes of all outputs of the modules inside with those of the first run. Slow.
    bool compare_outputs = false;
    /// Checks that the second run changes no buffer and no parameter.
    bool check_state = false;
  };
  /// From now on a forward pass keeps only the inputs of this module, and its backward first runs forward
  /// again, with hooks, boundaries and the same random numbers (T. Chen, B. Xu, C. Zhang, C. Guestrin,
  /// "Training Deep Nets with Sublinear Memory Cost", 2016). Results have the same bits. Weights that a scope
  /// gathers around a pass are gathered once for both. nullopt: forward keeps what backward needs.
  ///
  /// Backward throws bad_argument if the second run changed state (check_state), and mismatch that names the
  /// first module whose outputs differ (compare_outputs).
  void set_recompute(std::optional<Recompute> recompute) { recompute_ = recompute; }
  const std::optional<Recompute>& recompute() const noexcept { return recompute_; }

  // --- boundaries, hooks and scopes that parallelism and others attach ---

  /// A boundary, and the tensor to which it applies: the tensor's index among the floating-point inputs (or
  /// outputs) of the module, or kEvery.
  struct PlacedBoundary {
    BoundaryRef boundary;
    int index;
  };
  static constexpr int kEvery = -1;
  /// The boundaries in the order in which forward applies them. Backward undoes them in reverse order.
  const std::vector<PlacedBoundary>& before() const noexcept { return before_; }
  const std::vector<PlacedBoundary>& after() const noexcept { return after_; }
  /// Adds a boundary as the last boundary before (or after) this module. Throws bad_argument for null, and
  /// for an index below kEvery. A pass throws bad_argument if there is no tensor with that index.
  void add_before(BoundaryRef boundary, int input = kEvery);
  void add_after(BoundaryRef boundary, int output = kEvery);

  /// A hook gets the tensors at its point, and may replace them. end_of_backward runs only for the outermost
  /// backward, when all of it is done.
  using Hook = std::function<void(Module&, Tensors&, Frame&)>;
  enum class HookPoint : unsigned char {
    pre_forward,
    post_forward,
    pre_backward,
    post_backward,
    end_of_backward
  };
  /// The hook stays until the returned handle or the module is destroyed.
  [[nodiscard]] HookHandle add_hook(HookPoint point, Hook hook);
  /// Runs around a pass: `enter` before all other parts of the pass, and `leave` after them. If the pass
  /// throws, `leave` still runs. The pass's error is passed on, and an error of `leave` is dropped. Several
  /// Arounds are left in reverse order. `leave` is not called if `enter` was not called. This is for weights
  /// that are gathered for a pass and released after it.
  struct Around {
    std::function<void(Module&, Frame&)> enter, leave;
  };
  [[nodiscard]] HookHandle around_forward(Around around);
  [[nodiscard]] HookHandle around_backward(Around around);

 protected:
  /// Registers a child (a member of the derived class) or a parameter. `name` must contain no dot and must be
  /// new in this module.
  void add(std::string name, Module& child);
  ParameterRef add(std::string name, ParameterRef parameter);
  /// Registers a buffer of this module. No parameter of the module may have its name.
  ModuleBufferRef add(std::string name, ModuleBufferRef buffer);
  /// Gives one of this module's own parameters another name, which must be new in this module. This changes
  /// its path. So do not call it after the model was built.
  void rename_parameter(std::string_view name, std::string to);
  /// Replaces this module's parameter of that name by another module's parameter. Both modules then use one
  /// weight, under the path of the other module.
  ParameterRef tie(std::string_view name, ParameterRef parameter);
  /// The kind of memory for the results of do_forward and do_backward: shared if a boundary will communicate
  /// them.
  Memory out_memory() const noexcept { return after_.empty() ? Memory::local : Memory::shared; }
  Memory dx_memory() const noexcept { return before_.empty() ? Memory::local : Memory::shared; }
  /// Throws bad_argument unless `x` holds `count` tensors: `"path": got 2 inputs; expected 1`.
  void expect_count(Inputs x, std::size_t count, const char* what) const;

  /// The plan of every module of this kind. By default there is none.
  virtual OwnPlan class_plan() const { return {}; }

 private:
  void expect_new_name(std::string_view what, std::string_view name) const;
  virtual Tensors do_forward(Inputs x, Frame& frame) = 0;
  virtual Tensors do_backward(Inputs dy, Frame& frame) = 0;
  /// Runs on the result of the boundaries after the layer. A row-parallel layer adds its bias here, once.
  virtual void finish_forward(Tensors& y, Frame& frame);
  /// The counterpart of finish_forward() in backward. It runs before the adjoints of these boundaries.
  virtual void begin_backward(Inputs dy, Frame& frame);
  void expect_here(const char* what, Inputs x, const Frame& frame) const;
  void expect_boundary(std::string_view call, const BoundaryRef& boundary, int index) const;
  void set_path(std::string path);
  HookHandle add_around(bool backward, Around around);
  std::vector<Around> around(bool backward) const;
  void run(HookPoint point, Tensors& tensors, Frame& frame);
  Tensors run_forward(Inputs x, Frame& frame);
  Tensors run_backward(Inputs dy, Frame& frame, bool in_scope);
  void run_again(const Tensors& x, Frame& scratch);

  std::string path_;
  Module* parent_ = nullptr;
  std::vector<Child> children_;
  std::vector<std::pair<std::string, ParameterRef>> own_;
  std::vector<std::pair<std::string, ModuleBufferRef>> own_buffers_;
  std::vector<std::string> tied_;  // names in own_ of parameters that another module made
  std::vector<PlacedBoundary> before_, after_;
  std::optional<OwnPlan> instance_plan_;
  std::optional<Recompute> recompute_;
  std::shared_ptr<const Passes> passes_;  // null: do_forward and do_backward
  friend class Passes;
  struct Hooks;
  std::shared_ptr<Hooks> hooks_;  // null: none
};

/// Removes its hook from the module when it is destroyed, unless detach() was called.
class [[nodiscard]] HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  HookHandle(HookHandle&& other) noexcept : remove_(std::exchange(other.remove_, nullptr)) {}
  HookHandle& operator=(HookHandle&& other) noexcept {
    if (this != &other) {
      reset();
      remove_ = std::exchange(other.remove_, nullptr);
    }
    return *this;
  }
  ~HookHandle() { reset(); }
  /// Removes the hook now.
  void reset() {
    if (const auto remove = std::exchange(remove_, nullptr)) remove();
  }
  /// Leaves the hook on its module until the module is destroyed.
  void detach() noexcept { remove_ = nullptr; }

 private:
  std::function<void()> remove_;
};

/// The base of a module whose space_rule() is any_part. A class that derives from Layer may compute something
/// else, so its rule is unknown.
template <class Layer>
class AnyPart : public Module {
 public:
  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    return {typeid(*this) == typeid(Layer) ? SpaceRule::Kind::any_part : SpaceRule::Kind::unknown};
  }
};

/// A sequence of children, called "0", "1", … or by names. Each child gets the output of the child before it.
class Sequential : public AnyPart<Sequential> {
 public:
  /// Takes ownership of `child`. The child's name is the next number, or `name`.
  Module& append(std::unique_ptr<Module> child);
  Module& append(std::string name, std::unique_ptr<Module> child);
  std::size_t size() const noexcept { return owned_.size(); }
  bool has_exact_rule() const override { return typeid(*this) == typeid(Sequential); }
  bool set_output_dtype(DType dtype) override {
    return !owned_.empty() && owned_.back()->set_output_dtype(dtype);
  }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  std::vector<std::unique_ptr<Module>> owned_;
};

/// States that every parameter and buffer of the tree without a layout is the same on all ranks of `mesh`
/// (Replicate on every axis). Call it before materialise.
void replicate(Module& root, const DeviceMesh& mesh);
/// Calls materialise() for every parameter and buffer of the tree, each once.
void materialise(Module& root, Compute& compute, Memory memory = Memory::local);

}  // namespace weft
