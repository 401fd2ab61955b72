// The result of every call, computed from the definitions alone, in plain loops: nothing of
// src/backends/reduce is used, so that its mistakes cannot be shared.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "program.hpp"

namespace weft::check {

/// The values that rank `from` of the group puts into the block for rank `to`, as bytes.
std::vector<std::byte> input(const Step& s, int from, int to, int n);

/// The block of `out` that rank `me` gets, from rank `from` where the operation moves, of the combination
/// where it reduces.
struct Expected {
  std::vector<std::byte> bytes;
  /// Empty: the bits are known. Otherwise, per number (two in a complex one), by how much it may be off.
  std::vector<double> slack;
};
/// Empty if rank 0 of an exscan gets nothing: it keeps what it has.
/// `exact`: the backend combines in canonical order whatever is asked for.
Expected expected(const Step& s, int from, int me, int n, bool exact);

/// Numbers that the dtype holds exactly, as its elements, and back. No f8, complex or boolean.
std::vector<std::byte> small_numbers(DType dtype, const std::vector<int>& numbers);
std::vector<int> numbers_in(DType dtype, const std::vector<std::byte>& elements);

/// The place at which `got` differs from `expected`, in words; empty: it does not.
std::string compare(const Step& s, const Expected& expected, const std::byte* got);

/// The reduction of ReduceOp::Kind::user: of each byte the halves are a and b of x -> a x + b modulo 16, and
/// two such maps are applied one after the other: associative, and what is missing, double or out of order
/// shows.
const UserReduction& user_reduction();

}  // namespace weft::check
