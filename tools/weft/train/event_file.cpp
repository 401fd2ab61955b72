#include "event_file.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>

#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

// The wire format: a key (field << 3 | type) before each value. Types: 0 a number in groups of seven bits, 1
// eight bytes, 2 a length and bytes, 5 four bytes.
void number(std::string& to, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>(value | 0x80);
  to += static_cast<char>(value);
}
template <class Value>
void bytes(std::string& to, Value value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);  // the low byte first, as this machine
}
void text(std::string& to, unsigned field, std::string_view value) {
  number(to, field << 3 | 2);
  number(to, value.size());
  to += value;
}

// Event: wall_time 1, step 2, and one of file_version 3, summary 5, session_log 7.
std::string event(std::int64_t step, unsigned field, std::string_view value) {
  std::string e;
  number(e, 1 << 3 | 1);
  bytes(e, std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
  number(e, 2 << 3 | 0);
  number(e, static_cast<std::uint64_t>(step));
  text(e, field, value);
  return e;
}

std::filesystem::path path_in(const std::filesystem::path& folder, const std::string& subject) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed)
    throw_errno(fmt::format("{}cannot make the folder \"{}\"", subject, folder.string()), failed.value());
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now);
  // TensorBoard reads files in the order of their names.
  return folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{:06}", seconds.count(), host.data(),
                              ::getpid(),
                              std::chrono::duration_cast<std::chrono::microseconds>(now - seconds).count());
}

}  // namespace

std::uint32_t masked_crc(std::string_view of) noexcept {
  std::uint32_t crc = ~0U;
  for (const char c : of) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82f63b78U : 0);
  }
  return std::rotr(~crc, 15) + 0xa282ead8U;
}

EventFile::EventFile(const std::filesystem::path& folder, std::int64_t first, const std::string& subject)
    : file_(path_in(folder, subject), subject) {
  record(event(0, 3, "brain.Event:2"));
  record(event(first, 7, "\x08\x01"));  // SessionLog: status 1 is START
  file_.publish();
}

void EventFile::write(std::int64_t step, std::span<const Scalar> scalars) {
  std::string summary;
  for (const auto& [tag, scalar] : scalars) {
    std::string value;  // Summary.Value: tag 1, simple_value 2
    text(value, 1, tag);
    number(value, 2 << 3 | 5);
    bytes(value, static_cast<float>(scalar));
    text(summary, 1, value);
  }
  record(event(step, 5, summary));
}

void EventFile::record(const std::string& event) {
  std::string length, checksum;
  bytes(length, static_cast<std::uint64_t>(event.size()));
  std::string whole = length;
  bytes(whole, masked_crc(length));
  whole += event;
  bytes(whole, masked_crc(event));
  file_.write(whole);
}

}  // namespace weft::tools
