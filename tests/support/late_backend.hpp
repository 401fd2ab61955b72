// Collectives on the memory of late devices: shm, given copies of what truly is there, on the terms of a
// transport with streams.
#pragma once

#include "weft/backends/backend.hpp"

namespace weft::test {

/// Groups whose rank p of this process moves the memory of the late device cuda:<p>, which its Context has. A
/// call is as late as it can be:
///
/// - It begins when the program first waits for it or polls it, and not when it is posted. It reads its input
/// when its stream has done the work that was queued until then, and no other stream. So a call with the
/// wrong stream, and a call whose input is written after it was posted, has a wrong number.
/// - Its output holds NaNs from then until the Work is waited for, or is found done, or until a stream that
///   waits for it (Work::wait_on) runs. Before the result is written for the host, the call's stream runs all
///   of its queued work, so work that was queued without a wait for the call reads NaNs.
///
/// One mistake is not detected: a forgotten wait for a call that another wait of the same rank has found
/// done, before anything was queued on the stream.
BackendFactory late_collectives();

}  // namespace weft::test
