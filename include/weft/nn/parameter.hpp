// A weight of a model: value, gradient, and what is true of each over the mesh. Used by the rank (thread)
// that owns the model; not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"
#include "weft/nn/init.hpp"

namespace weft {

/// Life: made with a global shape and no memory → `set_layout` may shard it → `materialise` gives it memory →
/// `initialise` or a checkpoint gives it values. Layers read value() at each use and never keep it on a
/// Frame, so a sharded data parallel may swap it between uses.
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
  /// What this rank holds of it: by layout(), the global shape where that is null.
  Shape local_shape() const;
  const Init& init() const noexcept { return init_; }
  void set_init(Init init) noexcept { init_ = init; }
  /// Whether weight decay applies to it. Default: where it has two dimensions or more.
  bool decays() const noexcept { return decays_; }
  void set_decays(bool decays) noexcept { decays_ = decays; }

  /// The value's layout over the root mesh; null: plain, one rank.
  LayoutRef layout() const noexcept { return layout_; }
  /// Before materialise only (bad_argument after). Throws layout where its global shape is not
  /// global_shape().
  void set_layout(LayoutRef layout);

  /// Allocates the local value, uninitialised. Throws bad_argument where it has memory already.
  void materialise(Context& context, Memory memory = Memory::local);
  bool materialised() const noexcept { return static_cast<bool>(value_); }
  /// f32, of local_shape(), carrying layout(). Throws bad_argument naming the path before materialise.
  const Tensor& value() const;
  /// Puts another tensor in its place (unsharded weights, a loaded checkpoint): f32, of the local shape of its own
  /// layout, which becomes layout(), or of layout() where it is plain. Throws layout for a Partial one, or for another
  /// layout while there is a gradient.
  void set_value(Tensor value);

  // --- the main gradient: f32, of the value's local shape ---

  bool has_gradient() const noexcept { return has_gradient_; }
  /// The sum of all uses since zero_gradient(), carrying the gradient's layout: Shard where the value is,
  /// Partial(sum) over axes along which ranks used it on different data, Replicate where they used it on the
  /// same. Null layout: plain. Throws bad_argument naming the path where no use has been accumulated.
  const Tensor& gradient() const;
  /// The gradient's layout; null where plain or not yet accumulated.
  LayoutRef gradient_layout() const noexcept { return gradient_layout_; }
  /// States that the gradient's elements have been changed in place to what this layout says (it was
  /// reduced).
  void set_gradient_layout(LayoutRef layout);
  /// `owner` alone may place_gradient() from now on, until release_gradient(owner). Throws bad_argument where
  /// somebody else has claimed it: `parameter "w": its gradient belongs to another averager already`. `owner`
  /// is compared, not used.
  void claim_gradient(const void* owner);
  void release_gradient(const void* owner) noexcept;
  /// The gradient lives in `memory` from now on (a view of a bucket: f32, local shape); a gradient already
  /// there is copied.
  void place_gradient(Tensor memory);
  /// States that the gradient's memory holds a gradient of that layout (zeros, put there by its owner).
  void state_gradient(LayoutRef layout);
  /// Forgets the gradient; costs nothing, since the next use overwrites it.
  void zero_gradient() noexcept;

  /// Adds one use's gradient. `dw`: f32, local shape; its layout must be that of the uses before it since
  /// zero_gradient() (layout error that names both).
  void accumulate(const Tensor& dw);
  /// The same without a temporary: `write(into, add)` overwrites `into`, or adds to it where `add`.
  void accumulate(LayoutRef layout, const std::function<void(const Tensor& into, bool add)>& write);

  /// How many modules hold it: more than one for a tied weight.
  int holders() const noexcept { return holders_; }
  using Listener = std::function<void(Parameter&)>;
  /// Called when a gradient is final: Module::backward calls announce_final() after as many uses as the
  /// forward passes on that Frame made. Returns a number for stop_listening.
  int listen(Listener listener);
  void stop_listening(int id);
  /// Calls the listeners; nothing where there is no gradient. For who accumulates without a Module.
  void announce_final();

 private:
  friend class Module;
  Shape global_;
  Init init_;
  std::string path_;
  bool decays_;
  LayoutRef layout_ = nullptr;
  Context* context_ = nullptr;
  Tensor value_;
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
