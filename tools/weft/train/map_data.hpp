// The maps of a run: a sample is an input map and its target, the map one time step later. Any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data_file.hpp"
#include "weft/base/chunk.hpp"

namespace weft::tools {

struct MapConfig {
  /// Arrays of NumPy (samples, channels, rows, columns), f4 or f8. Without `maps` the maps are made up;
  /// without `targets` the target of a map is the next map of `maps`.
  std::filesystem::path maps = {}, targets = {};
  /// 0, until fill_in(): of the file, or 16 channels and 1024 maps of 16 x 32.
  std::int64_t channels = 0, rows = 0, columns = 0, samples = 0;

  /// Gives sizes that are 0 their values. Throws the errors of MapFile.
  void fill_in();
  /// Throws bad_argument if sizes are no sizes, or differ from those of the files; call it after fill_in().
  void check() const;
  std::string identity() const;
};

/// A mapped file of maps.
class MapFile {
 public:
  /// Throws system if the file cannot be read, and bad_argument, with the file's name, if it has another
  /// form. `subject`: the beginning of error texts.
  MapFile(const std::filesystem::path& file, const std::string& subject);
  std::int64_t samples() const noexcept { return extents_[0]; }
  /// (samples, channels, rows, columns)
  const std::vector<std::int64_t>& extents() const noexcept { return extents_; }
  /// Writes the channels * rows * columns elements of a map.
  void read(std::int64_t sample, float* to) const;
  std::uint64_t fingerprint() const { return hash_of_parts(file_.bytes()); }

 private:
  MappedFile file_;
  std::vector<std::int64_t> extents_;
  std::size_t begin_ = 0;
  bool wide_ = false;  // f8
};

/// Samples by number. Made-up maps are waves that move over the map with one velocity for all: functions of
/// the seed and of the sample's number alone, whose next time step is known exactly.
class MapData {
 public:
  /// The last `held_out` part of the samples is held out. Throws the errors of MapFile and of
  /// MapConfig::check(), and bad_argument if one of the parts has no sample.
  MapData(const MapConfig& config, double held_out, std::uint64_t seed);
  /// The numbers of samples of the training part, which are the first, and of the held-out part.
  std::int64_t population() const noexcept { return training_; }
  std::int64_t held_out() const noexcept { return held_out_.size; }
  /// Writes a sample, channels * rows * columns elements each.
  void read(std::int64_t number, float* input, float* target) const;
  void read_held_out(std::int64_t number, float* input, float* target) const {
    read(held_out_.offset + number, input, target);
  }

 private:
  void make_up(std::int64_t number, std::int64_t channel, float* input, float* target) const;
  MapConfig config_;
  std::uint64_t seed_;
  std::optional<MapFile> maps_, targets_;
  std::int64_t training_ = 0;
  Chunk held_out_;
};

}  // namespace weft::tools
