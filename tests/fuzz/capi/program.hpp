// Random programs over weft.h: an input is a list of calls, run by one rank or by two that are threads.
//
//   header   one byte: bit 0: two ranks; bits 1 and 2: with what they begin (0: everything; 3: nothing); one byte: in which order all is destroyed
//   calls    each two bytes that choose the function, one of flags and length, and so many bytes of arguments
//
// The flags: 0 and 3: all ranks; 1: rank 0 alone; 2: rank 1 alone. With 3 rank 1 has other arguments. An
// argument without bytes is good (call.hpp). The two bytes are those of a hash of the name, so that an input
// stays what it is when functions are added.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::fuzz::capi {

/// Runs an input, and checks that it leaves nothing behind: descriptors, threads, mappings, files, and what
/// `live_allocations` counts, if it is not null. Ends the program if a check fails.
void run_program(std::string_view bytes, std::int64_t (*live_allocations)() = nullptr);

/// One call of each function with valid arguments, in one rank and in two, and inputs that found faults.
std::vector<std::string> program_seeds();
/// A program of up to `calls` calls, of which most arguments are good.
std::string random_program(std::uint64_t seed, int calls);

/// Functions that no call of run_program() has entered, or that have always failed, of those that can be
/// expected to succeed.
std::vector<std::string> never_good();

}  // namespace weft::fuzz::capi
