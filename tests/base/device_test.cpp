#include "weft/base/device.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "weft/base/view.hpp"

namespace weft::device_test {
namespace {

using test::error_text;

TEST(Device, HasANameThatIsReadBack) {
  for (const Device d : {Device{}, Device{DeviceKind::cuda, 0}, Device{DeviceKind::cuda, 12}})
    EXPECT_EQ(parse_device(to_string(d)), d);
  EXPECT_EQ(to_string(Device{DeviceKind::cuda, 12}), "cuda:12");
  EXPECT_EQ(parse_device("cuda"), (Device{DeviceKind::cuda, 0}));
  for (const char* const wrong : {"", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:40000", "cuda:1 "})
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { parse_device(wrong); }),
              "device \"" + std::string(wrong) + "\"; expected cpu, cuda or cuda:<0 to 32767>");
}

// A device converts to its default stream; streams of different devices differ even if their handles are
// equal.
TEST(Stream, IsOfADevice) {
  const Device gpu{DeviceKind::cuda, 1};
  int driver = 0;
  EXPECT_EQ(Stream(gpu), (Stream{gpu, nullptr}));
  EXPECT_NE(Stream(gpu), Stream{});
  EXPECT_NE((Stream{gpu, &driver}), Stream(gpu));
  EXPECT_NE((Stream{gpu, &driver}), (Stream{Device{DeviceKind::cuda, 2}, &driver}));
}

TEST(View, SaysWhereItsElementsAre) {
  const Device gpu{DeviceKind::cuda, 1};
  float x = 0;
  EXPECT_EQ(view(&x, 1).device, Device{});
  EXPECT_EQ(view(&x, 1, gpu).device, gpu);
  EXPECT_EQ(view(&x, Shape{1, 1}, gpu).device, gpu);
  EXPECT_EQ(ConstTensorView(view(&x, 1, gpu)).device, gpu);
}

}  // namespace
}  // namespace weft::device_test
