// Whether this weft is libweft.so, which plug-ins are linked to, or a part of a program (libweft.a).
#pragma once

namespace weft {

bool has_plugins();

}  // namespace weft
