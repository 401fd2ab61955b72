// The list of kernels says exactly how long each operand is, and whether it is read or written. A kernel that
// a device lacks is composed of others, runs on the host on copies as long as the list says, or is an error.
// docs/kernels.md is made of the list, here: `WEFT_TEST_WRITE=1 ctest --test-dir build/dev -R
// '^nn/kernel_rows$'`.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "nn/kernels/composed.hpp"
#include "support/errors.hpp"
#include "support/golden.hpp"
#include "support/late_kernels.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/kernel_rows.hpp"

namespace weft::kernels {
namespace {

using weft::test::error_text;
using T = KernelTable;
using Bytes = std::vector<std::byte>;

// Memory of exactly this many bytes. The next byte belongs to a page that nobody may touch.
class Exact {
 public:
  explicit Exact(const Bytes& bytes) : bytes_(bytes.size()) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t whole = (bytes_ + page - 1) / page * page;
    mapped_ = whole + page;
    void* const at = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<std::byte*>(at);
    if (::mprotect(begin_ + whole, page, PROT_NONE) != 0) throw std::bad_alloc();
    if (bytes_ > 0) std::memcpy(data(), bytes.data(), bytes_);
  }
  ~Exact() { ::munmap(begin_, mapped_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  std::byte* data() const {
    return begin_ + (mapped_ - static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))) - bytes_;
  }
  Bytes bytes() const { return {data(), data() + bytes_}; }

 private:
  std::size_t bytes_, mapped_ = 0;
  std::byte* begin_ = nullptr;
};

template <class A>
struct ElementOf;
template <class E>
struct ElementOf<E*> {
  using type = E;
};
template <>
struct ElementOf<WeightMatrix> {
  using type = const bf16;
};
template <>
struct ElementOf<ScoreBias> {
  using type = const float;
};

// Values that every kernel takes: numbers from 0.1 to 0.9, integers from 1 to 3.
template <class E>
Bytes values(std::int64_t n, unsigned seed) {
  Bytes all(static_cast<std::size_t>(n) * sizeof(E));
  for (std::int64_t i = 0; i < n; ++i) {
    const unsigned mixed = (static_cast<unsigned>(i) * 2654435761U + seed * 40503U) >> 8;
    E value{};
    if constexpr (std::is_integral_v<E>)
      value = static_cast<E>(1 + mixed % 3);
    else
      value = E(0.1f + 0.8f * static_cast<float>(mixed % 1024) / 1024.0f);
    std::memcpy(all.data() + static_cast<std::size_t>(i) * sizeof(E), &value, sizeof(E));
  }
  return all;
}
// A last element with which a kernel that reads it has another result, or throws.
template <class E>
E last_value() {
  if constexpr (std::is_same_v<E, std::int32_t>) return -1;  // the place of no pixel
  if constexpr (std::is_integral_v<E>) return static_cast<E>(kIgnoredTarget);
  return E(std::numeric_limits<float>::quiet_NaN());
}

// One kernel with arguments that are no operands.
template <auto Member>
struct Case;
template <class... Args, void (*T::*Member)(KernelContext&, Args...)>
struct Case<Member> {
  static constexpr std::size_t kOperands = (std::size_t{0} + ... + std::size_t{kIsOperand<Args>});
  using Arguments = std::tuple<std::remove_cvref_t<Args>...>;
  using Pointers = std::array<std::byte*, kOperands>;

  template <class... Values>
  static Arguments arguments(const Pointers& pointers, const std::tuple<Values...>& values) {
    static_assert(sizeof...(Values) + kOperands == sizeof...(Args), "the arguments that are no operands");
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Arguments(argument<I>(pointers, values)...);
    }
    (std::index_sequence_for<Args...>{});
  }
  static std::array<Operand, kOperands> operands(const Arguments& arguments) {
    return std::apply([](const auto&... all) { return Row<Member>::operands(all...); }, arguments);
  }
  static void call(const KernelTable& table, KernelContext& ctx, const Arguments& arguments) {
    std::apply([&](const auto&... all) { (table.*Member)(ctx, all...); }, arguments);
  }
  // Calls each.template operator()<Element>(i) for operand i.
  template <class Each>
  static void each_operand(Each&& each) {
    std::size_t i = 0;
    const auto one = [&]<class A>() {
      if constexpr (kIsOperand<A>)
        each.template operator()<std::remove_const_t<typename ElementOf<A>::type>>(i++);
    };
    (one.template operator()<Args>(), ...);
  }

 private:
  static constexpr std::size_t operands_before(std::size_t argument) {
    constexpr bool kIs[] = {kIsOperand<Args>...};
    std::size_t n = 0;
    for (std::size_t i = 0; i < argument; ++i) n += kIs[i] ? 1 : 0;
    return n;
  }
  template <std::size_t I, class Values>
  static auto argument(const Pointers& pointers, const Values& values) {
    using A = std::tuple_element_t<I, Arguments>;
    if constexpr (kIsOperand<A>)
      return A(reinterpret_cast<typename ElementOf<A>::type*>(pointers[operands_before(I)]));
    else
      return A(std::get<I - operands_before(I)>(values));
  }
};

