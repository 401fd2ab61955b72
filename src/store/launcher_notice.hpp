// What a rank tells weft run, which started it, before it fails because others did: the launcher then names
// those, though their ends may be noticed later. tools/weft/launcher_notices.hpp is the other side. Any thread.
#pragma once

#include <string_view>

namespace weft {

/// "<job> <rank> others failed": a datagram to the abstract socket that WEFT_LAUNCHER names.
inline constexpr std::string_view kOthersFailed = "others failed";

/// This process's group failed because of other ranks. Nothing where no launcher listens; waits for at most a
/// tenth of a second.
void tell_launcher_that_others_failed() noexcept;

}  // namespace weft
