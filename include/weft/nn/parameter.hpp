// A weight of a model: the stored values, the values that layers read, the gradient, and the layout of each
// over the mesh. Used by the rank (thread) that owns the model; not thread-safe.
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

/// master(): f32, this rank's part of the weight as it is stored; initialisation, optimizer and checkpoint
/// work on it. weight(): the tensor that layers read. It is the same memory where dtype() is f32 and nobody
/// has put another tensor there; otherwise the master rounded to dtype(), or what place_weight() gave (a
/// shard gathered for a pass).
///
/// Life: made with a global shape and no memory → `set_layout` may shard it → `materialise` gives it memory →
/// `initialise` or a checkpoint gives it values. A layer whose parameter has none yet refuses its passes.
/// Layers read weight() at each use and never keep it on a Frame, so that it may be gathered before a pass
/// and dropped after it.
///
/// Tied weights are one Parameter in two modules: one path (that of the module that made it), two uses.
class Parameter {
 public:
  explicit Parameter(const Shape& global, Init init = Constant{0.0});
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  /// "layers.1.attention.q_proj.weight": names it in files, errors and plans; no parallelism changes it.
  const std::string& path() const noexcept { return path_; }
  const Shape& global_shape() const noexcept { return global_; }
  /// The shape of this rank's part: by layout(), or the global shape if that is null.
  Shape local_shape() const;
  const Init& init() const noexcept { return init_; }
  void set_init(Init init) noexcept { init_ = init; }
  /// Whether weight decay applies to it. Default: where it has two dimensions or more; gains and biases of
  /// norms never.
  bool decays() const noexcept { return decays_; }
  void set_decays(bool decays) noexcept { decays_ = decays; }
  /// Frozen where false: layers compute no gradient for it, and optimizers, reducers and norms leave it out.
  /// Default: true. Throws bad_argument while it has a gradient, or one that somebody has claimed.
  bool trainable() const noexcept { return trainable_; }
  void set_trainable(bool trainable);
  /// The dtype of weight(): f32 (default) or bf16. Before materialise only. Throws bad_argument for others,
  /// which no kernel multiplies.
  DType dtype() const noexcept { return dtype_; }
  void set_dtype(DType dtype);

  /// The master's layout over the root mesh; null: plain, one rank.
  LayoutRef layout() const noexcept { return layout_; }
  /// Before materialise only (bad_argument after, and after fix_layout()). Throws layout if its global
  /// shape is not global_shape().
  void set_layout(LayoutRef layout);
  /// From now on set_layout() throws, and so does parallelize(): `by`, a literal, is the step that came
  /// before, such as "fully_shard"; null takes that back.
  void fix_layout(const char* by) noexcept { layout_fixed_by_ = by; }
  const char* layout_fixed_by() const noexcept { return layout_fixed_by_; }

  /// Allocates the master, uninitialised, in the memory of `compute`, which must outlive it. Throws
  /// bad_argument if it has memory already.
  void materialise(Compute& compute, Memory memory = Memory::local);
  bool materialised() const noexcept { return static_cast<bool>(master_); }
  /// The Compute that it was materialised with. Throws bad_argument naming the path before materialise.
  Compute& compute() const;
  /// f32, of local_shape(), carrying layout(). To be read; code that changes its elements calls
  /// write_master(). Throws bad_argument naming the path before materialise.
  const Tensor& master() const;
  /// The master, to be written: weight() is made again from it when it is read next, and has_values() is
  /// true from now on. Call it again for later writes.
  const Tensor& write_master();
  /// Whether its elements mean something: false from materialise() until write_master() is called, or
  /// set_master() with other memory.
  bool has_values() const noexcept { return has_values_; }
  /// They mean nothing any more, or not yet: its memory was replaced before it had values.
  void forget_values() noexcept { has_values_ = false; }
  /// How often the master was written or replaced: code that keeps something computed from it sees here
  /// whether that is out of date.
  std::uint64_t master_version() const noexcept { return master_version_; }
  /// Puts another tensor in its place (a loaded checkpoint): f32, of the local shape of its own layout, which
  /// becomes layout(), or of layout() where it is plain. Throws layout for a Partial one, or for another
  /// layout while there is a gradient, and bad_argument if the shape changes while somebody has claimed
  /// the gradient.
  void set_master(Tensor master);

