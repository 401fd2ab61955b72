#include "capi/transport/host_channel.hpp"

#include "base/errors/caught.hpp"
#include "capi/call_out.hpp"

namespace weft::capi {

static_assert(sizeof(weft_channel_init) == 48);

// Calls a function of the host, about rank `other` (-1: no rank). Throws the error that it reports.
template <class F>
void HostChannel::call(const char* what, int other, const F& f) {
  weft_status status = WEFT_SYSTEM;
  const CallOut out;
  if (!out) throw failed_call(what, other, ErrorCode::system, kEnded);
  try {
    status = f(&error_);
  } catch (...) {
    throw failed_call(what, other, ErrorCode::system, fmt::format("it threw: {}", caught_words()));
  }
  if (status == WEFT_OK) return;
  if (status < WEFT_OK || status > kErrorCodeCount)
    throw failed_call(what, other, ErrorCode::system,
                      fmt::format("it returned {}, which is no weft_status", status));
  error_.text[WEFT_ERROR_TEXT - 1] = '\0';
  throw failed_call(what, other, error_code(status),
                    error_.text[0] != '\0' ? error_.text : weft_status_name(status));
}

Error HostChannel::failed_call(const char* what, int other, ErrorCode code, const std::string& why) const {
  const std::string about = other < 0 ? "" : fmt::format(" {} rank {}", *what == 'w' ? "to" : "from", other);
  return Error(
      Failure{.code = code,
              .text = fmt::format("transport {}: {}{} on rank {}: {}", host_->name, what, about, rank_, why),
              .ranks = {code == ErrorCode::peer_lost && other >= 0 ? other : rank_}});
}

void HostChannel::expect_at_most(const char* what, const char* field, int other, std::size_t number,
                                 std::size_t most) const {
  if (number > most)
    throw failed_call(what, other, ErrorCode::system,
                      fmt::format("*{} is {}; expected at most {}", field, number, most));
}

HostChannel::HostChannel(std::shared_ptr<const HostTransport> host, const GroupInit& b,
                         const std::vector<std::int32_t>& transport_ranks)
    : host_(std::move(host)), rank_(b.rank) {
  const weft_channel_init init{
      sizeof(weft_channel_init), b.rank, b.size, b.name.c_str(), b.token.c_str(), transport_ranks.data(),
      b.deadline.left().count()};
  try {
    call("open", -1, [&](weft_error* error) {
      return host_->calls.open(host_->calls.transport_data, &init, &channel_, error);
    });
  } catch (const Error& e) {
    throw Error(Failure{.code = e.code(),
                        .text = fmt::format("group \"{}\": {}", b.name, e.what()),
                        .ranks = {e.ranks().begin(), e.ranks().end()}});
  }
}

HostChannel::~HostChannel() {
  if (host_->calls.close == nullptr) return;
  const CallOut out;
  if (!out) return;
  try {
    host_->calls.close(channel_);
  } catch (...) {}  // a C++ host's: the group has ended, nobody is notified
}

std::size_t HostChannel::write(int to, const std::byte* bytes, std::size_t most) {
  std::size_t taken = 0;
  call("write", to,
       [&](weft_error* error) { return host_->calls.write(channel_, to, bytes, most, &taken, error); });
  expect_at_most("write", "taken", to, taken, most);
  return taken;
}

std::size_t HostChannel::read(int from, std::byte* bytes, std::size_t most) {
  std::size_t got = 0;
  call("read", from,
       [&](weft_error* error) { return host_->calls.read(channel_, from, bytes, most, &got, error); });
  expect_at_most("read", "got", from, got, most);
  return got;
}

}  // namespace weft::capi