// A Context with the late device, which has the kernels of `table`.
struct OnLate {
  explicit OnLate(const KernelTable& table) : late(weft::test::add_late_device(context, 0, table)) {}
  KernelContext kernels() { return KernelContext(compute); }
  std::vector<std::string> warnings;
  ContextOptions options() {
    ContextOptions made;
    made.log_sink = [this](LogLevel level, std::string_view line) {
      if (level == LogLevel::warning) warnings.emplace_back(line);
    };
    return made;
  }
  Context context{options()};
  weft::test::LateDevice& late;
  Compute compute{context, 2, late.device()};
};

struct HostKernels {
  HostKernels() { ::setenv("WEFT_HOST_KERNELS", "1", 1); }
  ~HostKernels() { ::unsetenv("WEFT_HOST_KERNELS"); }
};
OnLate without_kernels_on_host() {
  const HostKernels allowed;
  return OnLate(KernelTable{});
}
std::string warning_of(std::string_view kernel) {
  return "[program] kernels: cuda:0 has no " + std::string(kernel) +
         ": it runs on the host, on copies of its operands (WEFT_HOST_KERNELS=1)";
}
std::string absence_of(std::string_view kernel) {
  return "kernels: cuda:0 has no " + std::string(kernel) +
         "; give it to add_kernels(), or set WEFT_HOST_KERNELS=1 to run it on the host, on copies of its "
         "operands";
}

// Whether the operands that may be null are.
enum class Optional : unsigned char { given, null };

struct KernelRows : testing::Test {
  KernelContext cpu{2};
  OnLate host{without_kernels_on_host()}, refusing{KernelTable{}};
  std::set<std::string_view> seen;

  // Runs the kernel on the CPU and returns its operands afterwards, or nothing if it throws.
  template <auto Member, class Values>
  std::vector<Bytes> direct(const std::vector<Bytes>& in, const std::vector<bool>& null,
                            const Values& values) {
    using C = Case<Member>;
    std::vector<std::unique_ptr<Exact>> memory;
    typename C::Pointers pointers{};
    for (std::size_t i = 0; i < in.size(); ++i) {
      memory.push_back(std::make_unique<Exact>(in[i]));
      pointers[i] = null[i] ? nullptr : memory[i]->data();
    }
    try {
      C::call(cpu_table(), cpu, C::arguments(pointers, values));
    } catch (const Error&) {
      return {};
    }
    std::vector<Bytes> out;
    for (const auto& m : memory) out.push_back(m->bytes());
    return out;
  }

  // The same on a late device.
  template <auto Member, class Values>
  std::vector<Bytes> on(OnLate& device, const std::vector<Bytes>& in, const std::vector<bool>& null,
                        const Values& values) {
    using C = Case<Member>;
    constexpr std::size_t kGuard = 64;
    Compute& compute = device.compute;
    std::vector<Tensor> memory;
    typename C::Pointers pointers{};
    for (std::size_t i = 0; i < in.size(); ++i) {
      Bytes guarded = in[i];
      guarded.resize(in[i].size() + kGuard, std::byte{0x5A});
      const Tensor home(device.context, {static_cast<std::int64_t>(guarded.size())}, DType::u8);
      std::memcpy(home.as<std::uint8_t>().data(), guarded.data(), guarded.size());
      memory.push_back(to_device(device.context, home, compute.stream()));
      pointers[i] = null[i] ? nullptr : reinterpret_cast<std::byte*>(memory[i].data_ptr<std::uint8_t>());
    }
    KernelContext ctx(compute);
    C::call(ctx.table(), ctx, C::arguments(pointers, values));
    std::vector<Bytes> out;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const Tensor home = to_host(device.context, memory[i]);
      const auto* const at = reinterpret_cast<const std::byte*>(home.as<std::uint8_t>().data());
      out.emplace_back(at, at + in[i].size());
      for (std::size_t j = 0; j < kGuard; ++j)
        EXPECT_EQ(at[in[i].size() + j], std::byte{0x5A}) << "operand " << i << " is longer there";
    }
    return out;
  }

  template <auto Member, class... Values>
  void check(Optional optional, Values... given) {
    using C = Case<Member>;
    const std::string kernel(Row<Member>::name);
    SCOPED_TRACE(kernel + ": " + std::string(Row<Member>::text));
    seen.insert(Row<Member>::name);
    const std::tuple<Values...> values_of(given...);

    // The operands are those of the parameters, in their order.
    std::array<std::byte, C::kOperands> somewhere{};
    typename C::Pointers pointers;
    for (std::size_t i = 0; i < C::kOperands; ++i) pointers[i] = &somewhere[i];
    const auto rows = C::operands(C::arguments(pointers, values_of));
    std::vector<Bytes> in, in_again;
    std::vector<bool> null;
    C::each_operand([&]<class E>(std::size_t i) {
      EXPECT_EQ(rows[i].data, pointers[i]) << "operand " << i;
      EXPECT_EQ(rows[i].element_bytes, sizeof(E)) << "operand " << i;
      null.push_back(optional == Optional::null && rows[i].may_be_null);
      const Bytes content = null[i] ? Bytes{} : values<E>(rows[i].elements, static_cast<unsigned>(i));
      const bool written = rows[i].access == Access::writes;
      in.push_back(written ? Bytes(content.size(), std::byte{0x7A}) : content);
      in_again.push_back(written ? Bytes(content.size(), std::byte{0x39}) : content);
    });
    for (std::size_t i = 0; i < null.size(); ++i) pointers[i] = null[i] ? nullptr : pointers[i];
    EXPECT_EQ(error_text(ErrorCode::unsupported,
                         [&] {
                           KernelContext ctx(refusing.compute);
                           C::call(ctx.table(), ctx, C::arguments(pointers, values_of));
                           return 0;
                         }),
              absence_of(kernel));

    // If a kernel goes beyond the end of an operand, as the list has it, it faults here. It changes no
    // operand that it only reads. It changes all elements of an operand that it writes, whatever was there.
    const std::vector<Bytes> out = direct<Member>(in, null, values_of);
    ASSERT_EQ(out.size(), in.size()) << "it throws";
    EXPECT_EQ(direct<Member>(in_again, null, values_of), out) << "what is written is not read";
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (rows[i].access == Access::reads) {
        EXPECT_EQ(out[i], in[i]) << "operand " << i << " is only read";
      }
    }
    EXPECT_EQ(on<Member>(host, in, null, values_of), out);

    // No operand is longer than the kernel needs, since it uses the last element of each.
    C::each_operand([&]<class E>(std::size_t i) {
      if (rows[i].access == Access::writes || null[i]) return;  // a whole output was written anew
      ASSERT_GE(in[i].size(), sizeof(E));
      const std::size_t last = in[i].size() - sizeof(E);
      if (rows[i].access == Access::updates) {
        EXPECT_NE(std::memcmp(&in[i][last], &out[i][last], sizeof(E)), 0)
            << "operand " << i << " ends before";
        return;
      }
      std::vector<Bytes> changed = in;
      const E value = last_value<E>();
      std::memcpy(&changed[i][last], &value, sizeof(E));
      std::vector<Bytes> other = direct<Member>(changed, null, values_of);
      if (other.empty()) return;  // it throws
      other[i] = out[i];
      EXPECT_TRUE(other != out) << "nobody reads the last element of operand " << i;
    });
  }
  template <auto Member, class... Values>
  void check(Values... given) {
    check<Member>(Optional::given, given...);
  }
  template <auto Member, class... Values>
  void check_both(Values... given) {
    check<Member>(Optional::given, given...);
    check<Member>(Optional::null, given...);
  }
};

