// Tests from which types a buffer can be made.
#include "weft/base/buffer.hpp"

#include <gtest/gtest.h>

#include <array>
#include <complex>
#include <list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"

namespace weft::test::buffer_test {
namespace {

struct Pair {
  std::int32_t a = 0;
  double b = 0;
};
struct Owner {
  std::string text;
};

// The type of an argument in a call: `T&` a variable, `T` a temporary.
template <class T>
inline constexpr bool kReads = std::is_convertible_v<T, ConstBuffer>;
template <class T>
inline constexpr bool kWrites = std::is_convertible_v<T, Buffer>;

// Ranges that have a name; const ones are read only.
static_assert(kReads<std::vector<float>&> && kWrites<std::vector<float>&>);
static_assert(kReads<const std::vector<float>&> && !kWrites<const std::vector<float>&>);
static_assert(kReads<std::array<int, 3>&> && kWrites<std::array<int, 3>&>);
static_assert(kReads<std::array<const int, 3>&> && !kWrites<std::array<const int, 3>&>);
static_assert(kReads<double (&)[4]> && kWrites<double (&)[4]> && !kWrites<const double (&)[4]>);
static_assert(kReads<std::string&> && kWrites<std::string&> && !kWrites<const std::string&>);
static_assert(kReads<std::vector<std::byte>&> && kWrites<std::vector<std::byte>&>);

// A buffer of a temporary that owns its memory would dangle; a buffer of a non-owning view does not.
static_assert(!kReads<std::vector<float>> && !kWrites<std::vector<float>>);
static_assert(!kReads<const std::vector<float>> && !kReads<std::string> && !kReads<std::array<int, 3>>);
static_assert(kReads<std::span<float>> && kWrites<std::span<float>>);
static_assert(kReads<std::span<const float>> && !kWrites<std::span<const float>>);
static_assert(kReads<std::span<float>&> && kWrites<const std::span<float>&>,
              "the window is const, not the elements");
static_assert(kReads<std::string_view> && !kWrites<std::string_view>);

// Variables are accepted, but temporaries of numbers are not: a root is never mistaken for a buffer.
static_assert(kReads<double&> && kWrites<double&> && kReads<const double&> && !kWrites<const double&>);
static_assert(!kReads<double> && !kWrites<double> && !kReads<int> && !kReads<const int>);
static_assert(kWrites<long long&> && kWrites<bf16&> && kWrites<std::complex<float>&> && kWrites<std::byte&>);

// Data without a dtype, or not in one piece.
static_assert(!kReads<Pair&> && !kReads<std::vector<Pair>&> && !kReads<float*&> &&
              !kReads<std::vector<float*>&>);
static_assert(!kReads<std::list<float>&> && !kReads<std::vector<bool>&> && !kReads<float (&)[2][2]>);

// const is forever.
static_assert(std::is_convertible_v<Buffer, ConstBuffer> && !std::is_convertible_v<ConstBuffer, Buffer>);

template <class T>
concept HasBytes = requires(T&& x) {
  weft::as_bytes(std::forward<T>(x));
};
static_assert(HasBytes<Pair&> && HasBytes<const Pair&> && !HasBytes<Pair> && !HasBytes<const Pair>);
static_assert(HasBytes<std::vector<Pair>&> && !HasBytes<std::vector<Pair>> &&
              !HasBytes<const std::vector<Pair>>);
static_assert(HasBytes<std::span<const Pair>> && HasBytes<std::array<Pair, 2>&> && HasBytes<Pair (&)[2]>);
static_assert(!HasBytes<Owner&> && !HasBytes<std::vector<Owner>&> && !HasBytes<Pair*&>);
static_assert(std::is_same_v<decltype(as_bytes(std::declval<Pair&>())), Buffer>);
static_assert(std::is_same_v<decltype(as_bytes(std::declval<const Pair&>())), ConstBuffer>);
static_assert(std::is_same_v<decltype(as_bytes(std::declval<const std::vector<Pair>&>())), ConstBuffer>);

void expect(const ConstBuffer& b, const void* data, std::int64_t count, DType dtype, bool raw = false) {
  EXPECT_EQ(b.data, data);
  EXPECT_EQ(b.count, count);
  EXPECT_EQ(b.dtype, dtype);
  EXPECT_EQ(b.raw, raw);
  EXPECT_EQ(b.device, Device{});
  EXPECT_FALSE(b.fault);
}

TEST(Buffer, OfRangesAndVariables) {
  std::vector<float> vector(3);
  expect(vector, vector.data(), 3, DType::f32);
  const std::array<std::int16_t, 5> array{};
  expect(array, array.data(), 5, DType::i16);
  std::complex<double> c_array[2];
  expect(c_array, c_array, 2, DType::c128);
  expect(std::span(vector).subspan(1), vector.data() + 1, 2, DType::f32);
  const double loss = 1;
  expect(loss, &loss, 1, DType::f64);
  long long signed_count = 0;
  expect(signed_count, &signed_count, 1, DType::i64);
  unsigned long long unsigned_count = 0;
  expect(unsigned_count, &unsigned_count, 1, DType::u64);
  bool flag = false;
  expect(flag, &flag, 1, DType::boolean);
  const std::vector<double> nothing;
  expect(nothing, nothing.data(), 0, DType::f64);
}

TEST(Buffer, OfBytesAndCharactersIsRaw) {
  std::vector<std::byte> bytes(7);
  expect(bytes, bytes.data(), 7, DType::u8, true);
  const std::string text = "seven";
  expect(text, text.data(), 5, DType::u8, true);
  expect(std::string_view(text), text.data(), 5, DType::u8, true);
  std::byte one{};
  expect(one, &one, 1, DType::u8, true);
  std::vector<std::uint8_t> numbers(2);
  expect(numbers, numbers.data(), 2, DType::u8, false);
  EXPECT_TRUE(ConstBuffer(Buffer(bytes)).raw) << "a Buffer that becomes a ConstBuffer";
}

TEST(AsBytes, OfVariablesAndRanges) {
  Pair pair;
  expect(as_bytes(pair), &pair, sizeof pair, DType::u8, true);
  std::vector<Pair> pairs(3);
  expect(as_bytes(pairs), pairs.data(), 3 * sizeof(Pair), DType::u8, true);
  const std::span<const Pair> window(pairs.data() + 1, 2);
  expect(weft::as_bytes(window), pairs.data() + 1, 2 * sizeof(Pair), DType::u8, true);
  std::array<float, 2> floats{};
  expect(as_bytes(floats), floats.data(), 8, DType::u8, true);
}

TEST(View, OfAnyContiguousRange) {
  std::array<float, 3> array{};
  const TensorView v = view(array);
  EXPECT_EQ(v.data, reinterpret_cast<std::byte*>(array.data()));
  EXPECT_EQ(v.count(), 3);
  const double numbers[2] = {};
  const ConstTensorView c = view(numbers);
  EXPECT_EQ(c.dtype, DType::f64);
  EXPECT_EQ(c.count(), 2);
  EXPECT_EQ(view(std::span(array).first(2)).count(), 2);
}

// Nothing of it is read, so the pointer need not be the host's.
TEST(View, OfMemoryOfADevice) {
  auto* const pointer = reinterpret_cast<float*>(std::uintptr_t{4096});
  const Device device{DeviceKind::cuda, 1};
  const TensorView v = view(pointer, 12, device);
  EXPECT_EQ(v.device, device);
  EXPECT_EQ(v.count(), 12);
  const Buffer b = v;
  EXPECT_EQ(b.device, device);
  EXPECT_EQ(static_cast<void*>(b.data), pointer);
  EXPECT_EQ(view(pointer, {3, 4}, parse_device("cuda:1")).device, device);
}

}  // namespace
}  // namespace weft::test::buffer_test
