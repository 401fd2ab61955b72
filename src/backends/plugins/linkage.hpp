// Tells whether this code is in libweft.so, to which plug-ins are linked, or in a program (libweft.a).
#pragma once

namespace weft {

bool has_plugins();

}  // namespace weft