using I = std::int64_t;

std::shared_ptr<const Taps> taps() {
  Taps t;
  t.begin = {0, 1, 3}, t.index = {0, 1, 2}, t.weight = {1.0f, 0.25f, 0.75f};
  return std::make_shared<const Taps>(t);
}

TEST_F(KernelRows, SayWhatEachOperandIs) {
  constexpr auto kPlain = Stored::plain, kTransposed = Stored::transposed;
  const LinearShape linear{3, 4, 5};
  const MapShape maps{2, 4, 3};
  const RopeShape rope{2, 3, 2, 4};
  const AttentionShape causal{2, 5, 4, 2, 3};
  const FullAttentionShape full{2, 3, 5, 4, 2, 3};
  AttentionPiece piece{2, 3, 5, 4, 2, 3, 64, 256, false, false, true};
  const VocabPart vocab{0, 5, 5}, part{1, 3, 5};
  // Every pixel is seen: (1 + 3 - 1) / 1 + 1 and so on.
  const UnfoldShape unfolding{2, 4, 3, 2, 2, 1, 1, 0, 0, 1, 1, 3, 2, Padding::zeros};
  const LossShape loss{6, 3, 2};
  const float eps = 1e-5f;

  check<&T::matmul>(kPlain, kPlain, I{3}, I{5}, I{4}, true);
  check<&T::matmul>(kTransposed, kTransposed, I{3}, I{5}, I{4}, true);
  check<&T::matmul_bf16>(kPlain, kTransposed, I{3}, I{5}, I{4}, true);
  check<&T::tree_matmul>(kTransposed, kPlain, I{3}, I{5}, I{4}, ProductTree{.leaves = 2});
  check<&T::tree_matmul_bf16>(kPlain, kTransposed, I{3}, I{5}, I{4}, ProductTree{});
  check_both<&T::matmul_to_bf16>(kPlain, kTransposed, I{3}, I{5}, I{4});
  check<&T::row_products>(I{6}, I{7}, I{3}, I{5}, I{4});
  check_both<&T::linear_forward>(linear);
  check_both<&T::linear_forward_bf16>(linear);
  check<&T::linear_backward_input>(linear);
  check_both<&T::linear_backward_weight>(linear);
  check<&T::add_bias>(I{3}, I{5});
  check<&T::add_bias_bf16>(I{3}, I{5});
  check<&T::bias_backward>(I{3}, I{5});
  check<&T::bias_backward_bf16>(I{3}, I{5});

  check<&T::rms_norm_forward>(I{3}, I{5}, eps);
  check<&T::rms_norm_forward_bf16>(I{3}, I{5}, eps);
  check<&T::rms_norm_backward>(I{3}, I{5});
  check<&T::rms_norm_backward_bf16>(I{3}, I{5});
  check<&T::layer_norm_forward>(I{3}, I{5}, eps);
  check<&T::layer_norm_forward_bf16>(I{3}, I{5}, eps);
  check<&T::layer_norm_backward>(I{3}, I{5});
  check<&T::layer_norm_backward_bf16>(I{3}, I{5});
  check<&T::channel_norm_forward>(maps, eps);
  check<&T::channel_norm_backward>(maps);
  check<&T::group_norm_forward>(maps, I{2}, eps);
  check<&T::group_norm_backward>(maps, I{2});
  check<&T::channel_moments>(maps);
  check<&T::batch_norm_forward>(maps);
  check<&T::batch_norm_backward_sums>(maps);
  check<&T::batch_norm_backward>(maps);
  check_both<&T::batch_norm_statistics>(2.0, 1e-5, I{5});
  check<&T::batch_norm_track>(2.0, 0.1, I{5});
  check<&T::inverse_std>(1e-5, I{5});
  check<&T::divide_f64>(3.0, I{5});
  check_both<&T::group_sums>(I{3}, I{6}, I{2});
  check<&T::spread_groups>(I{3}, I{6}, I{2});
  check<&T::sum_rows_f64>(I{3}, I{5});
  check<&T::row_norm_forward>(I{3}, I{5});
  check<&T::row_norm_backward_sums>(I{3}, I{5});
  check<&T::row_norm_backward>(I{3}, I{5});

  check<&T::add_channel_bias>(maps);
  check<&T::channel_bias_backward>(maps);
  check<&T::permute>(Permutation{{2, 3, 4}, {2, 0, 1}});
  check<&T::unfold>(unfolding);
  check<&T::fold>(unfolding);
  check<&T::resample>(ResampleShape{2, 3, 3, taps(), taps()});
  check<&T::max_pool_forward>(unfolding);
  check<&T::max_pool_backward>(unfolding);

  check<&T::embedding_forward>(I{4}, part, I{3});
  check<&T::embedding_forward_bf16>(I{4}, part, I{3});
  check<&T::embedding_backward>(I{4}, part, I{3});
  check<&T::rope_forward>(rope);
  check<&T::rope_forward_bf16>(rope);
  check<&T::rope_backward>(rope);
  check<&T::rope_backward_bf16>(rope);

  check<&T::attention_forward>(causal);
  check<&T::attention_forward_bf16>(causal);
  check<&T::attention_backward>(causal);
  check<&T::attention_backward_bf16>(causal);
  check_both<&T::full_attention_forward>(full);
  check_both<&T::full_attention_forward_bf16>(full);
  check_both<&T::full_attention_backward>(full);
  check_both<&T::full_attention_backward_bf16>(full);
  check_both<&T::attention_piece_forward>(piece);
  check<&T::attention_delta>(full);
  check_both<&T::attention_piece_backward_queries>(piece);
  check_both<&T::attention_piece_backward_keys>(piece);
  check_both<&T::attention_weights_forward>(full);
  check_both<&T::attention_weights_backward>(full);
  check<&T::attention_apply_forward>(full);
  check<&T::attention_apply_backward>(full);

  check<&T::silu_forward>(I{7});
  check<&T::silu_forward_bf16>(I{7});
  check<&T::silu_backward>(I{7});
  check<&T::silu_backward_bf16>(I{7});
  check<&T::gelu_forward>(I{7}, GeluForm::erf);
  check<&T::gelu_forward_bf16>(I{7}, GeluForm::erf);
  check<&T::gelu_backward>(I{7}, GeluForm::tanh);
  check<&T::gelu_backward_bf16>(I{7}, GeluForm::tanh);
  check<&T::relu_forward>(I{7});
  check<&T::relu_forward_bf16>(I{7});
  check<&T::relu_backward>(I{7});
  check<&T::relu_backward_bf16>(I{7});
  check<&T::swiglu_forward>(I{7});
  check<&T::swiglu_forward_bf16>(I{7});
  check<&T::swiglu_backward>(I{7});
  check<&T::swiglu_backward_bf16>(I{7});
  check<&T::add>(I{7});
  check<&T::add_bf16>(I{7});
  check<&T::scale>(2.0f, I{7});
  check<&T::fill>(2.0f, I{7});
  check<&T::dropout>(I{7}, DropoutRun{RandomStream(7, "rows"), 3, 0.0f, 2.0f});
  check<&T::dropout_bf16>(I{7}, DropoutRun{RandomStream(7, "rows"), 3, 0.0f, 2.0f});
  check<&T::round_to_bf16>(I{7});
  check<&T::widen_bf16>(I{7});

  check<&T::cross_entropy_terms>(I{4}, vocab, 0.1);
  check<&T::cross_entropy_sum>(2, I{4}, I{10}, 0.1, 1e-4);
  check_both<&T::cross_entropy_backward>(I{4}, vocab, 0.1, 1e-4);
  check<&T::count_valid>(I{4});
  check_both<&T::element_loss_forward>(loss, LossTerm::squared_error);
  check<&T::element_loss_forward>(loss, LossTerm::binary_cross_entropy);
  check_both<&T::element_loss_backward>(loss, LossTerm::squared_error);

  check<&T::normalise>(1e-12, I{7});
  check_both<&T::spectral_divide>(I{7});
  check<&T::spectral_keep>(I{7});
  check<&T::sum_of_squares>(I{7});
  check<&T::adamw_step>(I{7}, AdamWStep{0.1, 0.9, 0.99, 1e-8, 0.1, 1});
  check<&T::sgd_step>(I{7}, SgdStep{0.1, 0.9, 0.1});
  check<&T::sgd_step>(Optional::null, I{7}, SgdStep{0.1, 0.0, 0.1});
  check<&T::lion_step>(I{7}, LionStep{0.1, 0.9, 0.99, 0.1});
  check<&T::schedule_free_step>(I{7}, ScheduleFreeStep{0.1, 0.9, 0.99, 1e-8, 0.1, 0.5, 1});

  std::vector<std::string> warnings;
  for_each_kernel([&]<auto Member>() {
    EXPECT_EQ(seen.count(Row<Member>::name), 1u) << Row<Member>::name << " is not checked";
    EXPECT_EQ(Row<Member>::number, warnings.size());
    warnings.push_back(warning_of(Row<Member>::name));
  });
  EXPECT_EQ(host.warnings, warnings) << "one for each kernel, in the order of the calls";
  EXPECT_TRUE(refusing.warnings.empty());
}

