// The values that must be equal on all ranks. Each row of the table is a test: a call in which rank 1 gives
// another value than the rest, and the error that every rank gets. docs/agreement.md is made of the rows.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft::agreement {

struct Row {
  /// As tools/agreement.py finds it in the headers: "DeviceMesh::group", "weft_group_create_tcp".
  std::string function;
  std::string value;     ///< the value that all ranks must give
  std::string compared;  ///< where: "with the call", "in the exchange of the norms"
  ErrorCode code;
  /// Pieces of the error's text, with "…" between them: each occurs in the text of every rank.
  std::string text;
  /// The call of a rank: rank 1 gives another value. The harness catches the Error.
  std::function<void(test::Rank&)> run;
  int ranks = 2;
};
using Rows = std::vector<Row>;

/// A function whose values no check compares, or that has none.
struct WithoutRow {
  std::string function;
  std::string value;  ///< empty: it has none
  std::string why;
};

/// One list for each file of rows, in the order of the page.
Rows group_rows();
Rows mesh_rows();
Rows dp_rows();
Rows checkpoint_rows();
Rows train_rows();
Rows capi_rows();
std::vector<WithoutRow> without_row();

/// Runs the rows, and checks that each rank gets the error.
void expect_told(const Rows& rows);

}  // namespace weft::agreement
