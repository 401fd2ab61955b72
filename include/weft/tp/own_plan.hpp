// Modules that define how they are split: joins their plans, and applies them.
#pragma once

#include "weft/tp/parallelize.hpp"

namespace weft {

/// The names of styles in an OwnPlan: those of Style, and one for a module that feeds several column layers;
/// one boundary after that module sums their dx:
///
///   feeds_columns   –        after: x of the column layers is whole; their dx are summed here, once
///   fed_column      column   no boundary of its own
///
/// Throws bad_argument for any other, with the list: `style "colums"; expected one of enter, column, …`.
const Style& style_named(std::string_view name);

/// Whether any module of the tree has a plan of its own.
bool supports_tp(Module& root);

/// The treatment of a module whose plan names a layer with a spectral norm. It is better not to split such a
/// layer, because a split layer needs its own communication in each pass.
enum class WholeByDefault : unsigned char {
  skip,  ///< all layers that the module's plan names stay whole, including the other layer of a pair
  split  ///< it is split like all other layers
};

struct OwnPlanOptions {
  WholeByDefault under_spectral_norm = WholeByDefault::skip;
};

/// Modules with plans of their own.
struct OwnPlanCount {
  int split = 0, skipped = 0;
};

/// parallelize() with the combined plans of all modules of the tree that have one. If a layer of a module
/// stays whole by default, the whole module is skipped: its plan and its units() are not used. Then rank 0 of
/// the root logs a warning with the numbers of split and skipped modules, or an error if nothing was split;
/// the program continues.
///
/// Throws the errors of parallelize(), before anything changes. Throws bad_argument if no module has a plan,
/// if a plan has columns but no rows or rows but no columns, if it has both these and styles, and if a style
/// does not exist; each text names the module with the plan.
OwnPlanCount parallelize(Module& root, const DeviceMesh& axis, const OwnPlanOptions& options = {});

}  // namespace weft
