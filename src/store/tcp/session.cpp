#include "store/tcp/session.hpp"

#include <utility>

namespace weft {
namespace {

using State = StoreSession::Result::State;

StoreSession::Result bad(std::string why, std::string out = {}) {
  return {.state = State::bad, .out = std::move(out), .why = std::move(why)};
}

// The first bytes of a frame give its size. It reserves that size at once, which leaves no holes in the heap.
// Growth in steps would. Memory that is not written yet costs nothing.
void make_room(std::string& in, std::size_t bytes) {
  if (bytes > in.capacity()) in.reserve(bytes);
}

constexpr const char* kTooEarly = "it sent a second request before the first was answered";

}  // namespace

StoreSession::Result StoreSession::take(std::string_view bytes) {
  in_.append(bytes);
  if (sealed_) {
    SealedStream::Opened opened = sealed_->to_server.open(in_);
    switch (opened.state) {
      case ParseState::more: make_room(in_, opened.bytes); return {};
      case ParseState::bad:
        return bad("it sent bytes that are not sealed with its key: perhaps somebody changed them");
      case ParseState::whole: break;
    }
    if (in_.size() > opened.bytes) return bad(kTooEarly);
    std::string().swap(in_);
    current_ = std::move(opened.frame);
  } else {
    const Parsed parsed = parse_request(in_);
    // An unauthenticated client may not announce a frame that is larger than a handshake.
    if (parsed.state != ParseState::bad && secret_ != nullptr &&
        parsed.bytes > sizeof(FrameHeader) + kHandshakeBytes)
      return bad("it sent a request, but did not prove that it knows the secret",
                 make_frame(FrameKind::secret_demanded, {}, {}));
    if (parsed.state == ParseState::bad) return bad(parsed.why);
    if (parsed.state == ParseState::more) {
      make_room(in_, parsed.bytes);
      return {};
    }
    if (in_.size() > parsed.bytes) return bad(kTooEarly);
    if (secret_ != nullptr) {
      Result result = handshake(parsed);
      in_.clear();
      return result;
    }
    current_ = std::exchange(in_, {});
  }
  const Parsed parsed = parse_request(current_);
  if (parsed.state == ParseState::bad) return bad(parsed.why);
  if (parsed.state == ParseState::more || parsed.bytes != current_.size())
    return bad("it sealed bytes that are not a whole frame");
  if (parsed.frame.kind == FrameKind::join || parsed.frame.kind == FrameKind::prove)
    return sealed_ ? bad("it began a handshake again")
                   : bad("it began a handshake, but no secret is required here",
                         make_refusal(ErrorCode::mismatch, "no secret is required there"));
  unauthenticated_ = false;
  return {.state = State::request, .frame = parsed.frame};
}

StoreSession::Result StoreSession::handshake(const Parsed& parsed) {
  const auto reply = [](FrameKind kind, std::string_view value) {
    return Result{.state = State::reply, .out = make_frame(kind, {}, value)};
  };
  if (parsed.frame.kind == FrameKind::try_get && parsed.frame.key == kHelloKey && !handshake_ &&
      !told_of_secret_) {
    told_of_secret_ = true;
    return reply(FrameKind::secret_demanded, {});
  }
  if (parsed.frame.kind == FrameKind::join && !handshake_) {
    handshake_.emplace(*secret_, seed_);
    if (!handshake_->meet(parsed.frame.value, false)) return bad("it began a handshake with an invalid key");
    return reply(FrameKind::challenge, handshake_->own_half());
  }
  if (parsed.frame.kind == FrameKind::prove && handshake_) {
    if (!handshake_->holds(parsed.frame.value, true))
      return bad("it does not know the secret", make_frame(FrameKind::wrong_proof, {}, {}));
    Result result = reply(FrameKind::welcome, handshake_->proof(false));
    sealed_.emplace(handshake_->streams());
    handshake_.reset();
    unauthenticated_ = false;
    return result;
  }
  return bad("it sent a request, but did not prove that it knows the secret",
             make_frame(FrameKind::secret_demanded, {}, {}));
}

std::string StoreSession::wire(std::string frame) {
  return sealed_ ? sealed_->to_client.seal(frame) : std::move(frame);
}

}  // namespace weft
