#include "map_data.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "weft/base/error.hpp"
#include "weft/base/random.hpp"

namespace weft::tools {
namespace {

[[noreturn]] void bad_maps(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "train: " + text);
}

constexpr int kDims = 4;  // samples, channels, rows, columns

}  // namespace

MapFile::MapFile(const std::filesystem::path& file, const std::string& subject) {
  const std::string where = fmt::format("{} \"{}\":", subject, file.string());
  const auto refuse = [&](const std::string& what) {
    throw Error(ErrorCode::bad_argument, fmt::format("{} {}", where, what));
  };
  file_ = MappedFile(file, where);
  const NpyHeader header = read_npy_header(file_.bytes(), where);
  if (header.type != "<f4" && header.type != "<f8")
    refuse(fmt::format("has elements of type \"{}\"; expected <f4 or <f8", header.type));
  if (header.fortran_order) refuse("is in Fortran's order; expected C order (numpy.ascontiguousarray)");
  wide_ = header.type == "<f8";
  extents_ = header.extents();
  if (extents_.size() != kDims || std::ranges::any_of(extents_, [](std::int64_t n) { return n < 1; }))
    refuse(fmt::format("has the shape ({}); expected (samples, channels, rows, columns)", header.shape));
  begin_ = header.bytes;
  std::int64_t elements = 1;
  for (const std::int64_t extent : extents_)
    if (__builtin_mul_overflow(elements, extent, &elements)) refuse("has more elements than can be counted");
  const auto there = static_cast<std::int64_t>((file_.bytes().size() - begin_) / (wide_ ? 8 : 4));
  if (there < elements) refuse(fmt::format("says that it has {} elements; there are {}", elements, there));
}

void MapFile::read(std::int64_t sample, float* to) const {
  const std::int64_t count = extents_[1] * extents_[2] * extents_[3];
  const std::size_t width = wide_ ? sizeof(double) : sizeof(float);
  const char* const from = file_.bytes().data() + begin_ + static_cast<std::size_t>(sample * count) * width;
  if (!wide_) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * width);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    double value = 0;
    std::memcpy(&value, from + static_cast<std::size_t>(i) * width, width);
    to[i] = static_cast<float>(value);
  }
}

void MapConfig::fill_in() {
  constexpr std::int64_t kMadeUp[] = {1024, 16, 16, 32};
  std::vector<std::int64_t> extents(std::begin(kMadeUp), std::end(kMadeUp));
  if (!maps.empty()) extents = MapFile(maps, "train: maps").extents();
  std::int64_t* const sizes[] = {&samples, &channels, &rows, &columns};
  for (std::size_t i = 0; i < kDims; ++i)
    if (*sizes[i] == 0) *sizes[i] = extents[i];
}

void MapConfig::check() const {
  const std::pair<const char*, std::int64_t> sizes[] = {
      {"map-samples", samples}, {"channels", channels}, {"map-rows", rows}, {"map-columns", columns}};
  for (const auto& [name, size] : sizes)
    if (size < 1) bad_maps(fmt::format("{} is {}; expected 1 or more", name, size));
  if (maps.empty() && !targets.empty())
    bad_maps(fmt::format("targets is \"{}\" without maps; expected both", targets.string()));
  if (maps.empty()) return;
  const MapFile file(maps, "train: maps");
  for (std::size_t i = 0; i < kDims; ++i)
    if (sizes[i].second != file.extents()[i])
      bad_maps(fmt::format("{} is {}; maps \"{}\" is ({}): expected {}, or 0", sizes[i].first,
                           sizes[i].second, maps.string(), fmt::join(file.extents(), ", "),
                           file.extents()[i]));
  if (targets.empty()) return;
  const MapFile other(targets, "train: targets");
  if (other.extents() != file.extents())
    bad_maps(fmt::format("targets \"{}\" is ({}); expected ({}), as maps", targets.string(),
                         fmt::join(other.extents(), ", "), fmt::join(file.extents(), ", ")));
}

std::string MapConfig::identity() const {
  if (maps.empty()) return fmt::format("map_samples={} map_rows={} map_columns={}", samples, rows, columns);
  std::string identity = fmt::format("maps={:016x}", MapFile(maps, "train: maps").fingerprint());
  if (!targets.empty())
    identity += fmt::format(" targets={:016x}", MapFile(targets, "train: targets").fingerprint());
  return identity;
}

