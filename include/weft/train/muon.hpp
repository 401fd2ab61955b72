// Muon: an optimizer whose step of a matrix has singular values near 1. Used by the rank (thread) that owns
// the model.
#pragma once

#include <string>
#include <vector>

#include "weft/mesh/mesh.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft {

/// K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024:
///
///   m ← μ·m + (1−μ)·g,  u = nesterov ? μ·m + (1−μ)·g : m,  O = NewtonSchulz(u),  W ← W − lr·wd·W − lr·s·O
///
/// NewtonSchulz(u) brings the singular values of u near 1: X = u/max(|u|, eps), with |u| the Frobenius norm,
/// then `iterations` times X ← 3.4445·X + (−4.775·A + 2.0315·A²)·X with A = X·Xᵀ (of the transpose, if there
/// are more rows than columns). It works on the whole matrix, however its layout cuts it. Each rank of
/// Options::axes computes O for a share of the matrices and sends it to the others, so step() is collective
/// over these ranks and needs memory for as many whole matrices. It throws mismatch on all of them, naming
/// the matrix, if they have other lists of matrices. If it throws on one rank only (no gradient), the others
/// wait for it until their deadline, and their states may have changed. All products are f32. The result has
/// the same bits on all ranks, and on all meshes for equal gradients.
///
/// Parameters of one, three and more dimensions, those that do not decay (gains and biases of norms), and
/// those that a pattern of `adamw_for` matches are trained by AdamW with the same learning rate and decay:
/// usually the embedding and the head. State of a matrix: "muon_momentum", "step"; of others, that of
/// AdamW.
class Muon : public Optimizer {
 public:
  /// The factor s of a matrix of (rows, columns).
  enum class Scale : unsigned char {
    /// 0.2·√max(rows, columns): steps are as large as those of AdamW, so that its learning rates and decays
    /// can be used. J. Liu et al., "Muon is Scalable for LLM Training", 2025.
    like_adamw,
    /// √max(1, rows/columns), as in the first paper
    original
  };
  struct Options {
    double momentum = 0.95;
    bool nesterov = true;
    double weight_decay = 0.1;  ///< for parameters with Parameter::decays()
    double eps = 1e-7;
    int iterations = 5;
    Scale scale = Scale::like_adamw;
    /// Patterns for paths of parameters, or of modules with all parameters below them.
    std::vector<std::string> adamw_for = {};
    double adamw_beta1 = 0.9, adamw_beta2 = 0.95, adamw_eps = 1e-8;
    /// The ranks that share the work: they have the same list of matrices, and between them all parts of
    /// each. Empty: all axes of the mesh of the masters. In a stage of a pipeline: the axes without that of
    /// the stages.
    DeviceMesh axes = {};
    /// Throws bad_argument, naming the option, if an option is out of range.
    void check() const;
  };
  /// Also throws bad_argument for a pattern of `adamw_for` that matches none of the parameters.
  Muon(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
       std::vector<ParameterGroup> groups = {});

  /// Whether this optimizer treats the parameter as a matrix.
  bool is_matrix(const Parameter& parameter) const;

 private:
  void update(const Item& item) override;
  void update_all(std::span<const Item> items) override;
  Tensor momentum_of(const Item& item);
  void orthogonalise(const Tensor& whole);
  Options options_;
};

}  // namespace weft
