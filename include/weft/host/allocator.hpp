// An allocator of the program, for Memory::local. ContextOptions::allocator takes one.
#pragma once

#include <cstddef>

#include "weft/base/cxx20.hpp"

namespace weft {

/// Two functions and their first argument. Set both functions, or neither. Without them weft allocates memory
/// itself.
///
/// For each block of local memory weft calls allocate() once. It calls deallocate() once, when the last owner
/// of the block is destroyed. weft keeps no free block for later. All training steps allocate the same sizes.
/// So if the allocator keeps free blocks, a step need not touch new pages.
///
/// weft takes the following memory from the allocator: each Storage and Tensor in Memory::local on the CPU
/// (weights, optimizer states, activations and everything else that a Frame keeps and no other rank maps),
/// and in Memory::shared if shared memory is not available; memory that Context::device(Device{}) allocates;
/// staging buffers of operations that weft composes over a transport; messages over a transport of a C
/// program for which no receive waits yet; and scratch memory of the kernels of a Compute.
///
/// weft does not take the following memory from the allocator: Memory::shared (segments of shared memory that
/// peers map: gradient buckets, tensors that boundaries and redistributions communicate) and memory that a
/// transport over shared memory makes for itself; memory of other devices, which their runtime allocates;
/// messages over weft's other transports for which no receive waits yet, and buffers of plug-ins; memory of
/// libraries that weft uses (an MPI); tables of rotary positions (RopeTables); parts of files while a
/// checkpoint is read or written; and control objects (groups, calls, layouts, names, traces), for which weft
/// uses operator new.
///
/// Any thread may call both functions. Several threads may call them at once, and may hold locks of weft. So
/// the functions must not call weft. The caller must keep the functions valid as long as the Context. In a
/// child made by fork() weft does not call them for memory of the parent.
struct Allocator {
  /// Returns `bytes` uninitialised bytes at a multiple of `alignment`. `alignment` is 64. `bytes` is a
  /// multiple of `alignment` and not 0. The function may throw, or return null or a misaligned address (which
  /// weft passes to deallocate() at once). The allocating call then throws an Error `system` that gives bytes
  /// and alignment.
  void* (*allocate)(void* data, std::size_t bytes, std::size_t alignment) = nullptr;
  /// Takes back a block that allocate() returned, with the same `bytes` and `alignment`. weft logs an
  /// exception as a warning and does not pass it on.
  void (*deallocate)(void* data, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
  void* data = nullptr;  ///< passed to both functions
};

}  // namespace weft