  /// The tensor that layers read: of dtype(), with a layout of its own. Throws bad_argument naming the path
  /// before materialise.
  const Tensor& weight() const;
  /// If weight() is the rounded master: a number of its values, never 0, which no other values of this
  /// parameter have; code that keeps something computed from them sees here whether that is out of date. 0 if
  /// weight() is the master itself, or was placed: then changes of elements are not counted. Throws as
  /// weight().
  std::uint64_t weight_version() const;
  /// A number from materialise() that no other parameter of this process gets, whatever the Compute; 0
  /// before.
  std::uint64_t number() const noexcept { return number_; }
  /// Layers read `weight` from now on, until drop_weight(): of dtype(), of any layout for global_shape() that
  /// is not Partial (or plain and whole). Gradients then have its shape. Throws bad_argument or layout if it
  /// does not fit, while there is a gradient of another shape, and where the shape changes while somebody has
  /// claimed the gradient. `owner`: the code that claimed it may change the shape, and handles the gradient.
  void place_weight(Tensor weight, const void* owner = nullptr);
  /// Back to the master.
  void drop_weight() noexcept;

  // --- the gradient: f32, of the local shape of weight() ---

  bool has_gradient() const noexcept { return has_gradient_; }
  /// The sum of all uses since zero_gradient(), carrying the gradient's layout: Shard where the weight is,
  /// Partial(sum) over axes along which ranks used it on different data, Replicate where they used it on the
  /// same. Null layout: plain. Throws bad_argument naming the path where no use has been accumulated.
  const Tensor& gradient() const;
  /// The gradient's layout; null if plain or not yet accumulated.
  LayoutRef gradient_layout() const noexcept { return gradient_layout_; }
  /// States that the gradient's elements have been changed in place to what this layout says (it was
  /// reduced). Throws layout if it is not for global_shape(), or gives this rank another shape.
  void set_gradient_layout(LayoutRef layout);
  /// Puts a reduced gradient in the place of the one that uses made: f32, of the local shape of its layout,
  /// which is for global_shape() (this rank's shard of it, after a reduce_scatter). Throws bad_argument if
  /// it does not fit, and while somebody has claimed the gradient.
  void set_gradient(Tensor gradient);
  /// For the code that has claimed the gradient: takes it out. The parameter has none afterwards and keeps
  /// no memory for one. Throws bad_argument if there is none, and where somebody else has claimed it.
  Tensor take_gradient(const void* owner);
  /// For the code that has claimed the gradient: puts one there, f32, of the local shape of its layout,
  /// which is for global_shape(), or plain and whole; it need not be that of weight(). Throws as
  /// set_gradient(), and where somebody else has claimed it.
  void give_gradient(Tensor gradient, const void* owner);
  /// `owner` alone may place_gradient() from now on, until release_gradient(owner). Throws bad_argument if
  /// somebody else has claimed it: `parameter "w": its gradient belongs to another reducer already`. `owner`
  /// is compared, not used.
  void claim_gradient(const void* owner);
  void release_gradient(const void* owner) noexcept;
  /// The gradient lives in `memory` from now on (a view of a bucket: f32, the shape of weight(), on its
  /// device); a gradient already there is copied.
  void place_gradient(Tensor memory);
  /// States that the gradient's memory holds a gradient of that layout (zeros, put there by its owner).
  /// Throws as set_gradient_layout() does.
  void state_gradient(LayoutRef layout);
  /// Forgets the gradient; costs nothing, since the next use overwrites it.
  void zero_gradient() noexcept;

  /// Adds one use's gradient; nothing if the parameter is frozen. `dw`: f32, the shape of weight(); its
  /// layout is for global_shape() and that of the uses before it since zero_gradient() (layout error that
  /// names both).
  void accumulate(const Tensor& dw);
  /// The same without a temporary: `write(into, add)` overwrites `into`, or adds to it where `add`.
  void accumulate(LayoutRef layout, const std::function<void(const Tensor& into, bool add)>& write);

  /// How many modules hold it: more than one for a tied weight.
  int holders() const noexcept { return holders_; }
  using Listener = std::function<void(Parameter&)>;
  /// Called when a gradient is final: Module::backward calls announce_final() after as many uses as the
  /// forward passes on that Frame made. Returns a number for stop_listening. A listener may add others and
  /// take any away.
  int listen(Listener listener);
  void stop_listening(int id);
  /// Calls the listeners; nothing if there is no gradient. For code that accumulates without a Module.
  void announce_final();

 private:
  friend class Module;
  void make_gradient();
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
  mutable Tensor rounded_;  // the master as dtype(), if that is not f32
  mutable bool rounded_is_old_ = true;
  bool has_values_ = false;
  std::uint64_t master_version_ = 0;
  std::uint64_t number_ = 0;
  Tensor placed_;  // by place_weight(); null: none
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
