#include "store/tcp/seal.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "weft/base/error.hpp"
#if __has_include(<sodium.h>)
#include <sodium.h>
#define WEFT_SODIUM_HEADER 1
#endif

namespace weft {
namespace {

// libsodium's functions in the form in which weft uses them. They are declared again, so that a build without
// libsodium's headers can use the library at run time. If the headers are present, the compiler compares the
// declarations.
using Bytes = unsigned char*;
using ConstBytes = const unsigned char*;
using Count = unsigned long long;
#define WEFT_SODIUM_FUNCTIONS(X)                                                                  \
  X(sodium_init, int())                                                                           \
  X(sodium_memcmp, int(const void*, const void*, std::size_t))                                    \
  X(randombytes_buf, void(void*, std::size_t))                                                    \
  X(crypto_generichash, int(Bytes, std::size_t, ConstBytes, Count, ConstBytes, std::size_t))      \
  X(crypto_scalarmult_base, int(Bytes, ConstBytes))                                               \
  X(crypto_scalarmult, int(Bytes, ConstBytes, ConstBytes))                                        \
  X(crypto_aead_xchacha20poly1305_ietf_encrypt,                                                   \
    int(Bytes, Count*, ConstBytes, Count, ConstBytes, Count, ConstBytes, ConstBytes, ConstBytes)) \
  X(crypto_aead_xchacha20poly1305_ietf_decrypt,                                                   \
    int(Bytes, Count*, Bytes, ConstBytes, Count, ConstBytes, Count, ConstBytes, ConstBytes))

struct Sodium {
#define WEFT_DECLARE(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  WEFT_SODIUM_FUNCTIONS(WEFT_DECLARE)
#undef WEFT_DECLARE
};

#ifdef WEFT_SODIUM_HEADER
template <class Function>
constexpr bool fits(std::add_pointer_t<Function>) {
  return true;
}
#define WEFT_COMPARE(name, ...) static_assert(fits<__VA_ARGS__>(static_cast<decltype(&::name)>(nullptr)));
WEFT_SODIUM_FUNCTIONS(WEFT_COMPARE)
#undef WEFT_COMPARE
static_assert(crypto_aead_xchacha20poly1305_ietf_ABYTES == kSealBytes &&
              crypto_aead_xchacha20poly1305_ietf_KEYBYTES == KeyBytes::size() &&
              crypto_scalarmult_BYTES == KeyBytes::size() &&
              crypto_scalarmult_SCALARBYTES == KeyBytes::size());
#endif

[[noreturn]] void no_sodium(const std::string& why) {
  throw Error(ErrorCode::unsupported,
              fmt::format("store: a secret needs libsodium, which cannot be used: {}; expected "
                          "libsodium.so.23 (Debian's package libsodium23)",
                          why));
}

Sodium load_sodium() {
  void* library = nullptr;
  std::string why;
  for (const char* const name : {"libsodium.so.23", "libsodium.so.26", "libsodium.so"}) {
    library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library != nullptr) break;
    if (why.empty()) why = ::dlerror();
  }
  if (library == nullptr) no_sodium(why);
  Sodium s;
#define WEFT_FIND(name, ...)                                            \
  s.name = reinterpret_cast<decltype(s.name)>(::dlsym(library, #name)); \
  if (s.name == nullptr) no_sodium("it has no " #name);
  WEFT_SODIUM_FUNCTIONS(WEFT_FIND)
#undef WEFT_FIND
  if (s.sodium_init() < 0) no_sodium("sodium_init failed");
  return s;
}

const Sodium& sodium() {
  static const Sodium loaded = load_sodium();
  return loaded;
}

constexpr std::string_view kLabel = "weft store 1 ";

ConstBytes bytes_of(std::string_view text) { return reinterpret_cast<ConstBytes>(text.data()); }

KeyBytes hash(std::string_view text, const KeyBytes* key) {
  KeyBytes out;
  sodium().crypto_generichash(out.data(), KeyBytes::size(), bytes_of(text), text.size(),
                              key ? key->data() : nullptr, key ? KeyBytes::size() : 0);
  return out;
}

void wipe(void* data, std::size_t bytes) noexcept { ::explicit_bzero(data, bytes); }

using Nonce = std::array<unsigned char, 24>;
Nonce nonce_of(std::uint64_t number) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof number);
  return nonce;
}

}  // namespace

KeyBytes::~KeyBytes() { wipe(bytes_.data(), bytes_.size()); }

KeyBytes key_of_secret(std::string_view secret) {
  if (secret.size() < kMinSecretBytes || secret.size() > kMaxSecretBytes)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("store: the secret has {} bytes; expected {} to {}, at random (openssl rand -hex 32)",
                    secret.size(), kMinSecretBytes, kMaxSecretBytes));
  std::string labelled = fmt::format("{}secret ", kLabel);
  labelled.reserve(labelled.size() + secret.size());  // so that no second copy stays in memory
  labelled += secret;
  const KeyBytes key = hash(labelled, nullptr);
  wipe(labelled.data(), labelled.size());
  return key;
}

