// docs/agreement.md is made of the rows that the tests beside this one run.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "agreement/row.hpp"
#include "base/text/plain_streams.hpp"
#include "support/golden.hpp"

namespace weft::agreement {
namespace {

const char* const kHead = R"(# What ranks must give alike

Most functions of weft are called by several ranks, and some of their arguments must be the same on all of them. This page
lists these values, where they are compared, and what every rank then gets. Each row is a test: rank 1 gives
another value than the rest, and the error is read on each rank. In the texts … stands for what differs from call to call.
Tests make the page: `WEFT_TEST_WRITE=1 ctest --test-dir build/dev -R '^agreement/page$'` writes it anew.
`tools/agreement.py` finds the functions that the headers call *Collective*, and fails where one is on neither table. A function
of C or Python that C++ has, too, has the rows of that function, which it calls; the program checks that as well.

A value is compared where ranks exchange something anyway: with the call itself (operation, dtype, count, reduction, order, and the layouts that it is for), in
the first exchange of an object, or with the numbers that are combined.

)";

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' ? "\\|" : std::string(1, c);
  return out;
}

std::string page() {
  TextOut out;
  out << kHead << "| function | value | compared | error | text |\n|---|---|---|---|---|\n";
  for (const auto& rows : {group_rows, mesh_rows, dp_rows, checkpoint_rows, train_rows, capi_rows})
    for (const Row& r : rows())
      out << "| `" << r.function << "` | " << r.value << " | " << r.compared << " | " << name(r.code)
          << " | `" << escaped(r.text) << "` |\n";
  out << "\n## What is not compared\n\nThese functions are collective, or give values that ranks must give "
         "alike, and compare "
         "nothing of them.\n\n| function | value | why |\n|---|---|---|\n";
  for (const WithoutRow& n : without_row())
    out << "| `" << n.function << "` | " << (n.value.empty() ? "none" : n.value) << " | " << n.why << " |\n";
  return out.str();
}

TEST(AgreementPage, IsMadeOfTheRows) {
  const std::filesystem::path path = test::source_dir() / "docs" / "agreement.md";
  if (std::getenv("WEFT_TEST_WRITE") != nullptr) std::ofstream(path) << page();
  FileIn file(path);
  TextOut text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), page()) << "make it anew: WEFT_TEST_WRITE=1, as the page says";
}

}  // namespace
}  // namespace weft::agreement
