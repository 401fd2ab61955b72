#include "weft/host/compute.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "weft/base/error.hpp"

namespace weft::compute_test {
namespace {

struct Kept {
  explicit Kept(Compute& compute) : threads(compute.threads()) {}
  int threads;
};

TEST(Compute, KeepsOneAttachmentPerType) {
  Context context;
  Compute compute(context, 3);
  Kept& first = compute.attached<Kept>();
  EXPECT_EQ(first.threads, 3);
  EXPECT_EQ(&compute.attached<Kept>(), &first);
  Compute other(context);
  EXPECT_NE(&other.attached<Kept>(), &first);
  EXPECT_EQ(other.make({2, 3}).count(), 6);
}

TEST(Compute, NeedsAThread) {
  Context context;
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { Compute compute(context, 0); }),
            "compute: threads is 0; expected at least 1");
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { Compute compute(context, 1'000'000'000); }),
            "compute: threads is 1000000000; expected at most 4096");
}

}  // namespace
}  // namespace weft::compute_test
