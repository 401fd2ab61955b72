// One rank's end of a channel of the host: calls its functions, and makes Errors of what they report. One thread at a time.
#pragma once

#include <cstddef>
#include <memory>

#include "capi/transport/host_transport.hpp"

namespace weft::capi {

class HostChannel {
 public:
  HostChannel(std::shared_ptr<const HostTransport> host, int rank) : host_(std::move(host)), rank_(rank) {}
  ~HostChannel() { close(); }
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  const HostTransport& host() const noexcept { return *host_; }

  /// Throws what the host reports, for the group that it is opened for.
  void open(const GroupInit& b, const std::vector<std::int32_t>& transport_ranks);
  void close() noexcept;
  /// How many bytes the stream to that rank has taken, or that from it has given. Throws what the host reports: peer_lost blames
  /// the other rank.
  std::size_t write(int to, const std::byte* bytes, std::size_t most);
  std::size_t read(int from, std::byte* bytes, std::size_t most);

 private:
  template <class F>
  void call(const char* what, int other, const F& f);
  Error failed_call(const char* what, int other, ErrorCode code, const std::string& why) const;
  void expect_at_most(const char* what, const char* field, int other, std::size_t number,
                      std::size_t most) const;

  const std::shared_ptr<const HostTransport> host_;
  const int rank_;
  void* channel_ = nullptr;
  weft_error error_ = WEFT_ERROR_INIT;  // what the host's functions write to
  bool opened_ = false;
};

}  // namespace weft::capi
