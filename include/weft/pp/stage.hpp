// The parts of a model that the stages of a pipeline compute. Used by the rank (thread) that owns the model.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/nn/frame.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {

/// Whether a path is that of `module`, or of something inside of it. Every path is inside of "".
bool is_inside(std::string_view path, std::string_view module) noexcept;

/// Modules of a model, in the order in which a forward pass goes through them: each gets the outputs of the
/// module before. Modules keep their paths, so names of parameters, initial values and random numbers do not
/// depend on the split. The model must outlive the stage.
class PipelineStage {
 public:
  /// `paths`: of modules of `model`. Throws the errors of Module::get().
  PipelineStage(Module& model, std::span<const std::string> paths);

  /// One after the other, and in reverse order.
  Tensors forward(Inputs x, Frame& frame) const;
  Tensors backward(Inputs dy, Frame& frame) const;
  /// Leaves the gradients of weights over; see Module::backward().
  Tensors backward(Inputs dy, Frame& frame, LeftOver& left_over) const;

  const std::vector<Module*>& modules() const noexcept { return modules_; }
  /// The parameters and buffers of the modules, each once.
  std::vector<Parameter*> parameters() const;
  std::vector<ModuleBuffer*> buffers() const;

 private:
  std::vector<Module*> modules_;
};

/// A weight that several modules use, such as that of an embedding and of a head. In a pipeline each use has
/// a Parameter, and so a gradient, of its own, also where two uses are on one rank: the gradient of each use
/// is summed over the micro-batches alone, and the sums are added once, in the order of `uses`. So its bits
/// do not depend on the number of stages.
struct TiedWeight {
  /// All with the path, and so with the initial values, of the first, that of the module that made the
  /// weight.
  std::vector<ParameterRef> uses;
  std::vector<std::string> modules;  ///< the path of the module of each use
};
/// Gives each use of each tied weight a Parameter of its own, with the same layout, dtype and settings. Call
/// it after the layouts are final, and before the weights have memory; a Pipeline then needs the result.
/// Throws bad_argument if a weight has memory, or if it is tied to a module that is no Linear.
std::vector<TiedWeight> untie(Module& model);

/// The paths of the modules through which a forward pass goes, from patterns in the order of the pass:
/// {"token_embedding", "layers.*", "norm", "output_head"}. The modules that one pattern matches have the
/// order in which they were registered. Throws bad_argument if a pattern matches nothing, a module is in the
/// list twice or inside of another one, a parameter or buffer of the model is in no module, or a module
/// around them has boundaries of its own.
std::vector<std::string> pipeline_path(Module& model, std::span<const std::string> patterns);

/// Cuts a list of modules into stages of neighbours so that the heaviest stage is as light as possible; of
/// several such cuts it takes the one with more modules in earlier stages. `weights`: the time that each
/// module takes, in any unit; empty: all take equally long. Throws bad_argument unless there are as many
/// weights as modules, 0 or more each, and 1 to as many stages as modules.
std::vector<std::vector<std::string>> split_stages(std::span<const std::string> modules, int stages,
                                                   std::span<const double> weights = {});

}  // namespace weft
