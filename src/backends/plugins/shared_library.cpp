// Part of the shared libweft: plug-ins are linked to it. libweft.a has static_library.cpp in its place.
#include "backends/plugins/linkage.hpp"

namespace weft {

bool has_plugins() { return true; }

}  // namespace weft
