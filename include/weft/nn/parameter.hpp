// A weight of a model: the stored values, the values that layers read, the gradient, and their layouts over
// the mesh. The rank (thread) that owns the model uses it. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/compute.hpp"
#include "weft/nn/init.hpp"

namespace weft {

/// master(): f32, this rank's part of the stored weight. Initialisation, optimizer and checkpoint work on the
/// master. weight(): the tensor that layers read. If place_weight() has set a tensor (weights gathered for a
/// pass), weight() is that tensor. Otherwise it is the master itself if dtype() is f32, and the master
/// rounded to dtype() if not.
///
/// The life of a Parameter: the constructor sets a global shape, without memory → `set_layout` may shard the
/// parameter → `materialise` gives it memory → `initialise` or a checkpoint gives it values. If a parameter
/// has no values yet, its layer refuses passes. Layers read weight() at each use and never keep it on a
/// Frame. So the weight may be gathered before a pass and dropped after the pass.
///
/// A tied weight is one Parameter in two modules. Its path is that of the module that made it.
class Parameter {
 public:
  explicit Parameter(const Shape& global, Init init = Constant{0.0});
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  /// The parameter's name in files, errors and plans: "layers.1.attention.q_proj.weight". No kind of
  /// parallelism changes it.
  const std::string& path() const noexcept { return path_; }
  const Shape& global_shape() const noexcept { return global_; }
  /// The shape of this rank's part: from layout(), or the global shape if layout() is null.
  Shape local_shape() const;
  const Init& init() const noexcept { return init_; }
  void set_init(Init init) noexcept { init_ = init; }
  /// Whether weight decay applies to the parameter. Default: true if it has two dimensions or more. Gains and
  /// biases of norms never decay.
  bool decays() const noexcept { return decays_; }
  void set_decays(bool decays) noexcept { decays_ = decays; }
  /// If false, the parameter is frozen: layers compute no gradient for it, and optimizers, reducers and norms
  /// leave it out. Default: true. Throws bad_argument while the parameter has a gradient, or while other code
  /// has claimed its gradient.
  bool trainable() const noexcept { return trainable_; }
  void set_trainable(bool trainable);
  /// The dtype of weight(): f32 (default) or bf16. Call set_dtype() before materialise. It throws
  /// bad_argument for other dtypes, because no kernel multiplies them.
  DType dtype() const noexcept { return dtype_; }
  void set_dtype(DType dtype);

  /// The master's layout over the root mesh. Null: a plain tensor on one rank.
  LayoutRef layout() const noexcept { return layout_; }
  /// Call it before materialise and fix_layout(). Later it throws bad_argument. Throws layout if the global
  /// shape of `layout` is not global_shape().
  void set_layout(LayoutRef layout);
  /// From now on set_layout() and parallelize() throw. `by`, a string literal, names the step that fixed the
  /// layout, such as "fully_shard". Null allows set_layout() again.
  void fix_layout(const char* by) noexcept { layout_fixed_by_ = by; }
  const char* layout_fixed_by() const noexcept { return layout_fixed_by_; }

  /// Allocates the master, uninitialised, in the memory of `compute`, which must exist longer than the
  /// parameter. Throws bad_argument if the parameter already has memory.
  void materialise(Compute& compute, Memory memory = Memory::local);
  bool materialised() const noexcept { return static_cast<bool>(master_); }
  /// The Compute with which the parameter was materialised. Before materialise it throws bad_argument that
  /// names the path.
  Compute& compute() const;
  /// The master: f32, of local_shape(), with layout(). Only read it. Code that changes its elements must call
  /// write_master(). Before materialise it throws bad_argument that names the path.
  const Tensor& master() const;
  /// The master, which the caller may write. The next read of weight() makes it again from the master, and
  /// has_values() is true from now on. Call it again for later writes.
  const Tensor& write_master();
  /// Whether the master has valid elements: false from materialise() until write_master(), or set_master()
  /// with other memory, is called.
  bool has_values() const noexcept { return has_values_; }
  /// States that the master has no valid elements. For code that replaces the master's memory before the
  /// master has values.
  void forget_values() noexcept { has_values_ = false; }
  /// How often the master was written or replaced. Code that caches a result computed from the master
  /// compares this number to detect that the result is out of date.
  std::uint64_t master_version() const noexcept { return master_version_; }
  /// Replaces the master by another tensor (of a loaded checkpoint, for example): f32, with the local shape
  /// of the tensor's own layout, which becomes layout(). A plain tensor must have the local shape of
  /// layout(). Throws layout if the tensor is Partial, or if it has another layout while there is a gradient.
  /// Throws bad_argument if the shape changes while other code has claimed the gradient.
  void set_master(Tensor master);

  /// The tensor that layers read, of dtype(). It may have another layout than the master. Before materialise
  /// it throws bad_argument that names the path.
  const Tensor& weight() const;
  /// If weight() is the rounded master: a number, never 0, that identifies the present values. Other values
  /// of this parameter have other numbers. So code that caches a result computed from the values can detect
  /// that the result is out of date. Returns 0 if weight() is the master itself or a placed tensor, because
  /// changes of their elements are not counted. Throws the errors of weight().
  std::uint64_t weight_version() const;
  /// A number that materialise() sets, unique among the parameters of this process. 0 before materialise().
  std::uint64_t number() const noexcept { return number_; }
  /// From now on, until drop_weight(), layers read `weight`. It must be of dtype(), and have any layout for
  /// global_shape() that is not Partial, or be plain with the global shape. Gradients then have the shape of
  /// `weight`. Throws bad_argument or layout if `weight` does not fit, if there is a gradient of another
  /// shape, or if the shape changes while other code has claimed the gradient. If `owner` has claimed the
  /// gradient, it may change the shape. It must then handle the gradient itself.
  void place_weight(Tensor weight, const void* owner = nullptr);
  /// Layers read the master again.
  void drop_weight() noexcept;

