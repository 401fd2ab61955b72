// Whether this weft is libweft.so, to which plug-ins are linked, or a part of a program (libweft.a).
#pragma once

namespace weft {

bool has_plugins();

}  // namespace weft
