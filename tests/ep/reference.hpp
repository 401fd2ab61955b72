// A mixture of experts in f64 by plain loops, forward and backward: what the library is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "weft/ep/moe.hpp"

namespace weft::test {

using Doubles = std::vector<double>;

// All numbers of a layer: weights, and after backward() their gradients. Row-major, as in the module.
struct ReferenceMoE {
  MoEConfig c;
  Doubles router, bias, gate, up, down;  // (E, d), (E), (E, h, d), (E, h, d), (E, d, h)
  Doubles shared_gate, shared_up, shared_down;
  std::int64_t sequences = 1;

  // results
  std::int64_t tokens = 0;
  std::vector<std::vector<int>> chosen, kept;  // kept: 1 or 0, by token and choice
  Doubles weights, y, dx, drouter, dbias, dgate, dup, ddown, dshared_gate, dshared_up, dshared_down;
  double aux = 0, z = 0;

  static double& at(Doubles& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; }
  static double at(const Doubles& v, std::int64_t i) { return v[static_cast<std::size_t>(i)]; }
  double activation(double u) const {
    switch (c.kind) {
      case ExpertKind::swiglu:
      case ExpertKind::silu: return u / (1 + std::exp(-u));
      case ExpertKind::gelu: return u * 0.5 * std::erfc(-u / std::sqrt(2.0));
      case ExpertKind::relu: return std::max(u, 0.0);
    }
    return 0;
  }
  double slope(double u) const {
    const double s = 1 / (1 + std::exp(-u));
    switch (c.kind) {
      case ExpertKind::swiglu:
      case ExpertKind::silu: return s * (1 + u * (1 - s));
      case ExpertKind::gelu:
        return 0.5 * std::erfc(-u / std::sqrt(2.0)) +
               u * std::exp(-u * u / 2) / std::sqrt(2 * 3.14159265358979323846);
      case ExpertKind::relu: return u > 0 ? 1 : 0;
    }
    return 0;
  }

