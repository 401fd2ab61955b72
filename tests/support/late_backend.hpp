// Collectives on the memory of late devices: shm, given the bytes where they truly are, on the terms of a transport
// with streams.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft::test {

/// Groups whose rank p of this process moves the memory of the late device cuda:<p>, which its Context has. A call
/// reads its input when its stream has done what it had been given before the call, and no other stream: so a call
/// with the wrong stream reads NaNs. The host waits where a stream would (Work::wait_on). The call begins when it
/// is posted, and later work of the device comes later still: a wait forgotten after it is mostly not seen.
BackendFactory late_collectives();

}  // namespace weft::test
