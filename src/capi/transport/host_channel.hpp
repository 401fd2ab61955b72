// One rank's end of a channel of the host. It calls the host's functions, and makes Errors of their reports.
// One thread at a time uses it.
#pragma once

#include <cstddef>
#include <memory>

#include "capi/transport/host_transport.hpp"
#include "weft/backends/stream_backend.hpp"

namespace weft::capi {

class HostChannel final : public ByteStreams {
 public:
  /// Opens it. Throws the host's report as an Error of that group.
  HostChannel(std::shared_ptr<const HostTransport> host, const GroupInit& b,
              const std::vector<std::int32_t>& transport_ranks);
  ~HostChannel() override;
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  /// Throw what the host reports: peer_lost blames the other rank.
  std::size_t write(int to, const std::byte* bytes, std::size_t most) override;
  std::size_t read(int from, std::byte* bytes, std::size_t most) override;

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
};

}  // namespace weft::capi