bool products_of_bf16(std::string_view name) {
  return name == "matmul_bf16" || name == "tree_matmul_bf16" || name == "round_to_bf16" ||
         name == "widen_bf16" || name == "embedding_forward_bf16";
}

// A device that has only what others are composed of.
const T& parts() {
  static const T kParts = [] {
    T parts = weft::test::late::table();
    parts.linear_forward = nullptr, parts.linear_forward_bf16 = nullptr;
    parts.linear_backward_input = nullptr, parts.linear_backward_weight = nullptr;
    parts.layer_norm_forward = nullptr, parts.layer_norm_backward = nullptr;
    parts.channel_norm_forward = nullptr, parts.channel_norm_backward = nullptr;
    parts.group_norm_forward = nullptr, parts.group_norm_backward = nullptr;
    parts.attention_forward = nullptr, parts.attention_backward = nullptr;
    parts.full_attention_forward = nullptr;
    parts.matmul_to_bf16 = nullptr;
    for_each_kernel([&]<auto Member>() {  // each has a kernel of f32
      if (Row<Member>::name.ends_with("_bf16") && !products_of_bf16(Row<Member>::name))
        parts.*Member = nullptr;
    });
    return parts;
  }();
  return kParts;
}

struct Compositions : KernelRows {
  OnLate device{parts()};

