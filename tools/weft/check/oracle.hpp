// The result of every call, computed from the definitions alone, in plain loops. Nothing of src/reduce is
// used, so that its mistakes cannot be shared.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "program.hpp"

namespace weft::check {

/// The values that rank `from` of the group puts into the block for rank `to`, as bytes.
std::vector<std::byte> input(const Step& s, int from, int to, int n);

/// The block of `out` that rank `me` gets: from rank `from` if the operation moves data, from the combination
/// if it reduces.
struct Expected {
  std::vector<std::byte> bytes;
  /// Empty if the bits are known. Otherwise the permitted error of each number (two in a complex one).
  std::vector<double> slack;
};
/// Empty if rank 0 of an exscan gets nothing: it keeps its old values.
/// `exact`: the backend combines in canonical order, whatever the call requests.
Expected expected(const Step& s, int from, int me, int n, bool exact);

/// Converts numbers that the dtype holds exactly to its elements, and back. Not for f8, complex or boolean
/// dtypes.
std::vector<std::byte> small_numbers(DType dtype, const std::vector<int>& numbers);
std::vector<int> numbers_in(DType dtype, const std::vector<std::byte>& elements);

/// The place at which `got` differs from `expected`, in words; empty if they are equal.
std::string compare(const Step& s, const Expected& expected, const std::byte* got);

/// The reduction of ReduceOp::Kind::user. The halves of each byte are a and b of a map x -> a x + b modulo
/// 16, and two such maps are applied one after the other. This is associative, and missing, doubled or
/// misordered inputs change the result.
const UserReduction& user_reduction();

}  // namespace weft::check
