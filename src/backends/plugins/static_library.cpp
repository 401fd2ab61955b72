// Part of libweft.a: a plug-in would bring libweft.so along, a second weft in one process that knows nothing
// of the first.
#include "backends/plugins/linkage.hpp"

namespace weft {

bool has_plugins() { return false; }

}  // namespace weft