std::string SealedStream::seal(std::string_view frame) {
  const std::uint32_t length = static_cast<std::uint32_t>(frame.size() + kSealBytes);
  std::string record(sizeof length + length, '\0');
  std::memcpy(record.data(), &length, sizeof length);
  Count written = 0;
  sodium().crypto_aead_xchacha20poly1305_ietf_encrypt(reinterpret_cast<Bytes>(record.data() + sizeof length),
                                                      &written, bytes_of(frame), frame.size(), nullptr, 0,
                                                      nullptr, nonce_of(next_++).data(), key_.data());
  return record;
}

SealedStream::Opened SealedStream::open(std::string_view bytes) {
  Opened result;
  std::uint32_t length = 0;
  if (bytes.size() < sizeof length) return result;
  std::memcpy(&length, bytes.data(), sizeof length);
  if (length < kSealBytes || length > kMaxFrameBytes + kSealBytes) {
    result.state = ParseState::bad;
    return result;
  }
  result.bytes = sizeof length + length;
  if (bytes.size() < result.bytes) return result;
  result.frame.resize(length - kSealBytes);
  Count written = 0;
  const int failed = sodium().crypto_aead_xchacha20poly1305_ietf_decrypt(
      reinterpret_cast<Bytes>(result.frame.data()), &written, nullptr, bytes_of(bytes.substr(sizeof length)),
      length, nullptr, 0, nonce_of(next_).data(), key_.data());
  result.state = failed == 0 ? ParseState::whole : ParseState::bad;
  if (failed == 0) ++next_;
  return result;
}

Handshake::Handshake(const KeyBytes& secret, std::optional<KeyBytes> seed) : secret_(secret) {
  if (seed)
    own_secret_ = *seed;
  else
    sodium().randombytes_buf(own_secret_.data(), KeyBytes::size());
  sodium().crypto_scalarmult_base(reinterpret_cast<Bytes>(own_.data()), own_secret_.data());
}

bool Handshake::meet(std::string_view other_half, bool is_client) {
  KeyBytes product;
  if (other_half.size() != kHandshakeBytes ||
      sodium().crypto_scalarmult(product.data(), own_secret_.data(), bytes_of(other_half)) != 0)
    return false;
  std::string all = fmt::format("{}session ", kLabel);
  all.reserve(all.size() + 3 * kHandshakeBytes);
  all.append(is_client ? own_half() : other_half).append(is_client ? other_half : own_half());
  all.append(reinterpret_cast<const char*>(product.data()), KeyBytes::size());
  shared_ = hash(all, &secret_);
  wipe(all.data(), all.size());
  return true;
}

KeyBytes Handshake::label(std::string_view text) const {
  return hash(fmt::format("{}{}", kLabel, text), &shared_);
}

std::string Handshake::proof(bool of_client) const {
  const KeyBytes mac = label(of_client ? "client" : "server");
  return {reinterpret_cast<const char*>(mac.data()), KeyBytes::size()};
}

bool Handshake::holds(std::string_view proof, bool of_client) const {
  const KeyBytes expected = label(of_client ? "client" : "server");
  return proof.size() == KeyBytes::size() &&
         sodium().sodium_memcmp(proof.data(), expected.data(), KeyBytes::size()) == 0;
}

SealedPair Handshake::streams() const {
  return {SealedStream(label("to server")), SealedStream(label("to client"))};
}

}  // namespace weft