  template <auto Member, class... Values>
  void expect_near(Optional optional, Values... given) {
    using C = Case<Member>;
    SCOPED_TRACE(Row<Member>::name);
    EXPECT_EQ(parts().*Member, nullptr);
    const std::tuple<Values...> values_of(given...);
    std::array<std::byte, C::kOperands> somewhere{};
    typename C::Pointers pointers;
    for (std::size_t i = 0; i < C::kOperands; ++i) pointers[i] = &somewhere[i];
    const auto rows = C::operands(C::arguments(pointers, values_of));
    std::vector<Bytes> in;
    std::vector<bool> null;
    C::each_operand([&]<class E>(std::size_t i) {
      null.push_back(optional == Optional::null && rows[i].may_be_null);
      in.push_back(null[i] ? Bytes{} : values<E>(rows[i].elements, static_cast<unsigned>(i)));
    });
    const std::vector<Bytes> want = direct<Member>(in, null, values_of),
                             got = on<Member>(device, in, null, values_of);
    ASSERT_EQ(got.size(), want.size());
    C::each_operand([&]<class E>(std::size_t i) {
      if constexpr (std::is_same_v<E, float>) {
        for (std::size_t at = 0; at < want[i].size(); at += sizeof(E)) {
          E a{}, b{};
          std::memcpy(&a, &want[i][at], sizeof(E));
          std::memcpy(&b, &got[i][at], sizeof(E));
          EXPECT_NEAR(a, b, 4e-6 * std::max(1.0f, std::abs(a))) << "operand " << i << ", byte " << at;
        }
      } else if constexpr (std::is_same_v<E, bf16>) {  // of numbers that may differ so much, rounded
        for (std::size_t at = 0; at < want[i].size(); at += sizeof(E)) {
          E a{}, b{};
          std::memcpy(&a, &want[i][at], sizeof(E));
          std::memcpy(&b, &got[i][at], sizeof(E));
          const auto x = static_cast<float>(a), y = static_cast<float>(b);
          EXPECT_NEAR(x, y, 0x1p-7f * std::abs(x) + 4e-6f) << "operand " << i << ", byte " << at;
        }
      } else {
        EXPECT_EQ(got[i], want[i]) << "operand " << i;
      }
    });
  }
};

TEST_F(Compositions, ComputeTheSame) {
  const LinearShape linear{3, 4, 5};
  const MapShape maps{2, 4, 3};
  for (const Optional optional : {Optional::given, Optional::null}) {
    expect_near<&T::linear_forward>(optional, linear);
    expect_near<&T::linear_forward_bf16>(optional, linear);
    expect_near<&T::linear_backward_weight>(optional, linear);
    expect_near<&T::full_attention_forward>(optional, FullAttentionShape{2, 3, 5, 4, 2, 3});
  }
  expect_near<&T::linear_backward_input>(Optional::given, linear);
  expect_near<&T::layer_norm_forward>(Optional::given, I{3}, I{5}, 1e-5f);
  expect_near<&T::layer_norm_backward>(Optional::given, I{3}, I{5});
  expect_near<&T::channel_norm_forward>(Optional::given, maps, 1e-5f);
  expect_near<&T::channel_norm_backward>(Optional::given, maps);
  expect_near<&T::group_norm_forward>(Optional::given, maps, I{2}, 1e-5f);
  expect_near<&T::group_norm_backward>(Optional::given, maps, I{2});
  expect_near<&T::attention_forward>(Optional::given, AttentionShape{2, 5, 4, 2, 3});
  expect_near<&T::attention_backward>(Optional::given, AttentionShape{2, 5, 4, 2, 3});
  for (const Optional optional : {Optional::given, Optional::null})
    expect_near<&T::matmul_to_bf16>(optional, Stored::plain, Stored::transposed, I{3}, I{5}, I{4});
  EXPECT_TRUE(device.warnings.empty());
  EXPECT_EQ(device.late.blocks(), 0u) << "temporary memory was given back";
}

