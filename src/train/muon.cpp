#include "weft/train/muon.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "mesh/same_list.hpp"
#include "nn/optimizer_options.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

std::uint64_t digest_of_options(const Muon::Options& o) {
  Fnv1a hash;
  hash.add(std::string_view("muon"));
  for (const double x : {o.momentum, o.weight_decay, o.eps, o.adamw_beta1, o.adamw_beta2, o.adamw_eps})
    hash.add(std::bit_cast<std::uint64_t>(x));
  hash.add(digest_of(static_cast<int>(o.nesterov), o.iterations, static_cast<int>(o.scale)));
  for (const std::string& pattern : o.adamw_for) hash.add(pattern), hash.add(std::string_view("\n"));
  return hash.value;
}

// The ranks that share the work; empty: this rank alone.
DeviceMesh mesh_of(const Muon::Options& options, const Parameter& p) {
  if (options.axes) return options.axes;
  const LayoutRef& layout = p.master().layout();
  return layout == nullptr ? DeviceMesh() : layout->mesh().root();
}

// Throws mismatch on all ranks of `mesh` if their lists of matrices differ.
void expect_same_matrices(const DeviceMesh& mesh, const std::vector<Parameter*>& matrices) {
  const auto digest_of_matrix = [&](std::size_t i) {
    const Parameter& p = *matrices[i];
    return digest_of_view(p.path(), p.master().view(), p.master().layout());
  };
  ListDigest digest;
  for (std::size_t i = 0; i < matrices.size(); ++i) digest.add(digest_of_matrix(i));
  gather_with_list("muon", mesh, digest, {}, [&] {
    return ListEntries{"matrix", matrices.size(), digest_of_matrix, [&](std::size_t i) {
                         const Parameter& p = *matrices[i];
                         return text_of_view(p.path(), p.master().view(), p.master().layout());
                       }};
  });
}

// to = a·to + b·from, as a step of SGD, which every device that trains computes. With a small `a`, one step
// would lose digits of `from` if `to` is much larger.
void blend(kernels::KernelContext& on, const Tensor& to, double a, double b, const Tensor& from) {
  const bool small = std::abs(a) < 0.5;
  if (a == 0)
    kernels::fill(on, to.data_ptr<float>(), 0.0f, to.count());
  else if (small)
    kernels::scale(on, to.data_ptr<float>(), static_cast<float>(a), to.count());
  kernels::sgd_step(on, to.data_ptr<float>(), nullptr, from.data_ptr<float>(), to.count(),
                    {-b, 0, small || b == 0 ? 0 : (a - 1) / b});
}

}  // namespace

void Muon::Options::check() const {
  check_option("momentum", momentum, 1);
  check_option("weight_decay", weight_decay, kNoLimit);
  check_option("adamw_beta1", adamw_beta1, 1);
  check_option("adamw_beta2", adamw_beta2, 1);
  check_eps("adamw_eps", adamw_eps);
  check_eps("eps", eps);
  if (iterations < 1 || iterations > 100)
    bad_optimizer(fmt::format("iterations is {}; expected 1 to 100", iterations));
}

Muon::Muon(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
           std::vector<ParameterGroup> groups)
    : Optimizer(compute, parameters, std::move(groups), digest_of_options(options), options.weight_decay),
      options_(options) {
  options.check();
  expect_patterns_match("adamw_for", options.adamw_for, parameters);
  begin([this](const Parameter& p) {
    return is_matrix(p) ? StateNames{{"muon_momentum"}} : StateNames{{"exp_avg", "exp_avg_sq"}};
  });
}

bool Muon::is_matrix(const Parameter& p) const {
  return p.global_shape().rank() == 2 && p.decays() &&
         std::ranges::none_of(options_.adamw_for,
                              [&](const std::string& pattern) { return matches_part(pattern, p.path()); });
}

void Muon::update(const Item& item) {
  Parameter& p = *item.parameter;
  kernels::adamw_step(kernels_of(compute()), p.write_master().data_ptr<float>(),
                      item.state->tensors[0].tensor.data_ptr<float>(),
                      item.state->tensors[1].tensor.data_ptr<float>(), p.gradient().data_ptr<float>(),
                      p.master().count(),
                      {item.lr, options_.adamw_beta1, options_.adamw_beta2, options_.adamw_eps,
                       item.weight_decay, item.step});
}

// This rank's part of u.
Tensor Muon::momentum_of(const Item& item) {
  kernels::KernelContext& on = kernels_of(compute());
  const Tensor& m = item.state->tensors[0].tensor;
  const Tensor g = item.parameter->gradient();
  blend(on, m, options_.momentum, 1 - options_.momentum, g);
  const Tensor u = compute().make(m.shape()).with_layout(m.layout());
  copy(compute().context(), m, u, compute().stream());
  if (options_.nesterov) blend(on, u, options_.momentum, 1 - options_.momentum, g);
  return u;
}

