// An allocator of the program, for Memory::local. ContextOptions::allocator takes one.
#pragma once

#include <cstddef>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Two functions and their first argument. Set both functions, or neither: without them weft allocates memory
/// itself.
///
/// For each block of local memory weft calls allocate() once, and deallocate() once when the last owner of
/// the block is destroyed. weft keeps no free block for later. All training steps allocate the same sizes, so
/// if the allocator keeps free blocks, a step does not pay for the first touch of pages.
///
/// weft takes from the allocator: every Storage and Tensor in Memory::local on the CPU (weights, optimizer
/// states, activations and everything else that a Frame keeps and no other rank maps), those in
/// Memory::shared if shared memory is not available, memory that Context::device(Device{}) allocates, the
/// staging buffers of operations that are composed over a transport, messages that no receive waits for yet
/// over a transport of a C program's own, and scratch memory of the kernels of a Compute.
///
/// weft does not take from the allocator: Memory::shared (segments of shared memory that peers map: gradient
/// buckets, tensors that boundaries and redistributions communicate) and memory that a transport over shared
/// memory makes for itself; memory of other devices, which comes from their runtime; messages that no receive
/// waits for yet over weft's other transports, and buffers of plug-ins; what libraries under weft allocate
/// (oneDNN, an MPI); tables of rotary positions (RopeTables); parts of files while a checkpoint is read or
/// written; and control objects (groups, calls, layouts, names, traces), which are made by operator new.
///
/// Any thread may call both functions; several threads may call them at once, and may hold locks of weft, so
/// the functions must not call weft. The caller must keep the functions valid as long as the Context. In a
/// child made by fork() weft calls neither for memory of the parent.
struct Allocator {
  /// `bytes` bytes at a multiple of `alignment`, uninitialised. `alignment` is 64, `bytes` a multiple of it
  /// and not 0. If the function returns null or a misaligned address (which weft gives back at once), or
  /// throws, the allocating call throws an Error `system` that names bytes and alignment.
  void* (*allocate)(void* data, std::size_t bytes, std::size_t alignment) = nullptr;
  /// Takes back a block that allocate() returned, with the same sizes. weft logs an exception as a warning
  /// and does not pass it on.
  void (*deallocate)(void* data, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
  void* data = nullptr;  ///< passed to both functions
};

}  // namespace weft