// A kernel of bf16 has the bits of its kernel of f32 on widened operands, rounded.
struct OfBf16 : KernelRows {
  template <auto Narrow, auto Wide, class... Values>
  void expect_rounded(Values... given) {
    using N = Case<Narrow>;
    using W = Case<Wide>;
    SCOPED_TRACE(Row<Narrow>::name);
    checked.insert(Row<Narrow>::name);
    const std::tuple<Values...> values_of(given...);
    std::array<std::byte, N::kOperands> somewhere{};
    typename N::Pointers pointers;
    for (std::size_t i = 0; i < N::kOperands; ++i) pointers[i] = &somewhere[i];
    const auto rows = N::operands(N::arguments(pointers, values_of));
    std::vector<Bytes> narrow, wide;
    std::array<bool, N::kOperands> is_narrow{};
    N::template each_operand([&]<class E>(std::size_t i) {
      narrow.push_back(values<E>(rows[i].elements, static_cast<unsigned>(i)));
      is_narrow[i] = std::is_same_v<E, bf16>;
    });
    const std::vector<bool> null(N::kOperands, false);
    W::template each_operand(
        [&]<class E>(std::size_t i) { wide.push_back(is_narrow[i] ? widened(narrow[i]) : narrow[i]); });
    const std::vector<Bytes> got = direct<Narrow>(narrow, null, values_of),
                             want = direct<Wide>(wide, null, values_of);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      EXPECT_EQ(got[i], is_narrow[i] ? rounded(want[i]) : want[i]) << "operand " << i;
  }
  static Bytes widened(const Bytes& from) {
    Bytes to(from.size() * 2);
    for (std::size_t i = 0; i < from.size() / 2; ++i) {
      bf16 x;
      std::memcpy(&x, &from[2 * i], 2);
      const auto y = static_cast<float>(x);
      std::memcpy(&to[4 * i], &y, 4);
    }
    return to;
  }
  static Bytes rounded(const Bytes& from) {
    Bytes to(from.size() / 2);
    for (std::size_t i = 0; i < to.size() / 2; ++i) {
      float x{};
      std::memcpy(&x, &from[4 * i], 4);
      const bf16 y(x);
      std::memcpy(&to[2 * i], &y, 2);
    }
    return to;
  }
  std::set<std::string_view> checked;
};

TEST_F(OfBf16, HasTheBitsOfF32Rounded) {
  const AttentionShape causal{2, 70, 4, 2, 16};
  const FullAttentionShape full{2, 33, 70, 4, 2, 16};
  const RopeShape rope{2, 65, 2, 48};
  const DropoutRun run{RandomStream(7, "rows"), 3, 0.5f, 2.0f};
  const I n = 20000, rows = 130, dim = 67;
#define WEFT_ROUNDED(name, ...) expect_rounded<&T::name##_bf16, &T::name>(__VA_ARGS__)
  WEFT_ROUNDED(add_bias, rows, dim);
  WEFT_ROUNDED(bias_backward, rows, dim);
  WEFT_ROUNDED(rms_norm_forward, rows, dim, 1e-5f);
  WEFT_ROUNDED(rms_norm_backward, rows, dim);
  WEFT_ROUNDED(layer_norm_forward, rows, dim, 1e-5f);
  WEFT_ROUNDED(layer_norm_backward, rows, dim);
  WEFT_ROUNDED(rope_forward, rope);
  WEFT_ROUNDED(rope_backward, rope);
  WEFT_ROUNDED(attention_forward, causal);
  WEFT_ROUNDED(attention_backward, causal);
  WEFT_ROUNDED(full_attention_forward, full);
  WEFT_ROUNDED(full_attention_backward, full);
  WEFT_ROUNDED(silu_forward, n);
  WEFT_ROUNDED(silu_backward, n);
  WEFT_ROUNDED(gelu_forward, n, GeluForm::erf);
  WEFT_ROUNDED(gelu_forward, n, GeluForm::tanh);
  WEFT_ROUNDED(gelu_backward, n, GeluForm::erf);
  WEFT_ROUNDED(gelu_backward, n, GeluForm::tanh);
  WEFT_ROUNDED(relu_forward, n);
  WEFT_ROUNDED(relu_backward, n);
  WEFT_ROUNDED(swiglu_forward, n);
  WEFT_ROUNDED(swiglu_backward, n);
  WEFT_ROUNDED(add, n);
  WEFT_ROUNDED(dropout, n, run);
#undef WEFT_ROUNDED
  for_each_kernel([&]<auto Member>() {
    constexpr std::string_view kName = Row<Member>::name;
    if (kName.ends_with("_bf16") && !products_of_bf16(kName) && kName != "linear_forward_bf16" &&
        kName != "matmul_to_bf16") {
      EXPECT_EQ(checked.count(kName), 1u) << kName << " is not checked";
    }
  });
}

