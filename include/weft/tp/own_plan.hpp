// Modules that define how they are split: joins their plans, and applies them.
#pragma once

#include "weft/tp/parallelize.hpp"

namespace weft {

/// The names of styles in an OwnPlan: those of Style, and of a module that feeds several column layers, whose
/// dx are then summed by one boundary behind it:
///
///   feeds_columns   –        after: x of the column layers is whole; their dx are summed here, once
///   fed_column      column   no boundary of its own
///
/// Throws bad_argument for any other, with the list: `style "colums"; expected one of enter, column, …`.
const Style& style_named(std::string_view name);

/// Whether any module of the tree has a plan of its own.
bool supports_tp(Module& root);

/// The treatment of a module whose plan names a layer that is better left whole, since a split of it takes
/// communication of its own in each pass: a layer with a spectral norm.
enum class WholeByDefault : unsigned char {
  skip,  ///< all that the module's plan names stays whole, the other layer of a pair, too
  split  ///< it is split as all others are
};

struct OwnPlanOptions {
  WholeByDefault under_spectral_norm = WholeByDefault::skip;
};

/// Modules with plans of their own.
struct OwnPlanCount {
  int split = 0, skipped = 0;
};

/// parallelize() with the plans of all modules of the tree that have one, put together. A module of which a
/// layer stays whole by default is skipped altogether: its plan and its units() are not used. A warning in
/// the log of rank 0 of the root says how many were split and how many skipped, an error of the log that
/// nothing was split; the program goes on.
///
/// Throws as parallelize() does, before anything changes, and bad_argument if no module has a plan, for a
/// plan with columns but no rows or the reverse, or with styles beside them, and for a style that is not
/// there; each text names the module whose plan it is.
OwnPlanCount parallelize(Module& root, const DeviceMesh& axis, const OwnPlanOptions& options = {});

}  // namespace weft
