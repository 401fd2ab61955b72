// apply_float8 in its parts. Private to train and models.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "weft/train/float8.hpp"

namespace weft {

/// apply_float8 without the comparison of what ranks were given, and without communication: ModelBuilder's,
/// since building a model is arithmetic, and Trainer::step() compares.
/// `here`: whether the layer of this path is of this rank; the report has the whole model. Null: all are.
std::unique_ptr<Float8Model> convert_linears(Module& model, Float8Recipe recipe, const Float8Options& options,
                                             const std::function<bool(const std::string& path)>& here = {});

}  // namespace weft
