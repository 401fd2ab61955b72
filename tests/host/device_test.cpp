// Memory, copies and streams through the interface of devices: on the CPU, and on the late device of the
// tests.
#include "weft/host/device_runtime.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "support/errors.hpp"
#include "support/late_device.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/copy.hpp"

namespace weft::device_test {
namespace {

using test::error_text;
using test::LateDevice;

constexpr Device kGpu{DeviceKind::cuda, 0};

struct Devices : testing::Test {
  Devices() {
    auto made = std::make_unique<LateDevice>();
    late = made.get();
    context.add_device(std::move(made));
  }
  Tensor counting(const Shape& shape) {
    const Tensor t(context, shape);
    std::iota(t.f32().begin(), t.f32().end(), 1.0f);
    return t;
  }
  static std::vector<float> values(const Tensor& t) { return {t.f32().begin(), t.f32().end()}; }

  Context context;
  LateDevice* late = nullptr;
};

TEST_F(Devices, AreFoundByName) {
  EXPECT_EQ(&context.device(kGpu), late);
  EXPECT_EQ(context.device({}).device(), Device{});
  EXPECT_EQ(error_text(ErrorCode::unsupported,
                       [&] {
                         context.device({DeviceKind::cuda, 3});
                       }),
            "device cuda:3 is not in this Context, which has cpu, cuda:0; Context::add_device adds one");
  EXPECT_EQ(error_text(ErrorCode::unsupported,
                       [&] {
                         Tensor(context, {2}, DType::f32, Memory::local, {{DeviceKind::cuda, 3}});
                       }),
            "device cuda:3 is not in this Context, which has cpu, cuda:0; Context::add_device adds one");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { context.add_device(std::make_unique<LateDevice>()); }),
            "context: device cuda:0 is in it already; expected another");
}

TEST_F(Devices, TensorsThereAreNotTheHosts) {
  {
    const Tensor t(context, {2, 3}, DType::f32, Memory::local, kGpu);
    EXPECT_EQ(t.device(), kGpu);
    EXPECT_EQ(t.view().device, kGpu);
    EXPECT_EQ(t.slice_flat(2, {2}).device(), kGpu);
    EXPECT_TRUE(t.storage().direct());
    EXPECT_EQ(late->blocks(), 1u);
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { t.f32(); }),
              "tensor: f32 (2, 3) is on cuda:0; the host reads cpu memory only: copy it first (to_host)");
    EXPECT_EQ(t.data_ptr<float>(), reinterpret_cast<float*>(t.data()));
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { t.data_ptr<double>(); }),
              "tensor: read as f64; expected f32, its dtype");
  }
  EXPECT_EQ(late->blocks(), 0u);
}

TEST_F(Devices, TensorsGoThereAndBack) {
  const Tensor here = counting({3, 5});
  const Tensor there = to_device(context, here, kGpu);
  EXPECT_EQ(there.device(), kGpu);
  const std::vector<float> before = values(here);
  here.f32()[0] = 99;  // it was read when it was given
  EXPECT_EQ(values(to_host(context, there)), before);
  EXPECT_EQ(values(to_host(context, there.clone(context))), before);
  EXPECT_EQ(values(to_host(context, Tensor::zeros(context, {2}, DType::f32, Memory::local, kGpu))),
            std::vector<float>(2));
  EXPECT_EQ(to_host(context, here).data(), here.data());
  EXPECT_EQ(to_device(context, there, kGpu).data(), there.data());
  EXPECT_EQ(values(to_device(context, there, Device{})), before);
}

