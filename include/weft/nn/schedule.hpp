// Learning rates over time. Pure arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

/// The course of a learning rate after its warm-up.
enum class ScheduleForm : std::uint8_t {
  none,      ///< `peak` at every step, without a warm-up. For optimizers that need no schedule
  constant,  ///< stays at `peak`
  linear,    ///< falls along a straight line
  cosine,    ///< falls along half a cosine (I. Loshchilov, F. Hutter, SGDR, arXiv:1608.03983, no restarts)
  /// Warm-up, stable, decay: stays at `peak` and falls in the last `decay` steps (S. Hu et al., MiniCPM,
  /// arXiv:2404.06395, section 4).
  wsd,
  rex,  ///< falls slowly at first: reflected exponential (J. Chen, C. Wolfe, A. Kyrillidis, arXiv:2107.04197)
};

/// The curve of the decay of ScheduleForm::wsd. `one_minus_sqrt` is of A. Hägele et al., arXiv:2405.18392.
enum class DecayShape : std::uint8_t { linear, cosine, one_minus_sqrt };

/// The name of a form or shape, as options of programs use it: "wsd", "1-sqrt".
const char* name(ScheduleForm form) noexcept;
const char* name(DecayShape shape) noexcept;
/// The form or shape with this name. Throws bad_argument that lists the names if there is none.
ScheduleForm schedule_form_from_name(std::string_view name);
DecayShape decay_shape_from_name(std::string_view name);

/// A learning rate for each step, as a plain value. Steps count from 0. The rate rises linearly from
/// peak/warmup to `peak` over the first `warmup` steps. A fall from `peak` at d = 0 to `floor` at d = 1 is
/// floor + (peak - floor) f(d):
///
///     linear          f(d) = 1 - d
///     cosine          f(d) = (1 + cos(pi d)) / 2
///     one_minus_sqrt  f(d) = 1 - sqrt(d)
///     rex             f(d) = (1 - d) / (1/2 + (1 - d)/2)
///
/// with d = (step - warmup) / (total - warmup), or for wsd d = (step - (total - decay)) / decay. From step
/// `total` on the rate is `floor`.
struct Schedule {
  ScheduleForm form = ScheduleForm::cosine;
  double peak = 1e-3, floor = 0;          ///< `floor`: none and constant do not use it
  std::int64_t warmup = 0;                ///< steps; none: 0
  std::int64_t total = 1;                 ///< steps; none and constant do not use it
  std::int64_t decay = 0;                 ///< wsd: steps of the decay, which ends at `total`; others: 0
  DecayShape shape = DecayShape::linear;  ///< wsd; others: linear

  /// Throws bad_argument, which names the field, unless peak is finite, 0 <= floor <= peak, 0 <= warmup <
  /// total (none: warmup = 0; constant: 0 <= warmup), and for wsd 1 <= decay <= total - warmup (others: decay
  /// = 0 and shape = linear).
  void check() const;
  /// The rate of a step of 0 or more. A pure function of the fields.
  double at(std::int64_t step) const noexcept;
  bool operator==(const Schedule&) const = default;
};

/// The fields that the form uses, as "name=value" separated by blanks. The numbers can be read back to the
/// same bits: "form=wsd peak=0.002 floor=0 warmup=10 total=100 decay=20 shape=1-sqrt".
std::string to_string(const Schedule& schedule);

}  // namespace weft
