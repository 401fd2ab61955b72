// Part of libweft.a: a plug-in would load libweft.so too, a second weft in the process that knows nothing of
// the first.
#include "backends/plugins/linkage.hpp"

namespace weft {

bool has_plugins() { return false; }

}  // namespace weft