// whole ← NewtonSchulz(whole). whole: (rows, columns).
void Muon::orthogonalise(const Tensor& whole) {
  kernels::KernelContext& on = kernels_of(compute());
  const std::int64_t rows = whole.size(0), columns = whole.size(1);
  const bool turned = rows > columns;
  const std::int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  Tensor x = compute().make({m, n});
  if (turned)
    kernels::permute(on, whole.data_ptr<float>(), x.data_ptr<float>(), {{rows, columns}, {1, 0}});
  else
    copy(compute().context(), whole, x, compute().stream());
  const Tensor squares = compute().make({1}, DType::f64);
  kernels::sum_of_squares(on, x.data_ptr<float>(), squares.data_ptr<double>(), x.count());
  kernels::normalise(on, x.data_ptr<float>(), squares.data_ptr<double>(), options_.eps, x.count());
  Tensor a = compute().make({m, m}), b = compute().make({m, m}), next = compute().make({m, n});
  using kernels::Stored;
  for (int i = 0; i < options_.iterations; ++i) {
    kernels::matmul(on, x.data_ptr<float>(), Stored::plain, x.data_ptr<float>(), Stored::transposed,
                    a.data_ptr<float>(), m, m, n, false);
    kernels::matmul(on, a.data_ptr<float>(), Stored::plain, a.data_ptr<float>(), Stored::plain,
                    b.data_ptr<float>(), m, m, m, false);
    blend(on, b, 2.0315, -4.775, a);
    kernels::matmul(on, b.data_ptr<float>(), Stored::plain, x.data_ptr<float>(), Stored::plain,
                    next.data_ptr<float>(), m, n, m, false);
    blend(on, next, 1, 3.4445, x);
    std::swap(x, next);
  }
  if (turned)
    kernels::permute(on, x.data_ptr<float>(), whole.data_ptr<float>(), {{m, n}, {1, 0}});
  else
    copy(compute().context(), x, whole, compute().stream());
}

// Rounds of as many matrices as the mesh has ranks: all ranks gather each, rank i computes the i-th, then
// each rank sends its result.
void Muon::update_all(std::span<const Item> items) {
  std::vector<const Item*> matrices;
  for (const Item& item : items) {
    if (is_matrix(*item.parameter))
      matrices.push_back(&item);
    else
      update(item);
  }
  for (std::size_t i = 0; i < matrices.size();) {
    const DeviceMesh mesh = mesh_of(options_, *matrices[i]->parameter);
    std::vector<Parameter*> together;
    for (; i < matrices.size() && mesh_of(options_, *matrices[i]->parameter) == mesh; ++i)
      together.push_back(matrices[i]->parameter);
    if (mesh && mesh.size() > 1) expect_same_matrices(mesh, together);
  }
  for (std::size_t first = 0; first < matrices.size();) {
    const DeviceMesh mesh = mesh_of(options_, *matrices[first]->parameter);
    const int ranks = mesh ? mesh.size() : 1, rank = mesh ? mesh.rank() : 0;
    std::vector<Tensor> wholes;
    std::size_t end = first;
    for (; end < matrices.size() && end - first < static_cast<std::size_t>(ranks); ++end) {
      const Item& item = *matrices[end];
      if (end > first && !(mesh_of(options_, *item.parameter) == mesh)) break;
      const Tensor gathered = full(momentum_of(item));
      const Tensor whole = compute().make(gathered.shape(), DType::f32, Memory::shared);
      copy(compute().context(), gathered, whole, compute().stream());
      wholes.push_back(whole);
    }
    for (std::size_t i = 0; i < wholes.size(); ++i)
      if (static_cast<int>(i) == rank) orthogonalise(wholes[i]);
    if (ranks > 1 && !WEFT_MUTANT("muon_not_sent"))
      for (std::size_t i = 0; i < wholes.size(); ++i)
        mesh.group().broadcast(wholes[i], static_cast<int>(i)).wait();
    for (std::size_t i = 0; i < wholes.size(); ++i) {
      const Item& item = *matrices[first + i];
      Parameter& p = *item.parameter;
      const LayoutRef& layout = p.master().layout();
      const Tensor step = layout == nullptr ? wholes[i] : distribute(wholes[i], layout);
      const auto rows = static_cast<double>(wholes[i].size(0)),
                 columns = static_cast<double>(wholes[i].size(1));
      const double s = options_.scale == Scale::original ? std::sqrt(std::max(1.0, rows / columns))
                                                         : 0.2 * std::sqrt(std::max(rows, columns));
      blend(kernels_of(compute()), p.write_master(), 1 - item.lr * item.weight_decay, -item.lr * s, step);
    }
    first = end;
  }
}

}  // namespace weft
