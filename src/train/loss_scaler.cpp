#include "weft/train/loss_scaler.hpp"

#include <fmt/format.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dp/parts.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"
#include "weft/train/gradients.hpp"

namespace weft {
namespace {

constexpr const char* kWho = "loss_scaler";

[[noreturn]] void bad_scale(const std::string& text) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", kWho, text));
}
bool is_scale(double x) { return x > 0 && std::isfinite(x); }

bool all_finite(std::span<const Gradient> gradients, Compute* compute) {
  bool all = true;
  dp::for_power_sums(
      kWho, compute, gradients.size(), [&](std::size_t g) { return gradients[g].data; },
      std::numeric_limits<double>::infinity(),
      [&](std::size_t, const PowerSum& largest) { all = all && std::isfinite(largest.scale); });
  return all;
}

void expect_wide(std::span<const Gradient> gradients) {
  for (const Gradient& g : gradients)
    if (g.data.dtype == DType::f16)
      bad_scale(fmt::format(
          "the gradient of \"{}\" is f16; expected f64, f32 or bf16: divided by the scale its small elements "
          "would vanish",
          g.name));
}

// The message of each rank: its state, and whether its gradients are finite.
constexpr std::size_t kScale = 0, kGood = 1, kFinite = 2, kWords = 3;

std::string text_of_state(std::span<const std::uint64_t> words, int rank) {
  return fmt::format("{} after {}{}", std::bit_cast<double>(words[kScale]), words[kGood],
                     rank == 0 ? " good steps" : "");
}

}  // namespace

LossScaler::LossScaler(const Options& options) : options_(options), state_{options.scale, 0} {
  if (!is_scale(options.scale))
    bad_scale(fmt::format("scale is {}; expected a finite number above 0", options.scale));
  if (!(options.growth >= 1 && std::isfinite(options.growth)))
    bad_scale(fmt::format("growth is {}; expected a finite number of 1 or more", options.growth));
  if (!(options.backoff > 0 && options.backoff < 1))
    bad_scale(fmt::format("backoff is {}; expected more than 0, and less than 1", options.backoff));
  if (options.interval < 1) bad_scale(fmt::format("interval is {}; expected 1 or more", options.interval));
  if (!is_scale(options.least))
    bad_scale(fmt::format("least is {}; expected a finite number above 0", options.least));
}

bool LossScaler::unscale(std::span<const Gradient> gradients, const DeviceMesh& axes, Compute* compute) {
  given_mesh(kWho, axes);
  bool finite = false;
  const std::optional<Error> fault = fault_of([&] {
    expect_wide(gradients);
    check_gradients(kWho, gradients, compute);
    finite = all_finite(gradients, compute);
  });
  const std::uint64_t own[kWords] = {std::bit_cast<std::uint64_t>(state_.scale),
                                     static_cast<std::uint64_t>(state_.good_steps), finite};
  // Ranks may have different gradients (stages of a pipeline), so their lists are not compared.
  const std::vector<std::uint64_t> all = gather_with_list(
      kWho, axes, ListDigest(), own, [] { return ListEntries{}; }, fault);
  expect_same_words(kWho, "the scale is ", axes, all, kScale, kGood + 1, text_of_state);
  for (std::size_t at = kFinite; at < all.size(); at += kWords) finite = finite && all[at] != 0;
  if (finite)
    dp::scale_all(
        kWho, compute, gradients.size(), [&](std::size_t g) { return gradients[g].data; }, 1 / state_.scale);
  if (found_ != Found::not_finite) found_ = finite ? Found::finite : Found::not_finite;
  return finite;
}

bool LossScaler::unscale(std::span<Parameter* const> parameters, const DeviceMesh& axes, Compute* compute) {
  std::vector<Gradient> gradients = gradients_of(parameters, kWho);
  if (compute == nullptr && !parameters.empty() && parameters[0]->compute().device() != Device{})
    compute = &parameters[0]->compute();
  return unscale(std::span<const Gradient>(gradients), axes, compute);
}

void LossScaler::update() {
  switch (std::exchange(found_, Found::unknown)) {
    case Found::unknown: bad_scale("update() without unscale(); one comes before the other in each step");
    case Found::finite: {
      const double grown = state_.scale * options_.growth;
      if (++state_.good_steps < options_.interval) break;
      state_.good_steps = 0;
      if (grown <= static_cast<double>(std::numeric_limits<float>::max())) state_.scale = grown;
      break;
    }
    case Found::not_finite:
      if (state_.scale <= options_.least)
        bad_scale(fmt::format(
            "gradients are not finite though the scale is {}; something else than the scale is at fault",
            state_.scale));
      state_ = {std::max(state_.scale * options_.backoff, options_.least), 0};
      break;
  }
}

void LossScaler::set_state(const State& state) {
  if (!is_scale(state.scale))
    bad_scale(fmt::format("a state's scale is {}; expected a finite number above 0", state.scale));
  if (state.good_steps < 0)
    bad_scale(fmt::format("a state's good_steps is {}; expected 0 or more", state.good_steps));
  state_ = state;
  found_ = Found::unknown;
}

std::string LossScaler::to_text() const { return fmt::format("{} {}", state_.scale, state_.good_steps); }

void LossScaler::set_text(std::string_view text) {
  State state;
  const char* const end = text.data() + text.size();
  const auto scale = std::from_chars(text.data(), end, state.scale);
  if (scale.ec == std::errc() && scale.ptr != end && *scale.ptr == ' ') {
    const auto good = std::from_chars(scale.ptr + 1, end, state.good_steps);
    if (good.ec == std::errc() && good.ptr == end) return set_state(state);
  }
  bad_scale(fmt::format(
      "\"{}\" is no state; expected a scale and a number of steps, as to_text() writes them", text));
}

}  // namespace weft
