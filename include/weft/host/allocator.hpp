// An allocator of the program that weft runs in, for Memory::local. ContextOptions::allocator takes one.
#pragma once

#include <cstddef>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Two functions and their first argument. Both are set, or neither: then weft has memory of its own.
///
/// Each block of local memory is one call of allocate(), and one of deallocate() when its last owner goes.
/// weft keeps no free block for later: with an allocator that keeps them, a step does not pay for the first
/// touch of pages. The sizes of one training step are those of the next.
///
/// From it come: every Storage and Tensor in Memory::local on the CPU (weights, optimizer states, activations
/// and all else that a Frame keeps and no other rank maps), those in Memory::shared where shared memory
/// cannot be had, what Context::device(Device{}) allocates, the staging buffers of operations that are
/// composed over a transport, messages that no receive waits for yet over a transport of a C program's own,
/// and scratch memory of the kernels of a Compute.
///
/// Not from it come: Memory::shared (segments of shared memory that peers map: gradient buckets, what
/// boundaries and redistributions communicate) and the memory that a transport over shared memory makes for
/// itself; memory of other devices, which is their runtime's; messages that no receive waits for yet over
/// weft's other transports, and buffers of plug-ins; what libraries under weft allocate (oneDNN, an MPI);
/// tables of rotary positions (RopeTables); parts of files while a checkpoint is read or written; and control
/// objects (groups, calls, layouts, names, traces), which are made by operator new.
///
/// Both functions are called from any thread, also by several at once, perhaps with locks of weft's held:
/// they must not call weft. They live as long as the Context. In a child made by fork() neither is called
/// for memory of the parent.
struct Allocator {
  /// `bytes` bytes at a multiple of `alignment`, uninitialised. `alignment` is 64, `bytes` a multiple of it
  /// and not 0. Null, a misaligned address (which is given back at once), and an exception become an Error
  /// `system` of the call that allocates, naming bytes and alignment.
  void* (*allocate)(void* data, std::size_t bytes, std::size_t alignment) = nullptr;
  /// Takes back what allocate() gave, with the same sizes. An exception is logged as a warning, and goes no
  /// further.
  void (*deallocate)(void* data, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
  void* data = nullptr;  ///< handed to both
};

}  // namespace weft