MapData::MapData(const MapConfig& config, double held_out, std::uint64_t seed)
    : config_(config), seed_(seed) {
  config.check();
  if (!config.maps.empty()) maps_.emplace(config.maps, "train: maps");
  if (!config.targets.empty()) targets_.emplace(config.targets, "train: targets");
  const bool follow = maps_ && !targets_;  // the target of a map is the next map
  const std::int64_t all = config.samples - (follow ? 1 : 0);
  held_out_.size = std::llround(static_cast<double>(all) * held_out);
  held_out_.offset = all - held_out_.size;
  training_ = held_out_.offset;
  if (follow && held_out_.size > 0) --training_;  // its target is the first map that is held out
  const std::string words =
      fmt::format("{} maps{}", config.samples, follow ? ", each the target of the one before" : "");
  if (training_ < 1) bad_maps(fmt::format("{} leave no sample to train on", words));
  if (held_out > 0 && held_out_.size < 1)
    bad_maps(fmt::format("held-out is {}: {} leave no sample to evaluate on", held_out, words));
}

void MapData::read(std::int64_t number, float* input, float* target) const {
  if (maps_) {
    maps_->read(number, input);
    if (targets_)
      targets_->read(number, target);
    else
      maps_->read(number + 1, target);
    return;
  }
  const std::int64_t pixels = config_.rows * config_.columns;
  for (std::int64_t c = 0; c < config_.channels; ++c)
    make_up(number, c, input + c * pixels, target + c * pixels);
}

namespace {

// cos and sin of `first` + i `step`
struct Turns {
  std::vector<double> cosines, sines;
  Turns(double first, double step, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const double at = first + step * static_cast<double>(i);
      cosines.push_back(std::cos(at));
      sines.push_back(std::sin(at));
    }
  }
};

// map += height cos(row + column): the cosine of a sum, from those of its parts.
void add_wave(double height, const Turns& rows, const Turns& columns, float* map) {
  for (std::size_t i = 0; i < rows.cosines.size(); ++i)
    for (std::size_t j = 0; j < columns.cosines.size(); ++j)
      *map++ += static_cast<float>(height *
                                   (rows.cosines[i] * columns.cosines[j] - rows.sines[i] * columns.sines[j]));
}

}  // namespace

// A sum of waves, and the same one time step later. The channels of a pair have the same waves, a quarter of
// a period apart.
void MapData::make_up(std::int64_t number, std::int64_t channel, float* input, float* target) const {
  constexpr int kWaves = 3, kNumbers = 4;       // of each wave: both wave numbers, phase, amplitude
  constexpr double kDown = 0.5, kRight = 1.25;  // cells in a time step
  constexpr double kMostPeriods = 3;
  constexpr double kScale = 0.7845;  // of waves that are half to one and a half times as high: variance 1
  float drawn[kWaves * kNumbers];
  const std::int64_t pair = number * ((config_.channels + 1) / 2) + channel / 2;
  RandomStream(seed_, "weft train: made-up maps")
      .uniform(static_cast<std::uint64_t>(pair * kWaves * kNumbers), kWaves * kNumbers, drawn);
  const std::int64_t rows = config_.rows, columns = config_.columns;
  std::fill_n(input, rows * columns, 0.0f);
  std::fill_n(target, rows * columns, 0.0f);
  for (int wave = 0; wave < kWaves; ++wave) {
    const float* const of = drawn + wave * kNumbers;
    const double turn = 2 * std::numbers::pi;
    const double down = turn * std::floor(of[0] * (kMostPeriods + 1)) / static_cast<double>(rows),
                 right = turn * (1 + std::floor(of[1] * kMostPeriods)) / static_cast<double>(columns),
                 phase = turn * of[2] + (channel % 2 == 0 ? 0 : turn / 4), height = kScale * (0.5 + of[3]);
    const Turns of_rows(0, down, rows);
    add_wave(height, of_rows, Turns(phase, right, columns), input);
    add_wave(height, of_rows, Turns(phase - down * kDown - right * kRight, right, columns), target);
  }
}

}  // namespace weft::tools