TEST_F(Compositions, OfBf16ComputeTheSame) {
  const auto expect_same = [&]<auto Member>(auto... given) {
    expect_near<Member>(Optional::given, given...);
  };
  const I n = 7, rows = 3, dim = 5;
  const RopeShape rope{2, 3, 2, 4};
  const AttentionShape causal{2, 5, 4, 2, 3};
  const FullAttentionShape full{2, 3, 5, 4, 2, 3};
  expect_same.template operator()<&T::add_bias_bf16>(rows, dim);
  expect_same.template operator()<&T::bias_backward_bf16>(rows, dim);
  expect_same.template operator()<&T::rms_norm_forward_bf16>(rows, dim, 1e-5f);
  expect_same.template operator()<&T::rms_norm_backward_bf16>(rows, dim);
  expect_same.template operator()<&T::layer_norm_forward_bf16>(rows, dim, 1e-5f);
  expect_same.template operator()<&T::layer_norm_backward_bf16>(rows, dim);
  expect_same.template operator()<&T::rope_forward_bf16>(rope);
  expect_same.template operator()<&T::rope_backward_bf16>(rope);
  expect_same.template operator()<&T::attention_forward_bf16>(causal);
  expect_same.template operator()<&T::attention_backward_bf16>(causal);
  expect_same.template operator()<&T::full_attention_forward_bf16>(full);
  expect_same.template operator()<&T::full_attention_backward_bf16>(full);
  expect_same.template operator()<&T::silu_forward_bf16>(n);
  expect_same.template operator()<&T::silu_backward_bf16>(n);
  expect_same.template operator()<&T::gelu_forward_bf16>(n, GeluForm::erf);
  expect_same.template operator()<&T::gelu_backward_bf16>(n, GeluForm::erf);
  expect_same.template operator()<&T::relu_forward_bf16>(n);
  expect_same.template operator()<&T::relu_backward_bf16>(n);
  expect_same.template operator()<&T::swiglu_forward_bf16>(n);
  expect_same.template operator()<&T::swiglu_backward_bf16>(n);
  expect_same.template operator()<&T::add_bf16>(n);
  expect_same.template operator()<&T::dropout_bf16>(n, DropoutRun{RandomStream(7, "rows"), 3, 0.5f, 2.0f});
}

TEST_F(Compositions, RefuseGroupsThatDoNotDivide) {
  KernelContext ctx(device.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         group_norm_forward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                            {1, 4, 1}, 3, 1e-5f);
                         return 0;
                       }),
            "group_norm_forward: 4 channels do not divide into 3 groups");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         group_norm_backward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                             nullptr, nullptr, {1, 4, 1}, 3);
                         return 0;
                       }),
            "group_norm_backward: 4 channels do not divide into 3 groups");
}

// A composition whose parts are missing is no composition: the error names the kernel that was called.
TEST(MissingParts, AreNotNamed) {
  T table = parts();
  table.row_norm_forward = nullptr;
  OnLate device{table};
  KernelContext ctx(device.compute);
  EXPECT_EQ(error_text(ErrorCode::unsupported,
                       [&] {
                         const float* const x = nullptr;
                         layer_norm_forward(ctx, x, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 0, 1e-5f);
                         return 0;
                       }),
            absence_of("layer_norm_forward"));
}

// Any size may be 0.
TEST_F(KernelRows, NothingIsCopiedForNoElements) {
  KernelContext ctx(host.compute);
  const float* const none = nullptr;
  add(ctx, none, none, nullptr, 0);
  const Tensor loss = host.compute.make({1}, DType::f64);
  sum_of_squares(ctx, nullptr, loss.data_ptr<double>(), 0);
  EXPECT_EQ(to_host(host.context, loss).as<double>()[0], 0.0);
}

// On the host a kernel finds wrong data at once.
TEST_F(KernelRows, AnErrorOfTheHostsKernelIsTheCallers) {
  KernelContext ctx(host.compute);
  const Tensor x = host.compute.zeros({3}), sigma = host.compute.zeros({1});
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         spectral_divide(ctx, x.data_ptr<float>(), sigma.data_ptr<float>(), nullptr, 3);
                         return 0;
                       }),
            "spectral norm: sigma is 0; expected a number other than 0");
}

const char* const kHead = R"(# Kernels

A device computes these functions of `kernels::KernelTable` for the layers ([devices](devices.md)). They are
in the order of `weft/nn/kernels.inl`, which also says what each computes. *reads*, *writes* (all of it) and
*updates* give the dimensions of each array on the device; *optional*: the pointer may be null. The names of
dimensions are those of arguments; `weft/nn/kernels.hpp` says of which dimensions `s.elements()` and its like
are the product. A device need not have all kernels: the last column says of which kernels of the device a
missing one is composed. Any other missing kernel is an error of the call that needs it, or runs on the host
with `WEFT_HOST_KERNELS=1`.

Tests make this page: `WEFT_TEST_WRITE=1 ctest --test-dir build/dev -R '^nn/kernel_rows$'` writes it anew.
They run each kernel on arrays that are exactly as long as the page says.

)";

