// Which way of copying between processes is faster on this machine. No state; any thread.
#pragma once

namespace weft {

/// Whether bytes go faster from one process to another through memory that both map, copied twice, than by
/// the kernel's single copy (process_vm_readv). On AMD's processors from Zen 3 on: their instruction for
/// strings, by which memcpy copies what is long, writes lines without fetching them first. A property of the
/// processor, so the same for all processes of a host (docs/decisions/2026-11-25-staging-or-the-kernel.md).
bool staging_beats_kernel_copies() noexcept;

}  // namespace weft