  // y += factor · ffn(x of a token); with dy: dx and weight gradients, returns dy · ffn(x).
  double ffn(const double* x, const Doubles& g, const Doubles& u, const Doubles& d, std::int64_t e,
             std::int64_t hidden, bool gated, double factor, double* out, const double* dy, double* dx_row,
             Doubles* dg, Doubles* du, Doubles* dd) const {
    const std::int64_t dim = c.dim;
    double product = 0;
    Doubles a(static_cast<std::size_t>(hidden)), b(static_cast<std::size_t>(hidden)),
        h(static_cast<std::size_t>(hidden));
    for (std::int64_t j = 0; j < hidden; ++j) {
      for (std::int64_t i = 0; i < dim; ++i) {
        if (gated) at(a, j) += at(g, (e * hidden + j) * dim + i) * x[i];
        at(b, j) += at(u, (e * hidden + j) * dim + i) * x[i];
      }
      at(h, j) = gated ? activation(at(a, j)) * at(b, j) : activation(at(b, j));
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < hidden; ++j) sum += at(d, (e * dim + i) * hidden + j) * at(h, j);
      if (out != nullptr) out[i] += factor * sum;
      if (dy != nullptr) product += dy[i] * sum;
    }
    if (dy == nullptr) return 0;
    for (std::int64_t j = 0; j < hidden; ++j) {
      double dh = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        dh += at(d, (e * dim + i) * hidden + j) * factor * dy[i];
        at(*dd, (e * dim + i) * hidden + j) += factor * dy[i] * at(h, j);
      }
      const double db = gated ? dh * activation(at(a, j)) : dh * slope(at(b, j));
      const double da = gated ? dh * at(b, j) * slope(at(a, j)) : 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        at(*du, (e * hidden + j) * dim + i) += db * x[i];
        dx_row[i] += db * at(u, (e * hidden + j) * dim + i);
        if (!gated) continue;
        at(*dg, (e * hidden + j) * dim + i) += da * x[i];
        dx_row[i] += da * at(g, (e * hidden + j) * dim + i);
      }
    }
    return product;
  }

  // x, dy: (tokens, dim). Losses have the factors of the options.
  void run(const Doubles& x, const Doubles& dy) {
    const std::int64_t E = c.experts, dim = c.dim, K = c.router.top_k;
    tokens = static_cast<std::int64_t>(x.size()) / dim;
    const RouterOptions& o = c.router;
    const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    Doubles logits(size(tokens * E)), with_bias(size(tokens * E)), scores(size(tokens * E)),
        lse(size(tokens)), dscores(size(tokens * E));
    chosen.assign(size(tokens), {});
    kept.assign(size(tokens), std::vector<int>(size(K), 1));
    weights.assign(size(tokens * K), 0);
    y.assign(x.size(), 0), dx.assign(x.size(), 0);
    for (auto [to, like] : {std::pair{&drouter, &router},
                            {&dbias, &bias},
                            {&dgate, &gate},
                            {&dup, &up},
                            {&ddown, &down},
                            {&dshared_gate, &shared_gate},
                            {&dshared_up, &shared_up},
                            {&dshared_down, &shared_down}})
      to->assign(like->size(), 0);
    Doubles counts(size(E));
    for (std::int64_t t = 0; t < tokens; ++t) {
      double sum = 0, largest = -1e300;
      for (std::int64_t e = 0; e < E; ++e) {
        double& l = at(logits, t * E + e);
        for (std::int64_t i = 0; i < dim; ++i) l += at(x, t * dim + i) * at(router, e * dim + i);
        largest = std::max(largest, l);
      }
      for (std::int64_t e = 0; e < E; ++e) sum += std::exp(at(logits, t * E + e) - largest);
      at(lse, t) = largest + std::log(sum);
      for (std::int64_t e = 0; e < E; ++e)
        at(with_bias, t * E + e) = at(logits, t * E + e) + (o.bias == RouterBias::weighs ? at(bias, e) : 0);
      double all_scores = 0;
      for (std::int64_t e = 0; e < E; ++e) {
        const double l = at(with_bias, t * E + e);
        at(scores, t * E + e) = o.scores == RouterScores::softmax ? std::exp(l) : 1 / (1 + std::exp(-l));
        all_scores += at(scores, t * E + e);
      }
      for (std::int64_t e = 0; o.scores == RouterScores::softmax && e < E; ++e)
        at(scores, t * E + e) /= all_scores;
      std::vector<int> order(size(E));
      for (int e = 0; e < E; ++e) order[size(e)] = e;
      const auto key = [&](int e) {
        return at(scores, t * E + e) + (o.bias == RouterBias::selects ? at(bias, e) : 0);
      };
      std::ranges::stable_sort(order, [&](int a, int b) { return key(a) > key(b); });
      chosen[size(t)].assign(order.begin(), order.begin() + K);
      double all = 0;
      for (const int e : chosen[size(t)]) all += at(scores, t * E + e), at(counts, e) += 1;
      for (std::int64_t k = 0; k < K; ++k)
        at(weights, t * K + k) = at(scores, t * E + chosen[size(t)][size(k)]) / (o.normalise ? all : 1);
    }
    drop(counts);
    const double mean = static_cast<double>(tokens * K) / static_cast<double>(E);
    for (std::int64_t t = 0; t < tokens; ++t) {
      double through = 0, all = 0;
      Doubles dweight(size(K));
      for (std::int64_t k = 0; k < K; ++k) {
        const int e = chosen[size(t)][size(k)];
        all += at(scores, t * E + e);
        if (kept[size(t)][size(k)] == 0) continue;
        const double scale = c.scale_outputs_by_load ? mean / at(counts, e) : 1;
        at(dweight, k) =
            scale * ffn(&x[size(t * dim)], gate, up, down, e, c.hidden, c.kind == ExpertKind::swiglu,
                        scale * at(weights, t * K + k), &y[size(t * dim)], &dy[size(t * dim)],
                        &dx[size(t * dim)], &dgate, &dup, &ddown);
        through += at(dweight, k) * at(weights, t * K + k);
      }
      for (std::int64_t k = 0; k < K; ++k) {
        double& d = at(dscores, t * E + chosen[size(t)][size(k)]);
        d += o.normalise ? (at(dweight, k) - through) / all : at(dweight, k);
      }
      if (c.shared_hidden > 0) {
        MoEConfig swiglu = c;
        swiglu.kind = ExpertKind::swiglu;
        ReferenceMoE other;
        other.c = swiglu;
        other.ffn(&x[size(t * dim)], shared_gate, shared_up, shared_down, 0, c.shared_hidden, true, 1,
                  &y[size(t * dim)], &dy[size(t * dim)], &dx[size(t * dim)], &dshared_gate, &dshared_up,
                  &dshared_down);
      }
    }
    const std::int64_t parts = o.balance == Balance::sequence ? sequences : 1, each = tokens / parts;
    aux = 0, z = 0;
    for (std::int64_t b = 0; b < parts; ++b) {
      Doubles share(size(E)), score(size(E));
      for (std::int64_t t = b * each; t < (b + 1) * each; ++t) {
        for (const int e : chosen[size(t)]) at(share, e) += 1.0 / static_cast<double>(each * K);
        for (std::int64_t e = 0; e < E; ++e)
          at(score, e) += at(scores, t * E + e) / static_cast<double>(each);
      }
      for (std::int64_t e = 0; e < E; ++e) {
        aux += static_cast<double>(E) * at(share, e) * at(score, e) / static_cast<double>(parts);
        for (std::int64_t t = b * each; t < (b + 1) * each; ++t)
          at(dscores, t * E + e) +=
              o.aux_loss * static_cast<double>(E) * at(share, e) / static_cast<double>(each * parts);
      }
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      z += at(lse, t) * at(lse, t) / static_cast<double>(tokens);
      double sum = 0;
      for (std::int64_t e = 0; e < E; ++e) sum += at(dscores, t * E + e) * at(scores, t * E + e);
      for (std::int64_t e = 0; e < E; ++e) {
        const double s = at(scores, t * E + e);
        double dl = o.scores == RouterScores::softmax ? s * (at(dscores, t * E + e) - sum)
                                                      : s * (1 - s) * at(dscores, t * E + e);
        if (o.bias == RouterBias::weighs) at(dbias, e) += dl;
        dl += o.z_loss * 2 * at(lse, t) / static_cast<double>(tokens) *
              std::exp(at(logits, t * E + e) - at(lse, t));
        for (std::int64_t i = 0; i < dim; ++i) {
          at(drouter, e * dim + i) += dl * at(x, t * dim + i);
          at(dx, t * dim + i) += dl * at(router, e * dim + i);
        }
      }
    }
  }

  void drop(const Doubles& counts) {
    const RouterOptions& o = c.router;
    const auto K = static_cast<std::size_t>(o.top_k);
    const double most = std::max(1.0, std::ceil(o.capacity_factor * static_cast<double>(tokens * o.top_k) /
                                                static_cast<double>(c.experts)));
    switch (o.capacity) {
      case Capacity::none: return;
      case Capacity::by_position:
      case Capacity::per_choice_and_rank: {
        std::vector<Doubles> taken(K, Doubles(counts.size()));
        for (std::size_t t = 0; t < chosen.size(); ++t)
          for (std::size_t k = 0; k < K; ++k) {
            double& count =
                taken[o.capacity == Capacity::by_position ? 0 : k][static_cast<std::size_t>(chosen[t][k])];
            kept[t][k] = count < most ? 1 : 0;
            count += 1;
          }
        return;
      }
      case Capacity::by_weight:
        for (std::size_t t = 0; t < chosen.size(); ++t)
          for (std::size_t k = 0; k < K; ++k) {
            double before = 0;  // better ones, or equal ones before it
            for (std::size_t s = 0; s < chosen.size(); ++s)
              for (std::size_t j = 0; j < K; ++j)
                if (chosen[s][j] == chosen[t][k])
                  before += weights[s * K + j] > weights[t * K + k] ||
                                    (weights[s * K + j] == weights[t * K + k] && s * K + j < t * K + k)
                                ? 1
                                : 0;
            kept[t][k] = before < most ? 1 : 0;
          }
    }
  }
};

}  // namespace weft::test