std::string page() {
  std::map<std::string_view, std::string> parts_of;
  for (const Composition& c : compositions()) {
    std::string& of = parts_of[c.kernel];
    for (const std::string_view part : c.parts) of += (of.empty() ? "`" : ", `") + std::string(part) + "`";
  }
  std::string text = std::string(kHead) + "| kernel | operands | composed of |\n|---|---|---|\n";
  for_each_kernel([&]<auto Member>() {
    using Of = Row<Member>;
    text += "| `" + std::string(Of::name) + "` | `" + std::string(Of::text) + "` | " + parts_of[Of::name] +
            " |\n";
  });
  return text;
}

TEST(KernelPage, IsMadeOfTheList) {
  const std::filesystem::path path = weft::test::source_dir() / "docs" / "kernels.md";
  if (std::getenv("WEFT_TEST_WRITE") != nullptr) std::ofstream(path) << page();
  FileIn file(path);
  TextOut text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), page()) << "make it anew: WEFT_TEST_WRITE=1, as the page says";
}

TEST(KernelPage, SaysOfWhichKernelsEachIsComposed) {
  std::set<std::string_view> composed, absent;
  for (const Composition& c : compositions()) composed.insert(c.kernel);
  for_each_kernel([&]<auto Member>() {
    if (parts().*Member == nullptr) absent.insert(Row<Member>::name);
  });
  EXPECT_EQ(composed, absent) << "the tests above run each composition";
}

// An error names the kernel that was called, and no heads at all are 0 over 0.
TEST_F(Compositions, OfAttentionRefuseHeadsByTheirName) {
  KernelContext ctx(device.compute);
  const auto refused = [](const std::string& kernel) {
    return kernel + ": 5 query heads over 2 key/value heads; expected a multiple";
  };
  float* const none = nullptr;
  const AttentionShape wrong{1, 0, 5, 2, 4};
  const FullAttentionShape full{1, 0, 0, 5, 2, 4};
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] { return attention_forward(ctx, none, none, none, none, none, wrong), 0; }),
            refused("attention_forward"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         attention_backward(ctx, none, none, none, none, none, none, none, none, none, wrong);
                         return 0;
                       }),
            refused("attention_backward"));
  EXPECT_EQ(
      error_text(ErrorCode::bad_argument,
                 [&] { return full_attention_forward(ctx, none, none, none, {}, none, none, full), 0; }),
      refused("full_attention_forward"));
  attention_forward(cpu, none, none, none, none, none, {2, 3, 0, 0, 4});
  attention_backward(cpu, none, none, none, none, none, none, none, none, none, {2, 3, 0, 0, 4});
  full_attention_forward(cpu, none, none, none, {}, none, none, {2, 3, 3, 0, 0, 4});
}

// The variance of no features is 0, on every device.
TEST_F(Compositions, OfNoFeaturesHaveAVarianceOfZero) {
  constexpr float kEps = 1e-5f, kWant = 316.227766f;
  std::vector<float> mean(3), inv(3);
  float* const none = nullptr;
  layer_norm_forward(cpu, none, none, none, none, mean.data(), inv.data(), 3, 0, kEps);
  for (const float x : inv) EXPECT_FLOAT_EQ(x, kWant);
  channel_norm_forward(cpu, none, none, none, none, mean.data(), inv.data(), {1, 0, 3}, kEps);
  for (const float x : inv) EXPECT_FLOAT_EQ(x, kWant);
  rms_norm_forward(cpu, none, none, none, inv.data(), 3, 0, kEps);
  for (const float x : inv) EXPECT_FLOAT_EQ(x, kWant);
  KernelContext ctx(device.compute);
  const Tensor of_mean = device.compute.make({3}), of_inv = device.compute.make({3});
  layer_norm_forward(ctx, none, none, none, none, of_mean.data_ptr<float>(), of_inv.data_ptr<float>(), 3, 0,
                     kEps);
  const Tensor home = to_host(device.context, of_inv);
  for (const float x : home.f32()) EXPECT_FLOAT_EQ(x, kWant);
}

// Memory to which queued copies write lives until they are done.
TEST(HostKernels, WaitForTheirCopiesIfOneFails) {
  OnLate host = without_kernels_on_host();
  const Stream stream = host.compute.stream();
  const Tensor a = to_device(host.context, Tensor::zeros(host.context, {4}), stream);
  const Tensor sum = host.compute.make({4});
  KernelContext ctx(host.compute);
  const auto add_up = [&] {
    add(ctx, a.data_ptr<float>(), a.data_ptr<float>(), sum.data_ptr<float>(), sum.count());
  };
  host.compute.wait();
  host.late.fail_copy(1);
  EXPECT_THROW(add_up(), std::runtime_error);
  EXPECT_EQ(host.late.waiting(), 0u) << "the copy of the first operand";
  add_up();
  EXPECT_EQ(to_host(host.context, sum).f32()[3], 0);
}

TEST(HostKernels, AreZeroOrOne) {
  ::setenv("WEFT_HOST_KERNELS", "yes", 1);
  Context context;
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { return &weft::test::add_late_device(context); }),
            "WEFT_HOST_KERNELS is \"yes\"; expected an integer from 0 to 1");
  ::unsetenv("WEFT_HOST_KERNELS");
}

}  // namespace
}  // namespace weft::kernels