// Copies between the host and the device, and on each: rows with gaps, columns, transposed and reversed
// views, and a repeated row.
TEST_F(Devices, CopiesViewsOfAnyStrides) {
  for (const bool from_there : {false, true})
    for (const bool to_there : {false, true}) {
      SCOPED_TRACE(testing::Message() << from_there << to_there);
      const Tensor whole = counting({4, 6, 5});
      const Tensor source = from_there ? to_device(context, whole, kGpu) : whole;
      ConstTensorView part = source;  // [:, 1:4, 2:5], then the same with the first two dimensions exchanged
      part.data += (1 * 5 + 2) * 4;
      part.shape = {4, 3, 3};
      ConstTensorView turned = part;
      turned.shape = {3, 4, 3};
      std::swap(turned.strides[0], turned.strides[1]);
      ConstTensorView backwards = part, repeated = part;
      backwards.strides[1] = -backwards.strides[1];
      backwards.data += 2 * 5 * 4;
      repeated.strides[1] = 0;
      for (const ConstTensorView& v : {part, turned, backwards, repeated}) {
        const Tensor target(context, v.shape, DType::f32, Memory::local, to_there ? Stream(kGpu) : Stream{});
        copy(context, v, target);
        if (from_there || to_there) late->wait(kGpu);
        const Tensor got = to_host(context, target);
        const auto first = (v.data - ConstTensorView(source).data) / 4;
        for (std::int64_t i = 0; i < got.count(); ++i) {
          const std::int64_t a = i / 3 / v.shape[1], b = i / 3 % v.shape[1], c = i % 3;
          ASSERT_EQ(got.f32()[static_cast<std::size_t>(i)],
                    static_cast<float>(1 + first + a * v.strides[0] + b * v.strides[1] + c));
        }
      }
    }
}

TEST_F(Devices, CopiesOfUnlikeTensorsAreRefused) {
  const Tensor a(context, {2}), b(context, {3}), c(context, {2}, DType::f32, Memory::local, kGpu);
  const auto text = [&](const ConstTensorView& from, const TensorView& to, Stream s) {
    return error_text(ErrorCode::bad_argument, [&] { copy(context, from, to, s); });
  };
  EXPECT_EQ(text(a, b, {}), "copy: from is f32 (2), to is f32 (3); expected the same");
  TensorView elsewhere = c;
  elsewhere.device.index = 1;
  EXPECT_EQ(text(c, elsewhere, {}),
            "copy: from is on cuda:0, to is on cuda:1; expected one device, or the CPU on one side");
  EXPECT_EQ(text(a, c, Device{DeviceKind::cuda, 2}),
            "copy: stream is of cuda:2; expected cuda:0, where the tensors are");
  std::vector<float> v(8);
  EXPECT_EQ(text(view(static_cast<float*>(nullptr), 8), view(v), {}), "copy: from (8) has no memory");
  EXPECT_EQ(text(view(v), view(static_cast<float*>(nullptr), 8), {}), "copy: to (8) has no memory");
  EXPECT_EQ(text(view(v.data(), -3), view(v.data(), -3), {}),
            "copy: from has shape (-3); expected no negative extent");
  const Shape huge{std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_EQ(text(view(v.data(), huge), view(v.data(), huge), {}),
            "copy: from has shape (1099511627776, 1099511627776); expected no more than 2^63 bytes");
  TensorView strange = view(v);
  strange.dtype = static_cast<DType>(77);
  EXPECT_EQ(text(strange, strange, {}), "copy: from has dtype 77; expected 0 to 16");
  EXPECT_EQ(text(view(v.data(), 6), view(v.data() + 1, 6), {}),
            "copy: from and to overlap; expected memory of their own");
  std::vector<float> w(8);
  const TensorView square = view(w.data(), Shape{2, 2});
  const auto with_strides = [&](const Strides& strides) {
    TensorView strided = view(v.data(), Shape{2, 2});
    strided.strides = strides;
    return strided;
  };
  EXPECT_EQ(text(with_strides({1}), square, {}), "copy: from has 1 strides for 2 dimensions");
  EXPECT_EQ(text(square, with_strides({4, 2, 1}), {}), "copy: to has 3 strides for 2 dimensions");
  EXPECT_EQ(text(with_strides({std::int64_t{1} << 62, 1}), square, {}),
            "copy: from has strides (4611686018427387904, 1) of (2, 2); expected elements within 2^63 bytes");
  EXPECT_EQ(
      text(with_strides({1, std::int64_t{-1} << 63}), square, {}),
      "copy: from has strides (1, -9223372036854775808) of (2, 2); expected elements within 2^63 bytes");
  EXPECT_EQ(
      text(square, with_strides({0, 1}), {}),
      "copy: to has strides (0, 1) of (2, 2): elements share memory; expected each in a place of its own");
  copy(context, with_strides({0, 0}), square);  // what is only read may repeat
}

// The purpose of this device: without the dependency the copy always runs too early.
TEST_F(Devices, ALateStreamShowsAForgottenDependency) {
  const Compute compute(context, 1, kGpu);
  const Stream other = late->make_stream();
  const Tensor x = to_device(context, counting({3}), compute.stream());
  const Tensor home(context, {3});
  copy(context, x, home, other);
  late->wait(other);
  for (const float v : home.f32()) EXPECT_TRUE(std::isnan(v)) << v;
  late->depend(other, compute.stream());
  copy(context, x, home, other);
  late->wait(other);
  EXPECT_EQ(values(home), (std::vector<float>{1, 2, 3}));
  late->destroy_stream(other);
}

// The result of to_device() is ordered on the other stream, and may be used on that stream alone.
TEST_F(Devices, ATensorGoesToAnotherStream) {
  const Compute one(context, 1, kGpu), two(context, 1, kGpu);
  const Tensor home(context, {3});
  {
    const Tensor x = to_device(context, counting({3}), one.stream());
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { two.expect_here("x", x); }),
              "x is ordered on another stream of cuda:0 than this Compute; to_device() orders it there");
    const Tensor y = to_device(context, x, two.stream());
    two.expect_here("y", y);
    EXPECT_EQ(y.data(), x.data());
    EXPECT_EQ(y.stream(), two.stream());
    EXPECT_EQ(y.shape(), x.shape());
    copy(context, y, home, two.stream());
    EXPECT_EQ(late->blocks(), 1u);
  }
  // The host has not waited yet: the memory is reused on its first stream, but must not be written before it
  // has been read.
  const Tensor z = one.zeros({3});
  EXPECT_EQ(late->blocks(), 1u);
  one.wait();
  two.wait();
  EXPECT_EQ(values(home), (std::vector<float>{1, 2, 3}));
  const Tensor here = counting({3});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { (void)here.ordered_on(context, one.stream()); }),
            "storage: ordered_on got a stream of cuda:0; expected cpu");
}

