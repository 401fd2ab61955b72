// Joins and applies the plans of modules that define themselves how they are split.
#pragma once

#include "weft/tp/parallelize.hpp"

namespace weft {

/// Returns the style of a name in an OwnPlan. These names are those of Style, and two more for a module whose
/// output several column layers take. One boundary after that module then sums the layers' dx:
///
///   feeds_columns   –        after: x of the column layers is whole; their dx are summed here, once
///   fed_column      column   no boundary of its own
///
/// Throws bad_argument for any other name. The text lists the names: `style "colums"; expected one of enter,
/// column, …`.
const Style& style_named(std::string_view name);

/// Whether any module of the tree has a plan of its own.
bool supports_tp(Module& root);

/// The treatment of a module whose plan names a layer with a spectral norm. By default weft does not split
/// such a layer, because a split spectral norm needs communication of its own in each pass.
enum class WholeByDefault : unsigned char {
  skip,  ///< all layers that the module's plan names stay whole, including the other layer of a pair
  split  ///< the layers are split like all other layers
};

struct OwnPlanOptions {
  WholeByDefault under_spectral_norm = WholeByDefault::skip;
};

/// The numbers of modules with plans of their own that were split and skipped.
struct OwnPlanCount {
  int split = 0, skipped = 0;
};

/// Calls parallelize() with the combined plans of all modules of the tree that have a plan. If a layer of a
/// module stays whole by default, the whole module is skipped: its plan and its units() are not used. Then
/// rank 0 of the root logs a warning with the numbers of split and skipped modules, or an error if nothing
/// was split. The program continues.
///
/// Throws the errors of parallelize(), before anything changes. Throws bad_argument if no module has a plan,
/// if a plan has columns but no rows or rows but no columns, if a plan has styles in addition to columns and
/// rows, and if a style does not exist. Each text names the module with the plan.
OwnPlanCount parallelize(Module& root, const DeviceMesh& axis, const OwnPlanOptions& options = {});

}  // namespace weft
