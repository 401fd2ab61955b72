// Part of the shared libweft, to which plug-ins are linked. libweft.a has static_library.cpp in its place.
#include "backends/plugins/linkage.hpp"

namespace weft {

bool has_plugins() { return true; }

}  // namespace weft