  // --- the gradient: f32, of the local shape of weight() ---

  bool has_gradient() const noexcept { return has_gradient_; }
  /// The sum of the gradients of all uses since zero_gradient(), with the gradient's layout: Shard on axes
  /// where the weight is Shard, Partial(sum) on axes along which ranks used the weight on different data, and
  /// Replicate on axes along which they used it on the same data. A null layout means plain. Throws
  /// bad_argument, naming the path, if there is no gradient.
  const Tensor& gradient() const;
  /// The gradient's layout. Null if the gradient is plain, or if there is none.
  LayoutRef gradient_layout() const noexcept { return gradient_layout_; }
  /// States that the gradient's elements were changed in place (reduced, for example), and now have this
  /// layout. Throws ErrorCode::layout if the global shape of `layout` is not global_shape(), or if `layout`
  /// gives this rank a part of another shape than the gradient's.
  void set_gradient_layout(LayoutRef layout);
  /// Replaces the accumulated gradient by a reduced gradient, such as this rank's shard after a
  /// reduce_scatter: f32, with the local shape of its layout, whose global shape must be global_shape().
  /// Throws bad_argument if `gradient` does not fit, or if other code has claimed the gradient.
  void set_gradient(Tensor gradient);
  /// For the code that has claimed the gradient: takes the gradient out. The parameter then has no gradient,
  /// and no memory for a gradient. Throws bad_argument if there is no gradient, or if other code has claimed
  /// it.
  Tensor take_gradient(const void* owner);
  /// For the code that has claimed the gradient: sets the gradient, f32, of the local shape of its layout
  /// (whose global shape is global_shape()), or plain with the global shape. Its shape need not be that of
  /// weight(). Throws the errors of set_gradient(), and bad_argument if other code has claimed the gradient.
  void give_gradient(Tensor gradient, const void* owner);
  /// From now on, until release_gradient(owner), only `owner` may call place_gradient(). Throws bad_argument
  /// if other code has claimed the gradient: `parameter "w": its gradient belongs to another reducer
  /// already`. `owner` is only compared, never dereferenced.
  void claim_gradient(const void* owner);
  void release_gradient(const void* owner) noexcept;
  /// From now on the gradient lies in `memory` (a view of a bucket: f32, the shape of weight(), on its
  /// device). An existing gradient is copied there.
  void place_gradient(Tensor memory);
  /// States that the gradient's memory holds a gradient of that layout (zeros, put there by its owner).
  /// Throws the errors of set_gradient_layout().
  void state_gradient(LayoutRef layout);
  /// Drops the gradient. It costs nothing, because the next use overwrites the gradient.
  void zero_gradient() noexcept;

  /// Adds the gradient of one use. Does nothing if the parameter is frozen. `dw`: f32, with the shape of
  /// weight(). Its layout must have global_shape() and equal the layout of the earlier uses since
  /// zero_gradient(). Otherwise it throws layout that names both.
  void accumulate(const Tensor& dw);
  /// Like the function above, without a temporary tensor: `write(into, add)` overwrites `into`, or adds to it
  /// if `add` is true. A null layout means a gradient of the whole weight. Throws layout if weight() is less.
  void accumulate(LayoutRef layout, const std::function<void(const Tensor& into, bool add)>& write);

  /// The number of modules that hold the parameter. It is more than one for a tied weight.
  int holders() const noexcept { return holders_; }
  using Listener = std::function<void(Parameter&)>;
  /// Adds a listener, which is called when a gradient is final. This is when backward has handled as many
  /// uses of the parameter as the forward passes on the Frame made. Returns a number for stop_listening. A
  /// listener may add and remove listeners.
  int listen(Listener listener);
  void stop_listening(int id);
  /// Calls the listeners. No effect if there is no gradient. For code that accumulates without a Module.
  void announce_final();

 private:
  friend class Module;
  void make_gradient();
  void add_gradient(const LayoutRef& layout, const std::function<void(const Tensor& into, bool add)>& write);
  void expect_unclaimed(std::string_view call, const void* owner = nullptr) const;
  void put_gradient(std::string_view call, Tensor gradient);
  void expect_device(std::string_view call, const Tensor& t) const;
  void expect_memory(std::string_view call, const Tensor& t) const;
  void expect_gradient_layout(std::string_view call, const Shape& shape, const LayoutRef& layout) const;
  void expect_fits(std::string_view call, const Tensor& t, DType dtype, const LayoutRef& layout) const;
  Shape global_;
  Init init_;
  std::string path_;
  bool decays_;
  bool trainable_ = true;
  DType dtype_ = DType::f32;
  LayoutRef layout_ = nullptr;
  const char* layout_fixed_by_ = nullptr;
  Compute* compute_ = nullptr;
  Tensor master_;
  mutable Tensor rounded_;  // the master rounded to dtype(), if dtype() is not f32
  mutable bool rounded_is_old_ = true;
  bool has_values_ = false;
  std::uint64_t master_version_ = 0;
  std::uint64_t number_ = 0;
  Tensor placed_;  // the tensor of place_weight(); null: none
  Tensor gradient_;
  LayoutRef gradient_layout_ = nullptr;
  bool has_gradient_ = false;
  const void* gradient_owner_ = nullptr;
  int holders_ = 0;
  std::vector<std::pair<int, Listener>> listeners_;
  int next_listener_ = 0;
};

using ParameterRef = std::shared_ptr<Parameter>;

}  // namespace weft
