// The common part of losses: the layout of the loss, which is one number, and the checks of its divisor.
// Included only inside nn.
#pragma once

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::losses {

/// Partial(sum) on axes that split the argument of the loss, since each rank has the part of the sum of its
/// own elements.
inline LayoutRef loss_layout(const LayoutRef& terms) {
  if (terms == nullptr) return nullptr;
  Placements placements = terms->placements;
  for (Placement& p : placements)
    if (is_shard(p)) p = Partial{};
  return make_layout(terms->mesh(), std::move(placements), {1});
}

inline bool is_split(const LayoutRef& terms) {
  for (std::size_t a = 0; terms != nullptr && a < terms->placements.size(); ++a)
    if (is_shard(terms->placements[a]) && terms->mesh_shape().size(static_cast<int>(a)) > 1) return true;
  return false;
}

inline void expect_one(const char* loss, const char* what, const Tensor& t) {
  if (t.count() != 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} has {} elements; expected 1", loss, what, t.count()));
}

/// Words of errors about the number that divides a loss.
struct CountWords {
  const char *meaning, *of,
      *how;  // "the number of valid tokens of all ranks", "logits", "global_valid(context, labels)"
};

/// Throws unless `count` is one i64 and, if several ranks have a part, is declared as the count of all ranks.
/// `layout`: the layout of the tensor that the words name. `terms`: the layout of the terms of the sum.
inline void expect_count_of_all(const char* loss, const char* name, const Tensor& count,
                                const LayoutRef& layout, const LayoutRef& terms, const CountWords& words) {
  if (count.dtype() != DType::i64)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected i64", loss, name, weft::name(count.dtype())));
  expect_one(loss, name, count);
  if (count.layout() && !count.layout()->replicated())
    throw Error(ErrorCode::layout,
                fmt::format("{}: {} is {}; it is {}", loss, name, to_string(*count.layout()), words.meaning));
  if (count.layout() == nullptr && is_split(terms))
    throw Error(
        ErrorCode::layout,
        fmt::format(
            "{}: {} is a plain tensor; where {} are {} it must be stated as the number of all ranks: {}, or "
            "scalar(mesh, n)",
            loss, name, words.of, to_string(*layout), words.how));
}

inline void expect_gradient_of_loss(const char* loss, const Tensor& gradient) {
  if (gradient.dtype() != DType::f64)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: d(loss) is {}; expected f64", loss, name(gradient.dtype())));
  expect_one(loss, "d(loss)", gradient);
}

}  // namespace weft::losses
