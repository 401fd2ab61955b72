// Part of libweft.a. A plug-in would also load libweft.so, a second weft in the process, which would not know
// the first one.
#include "backends/plugins/linkage.hpp"

namespace weft {

bool has_plugins() { return false; }

}  // namespace weft
