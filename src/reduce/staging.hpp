// Decides which way of copying between processes is faster on this machine. The function has no state; any
// thread may call it.
#pragma once

namespace weft {

/// Returns whether two copies through memory that both processes map take less time than the kernel's
/// single copy (process_vm_readv). This is so on AMD's processors from Zen 3 on. Their string instruction,
/// by which memcpy copies long runs, writes lines without fetching them first. It is a property of the
/// processor, so it is equal for all processes of a host
/// (docs/decisions/2026-11-25-staging-or-the-kernel.md).
bool staging_beats_kernel_copies() noexcept;

}  // namespace weft
