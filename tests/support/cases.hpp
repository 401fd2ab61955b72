// Collectives as data: reads tests/cases/*.txt. tests/cases/README.md describes the format;
// tests/backends/cases_test.cpp runs the cases.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "weft/backends/call.hpp"

namespace weft::test {

/// The call of one rank.
struct CaseCall {
  Op op = Op::none;
  DType dtype = DType::f32;
  ReduceOp reduce = ReduceOp::sum;
  Order order = Order::native;
  int root = -1, peer = -1, tag = 0;
  bool in_place = false;
};

/// One rank's part in a case.
struct CaseRank {
  std::optional<CaseCall> call;  ///< none: the rank calls nothing
  std::vector<double> in;
  bool has_in = false, has_out = false;
  std::vector<std::optional<double>> out;  ///< what `out` must hold afterwards; nothing: anything
  std::vector<std::int64_t> in_counts, out_counts, in_offsets, out_offsets;
  std::optional<std::string> error;  ///< "code: a part of the text", where the call must fail
};

struct Case {
  std::string place;  ///< "all_gather.txt:12"
  std::string name;
  std::vector<CaseRank> ranks;
};

/// The contents of `out` before the call.
inline constexpr double kCaseUntouched = 99;

/// Throws std::runtime_error, "file:line: what is wrong".
std::vector<Case> read_cases(const std::string& text, const std::string& file);
std::vector<Case> read_cases(const std::filesystem::path& file);

}  // namespace weft::test