// A stream reuses its own freed memory; the order of the stream protects it.
TEST_F(Devices, MemoryIsGivenBackOnItsStream) {
  const Compute compute(context, 1, kGpu);
  const Tensor home(context, {3});
  const void* first = nullptr;
  {
    const Tensor x = to_device(context, counting({3}), compute.stream());
    first = x.data();
    copy(context, x, home, compute.stream());
  }
  const Tensor y = compute.zeros({3});
  EXPECT_EQ(y.data(), first);
  EXPECT_GT(late->waiting(), 0u);
  compute.wait();
  EXPECT_EQ(late->waiting(), 0u);
  EXPECT_EQ(values(home), (std::vector<float>{1, 2, 3}));
}

TEST_F(Devices, WhatFailsLateIsToldByTheNextWait) {
  const Compute compute(context, 1, kGpu);
  late->push(compute.stream(), [] { throw std::runtime_error("a kernel failed"); });
  EXPECT_THROW(compute.wait(), std::runtime_error);
  EXPECT_NO_THROW(compute.wait());
}

TEST_F(Devices, AComputeThatEndsLogsWhatNobodyWaitedFor) {
  std::string said;
  Context loud({.log_sink = [&](LogLevel, std::string_view text) { said += text; }});
  loud.add_device(std::make_unique<LateDevice>());
  {
    const Compute compute(loud, 1, kGpu);
    dynamic_cast<LateDevice&>(compute.runtime()).push(compute.stream(), [] {
      throw std::runtime_error("broken");
    });
  }
  EXPECT_NE(said.find("compute: broken"), std::string::npos) << said;
}

TEST_F(Devices, AComputeHasADevice) {
  const Compute here(context), there(context, 1, kGpu);
  EXPECT_EQ(here.device(), Device{});
  EXPECT_EQ(there.device(), kGpu);
  EXPECT_EQ(there.make({2}).stream(), there.stream());
  EXPECT_EQ(here.make({2}).device(), Device{});
  there.expect_here("x", there.make({2}));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { there.expect_here("x", here.make({2})); }),
            "x is on cpu; expected cuda:0, the device of this Compute");
  EXPECT_EQ(error_text(ErrorCode::unsupported,
                       [&] {
                         Compute(context, 1, {DeviceKind::cuda, 7});
                       }),
            "device cuda:7 is not in this Context, which has cpu, cuda:0; Context::add_device adds one");
}

}  // namespace
}  // namespace weft::device_test
