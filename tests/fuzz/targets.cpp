#include "targets.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "backends/shm/bootstrap_info.hpp"
#include "host/peers.hpp"
#include "store/file_records.hpp"
#include "store/table.hpp"
#include "store/tcp/address.hpp"
#include "store/tcp/seal.hpp"
#include "store/tcp/session.hpp"
#include "store/tcp/wire.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/base/error.hpp"
#if WEFT_FUZZ_TOKENS
#include <fstream>
#include <iterator>

#include "token_file.hpp"
#include "tokenizer.hpp"
#endif
#if WEFT_FUZZ_CHECKPOINTS
#include "checkpoint/file_io.hpp"
#include "checkpoint/index/index.hpp"
#include "weft/checkpoint/safetensors.hpp"
#endif

namespace weft::fuzz {
namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: does not hold: %s\n", what);
  std::abort();
}

KeyBytes key_from(unsigned char first) {
  KeyBytes key;
  for (std::size_t i = 0; i < KeyBytes::size(); ++i) key.data()[i] = static_cast<unsigned char>(first + i);
  return key;
}

// Keys are fixed, so that two runs of one input do the same.
const KeyBytes& secret() {
  static const KeyBytes key = key_from(1);
  return key;
}
KeyBytes servers_half() { return key_from(100); }
KeyBytes clients_half() { return key_from(200); }

// Input in pieces, as from a connection: repeatedly a length of two bytes and then that many bytes.
std::optional<std::string_view> next_piece(std::string_view& rest) {
  if (rest.size() < 2) return std::nullopt;
  const auto byte = [&](std::size_t i) {
    return static_cast<std::size_t>(static_cast<unsigned char>(rest[i]));
  };
  const std::size_t wanted = byte(0) | byte(1) << 8;
  const std::string_view piece = rest.substr(2, wanted);
  rest.remove_prefix(2 + piece.size());
  return piece;
}
std::string piece(std::string_view bytes) {
  const char length[2] = {static_cast<char>(bytes.size() & 255), static_cast<char>(bytes.size() >> 8)};
  return std::string(length, 2).append(bytes);
}

// ---- the server's side of a connection ----

enum Mode : char { open_to_all, demands_secret, joined };  // the first byte

/// The answers of a server; the table is as small as a fuzzer wants it.
std::string answer(StoreTable& table, const StoreFrame& request) {
  try {
    switch (request.kind) {
      case FrameKind::set: table.set(request.key, request.value); break;
      case FrameKind::add:
        return make_frame(FrameKind::found, {}, {}, {}, table.add(request.key, request.number));
      case FrameKind::compare_set:
        return make_frame(FrameKind::found, {}, table.compare_set(request.key, request.value, request.extra));
      case FrameKind::remove: table.remove(request.key); break;
      default:
        if (const std::string* held = table.find(request.key)) return make_frame(FrameKind::found, {}, *held);
        return make_frame(FrameKind::absent, {}, {});
    }
  } catch (const Error& e) {
    return make_refusal(e.code(), e.what());
  }
  return make_frame(FrameKind::found, {}, {});
}

void store_server(std::string_view bytes) {
  if (bytes.empty()) return;
  const Mode mode = static_cast<Mode>(static_cast<unsigned char>(bytes[0]) % 3);
  bytes.remove_prefix(1);
  StoreTable table({.keys = 8, .bytes = 4096});
  StoreSession session(mode == open_to_all ? nullptr : &secret(), servers_half());
  std::optional<SealedPair> sealed;
  const auto take = [&](std::string_view part) {
    const StoreSession::Result result = session.take(part);
    check(session.unread() <= kMaxRecordBytes + 65536, "a session keeps no more than a record");
    if (mode == demands_secret && session.is_unauthenticated())
      check(session.unread() <= sizeof(FrameHeader) + kHandshakeBytes ||
                result.state == StoreSession::Result::State::bad,
            "an unauthenticated client's bytes are not kept");
    switch (result.state) {
      case StoreSession::Result::State::more: return true;
      case StoreSession::Result::State::reply:
        check(parse_reply(result.out).state == ParseState::whole, "replies are frames");
        return true;
      case StoreSession::Result::State::request: {
        check(!session.is_unauthenticated(), "only who has joined is answered");
        check(!result.frame.key.empty() && result.frame.key.size() <= kMaxStoreKeyBytes,
              "keys are within limits");
        std::string wire = session.wire(answer(table, result.frame));
        if (sealed) {
          const auto opened = sealed->to_client.open(wire);
          check(opened.state == ParseState::whole, "the client opens the answer");
          wire = opened.frame;
        }
        // The keys of a client that has passed the handshake with its own bytes are unknown here.
        if (mode != demands_secret) check(parse_reply(wire).state == ParseState::whole, "answers are frames");
        return true;
      }
      case StoreSession::Result::State::bad: check(!result.why.empty(), "refusals say why"); return false;
    }
    return false;
  };
  if (mode == joined) {
    Handshake client(secret(), clients_half());
    check(take(make_frame(FrameKind::join, {}, client.own_half())), "the handshake begins");
    check(client.meet(Handshake(secret(), servers_half()).own_half(), true), "the halves meet");
    check(take(make_frame(FrameKind::prove, {}, client.proof(true))), "the handshake ends");
    check(!session.is_unauthenticated(), "who proved it has joined");
    sealed.emplace(client.streams());
  }
  while (const auto part = next_piece(bytes))
    if (!take(sealed ? sealed->to_server.seal(*part) : std::string(*part))) return;
}

std::vector<std::string> store_server_seeds() {
  const std::vector<std::string> requests = {
      make_frame(FrameKind::try_get, kHelloKey, {}),
      make_frame(FrameKind::set, "job/key", "value"),
      make_frame(FrameKind::get, "job/key", {}, {}, 1'000'000),
      make_frame(FrameKind::get, "absent", {}, {}, kForever),
      make_frame(FrameKind::add, "n", {}, {}, -7),
      make_frame(FrameKind::compare_set, "job/key", "value", "next"),
      make_frame(FrameKind::add, "job/key", {}, {}, 1),
      make_frame(FrameKind::remove, "job/key", {}),
      make_frame(FrameKind::set, "large", std::string(5000, 'x')),
  };
  std::string conversation;
  for (const std::string& r : requests) conversation += piece(r);
  std::string slowly;
  for (const char& c : requests[1]) slowly += piece({&c, 1});
  Handshake client(secret(), clients_half());
  client.meet(Handshake(secret(), servers_half()).own_half(), true);
  SealedPair streams = client.streams();
  const std::string handshake = piece(make_frame(FrameKind::join, {}, client.own_half())) +
                                piece(make_frame(FrameKind::prove, {}, client.proof(true)));
  std::string after;
  for (const std::string& r : requests) after += piece(streams.to_server.seal(r));
  const std::string asks = piece(make_frame(FrameKind::try_get, kHelloKey, {}));
  const auto in = [](Mode mode, const std::string& rest) { return std::string(1, mode) + rest; };
  return {in(open_to_all, conversation),
          in(open_to_all, slowly),
          in(open_to_all, piece("GET / HTTP/1.1\r\n\r\n")),
          in(open_to_all, handshake),
          in(demands_secret, handshake + after),
          in(demands_secret, asks + handshake + after),
          in(demands_secret, conversation),
          in(demands_secret, piece(make_frame(FrameKind::join, {}, std::string(32, '\0')))),
          in(joined, conversation),
          in(joined, handshake),
          in(joined, slowly)};
}

// ---- a client that reads replies ----

void store_client(std::string_view bytes) {
  if (bytes.empty()) return;
  const bool sealed = bytes[0] & 1;
  bytes.remove_prefix(1);
  SealedStream stream(key_from(7));
  std::string in;
  while (const auto part = next_piece(bytes)) {
    in += *part;
    std::string opened;
    if (sealed) {
      SealedStream::Opened record = stream.open(in);
      if (record.state == ParseState::more) continue;
      if (record.state == ParseState::bad || record.bytes != in.size()) return;
      opened = std::move(record.frame);
    }
    const std::string_view frame = sealed ? opened : in;
    const Parsed parsed = parse_reply(frame);
    if (parsed.state == ParseState::bad) return check(!parsed.why.empty(), "refusals say why");
    if (parsed.state == ParseState::more) {
      check(parsed.bytes <= kMaxFrameBytes, "nothing larger than a frame is waited for");
      if (sealed) return;
      continue;
    }
    check(parsed.frame.value.size() <= kMaxStoreValueBytes, "values are within limits");
    check(!name(refusal_code(parsed.frame)).empty(), "every refusal has a code");
    Handshake client(secret(), clients_half());
    if (parsed.frame.kind == FrameKind::challenge && client.meet(parsed.frame.value, true))
      check(!client.holds(client.proof(true), false), "a proof sent back proves nothing");
    in.clear();
  }
}

std::vector<std::string> store_client_seeds() {
  const std::vector<std::string> replies = {
      make_frame(FrameKind::found, {}, "value"),
      make_frame(FrameKind::found, {}, {}, {}, 42),
      make_frame(FrameKind::absent, {}, {}),
      make_frame(FrameKind::timed_out, {}, {}),
      make_refusal(ErrorCode::bad_argument, "store: add: key \"n\" holds \"x\"; expected a decimal counter"),
      make_refusal(ErrorCode::system, "store: no room"),
      make_frame(FrameKind::challenge, {}, Handshake(secret(), servers_half()).own_half()),
      make_frame(FrameKind::welcome, {}, std::string(32, 'x')),
      make_frame(FrameKind::secret_demanded, {}, {}),
      make_frame(FrameKind::wrong_proof, {}, {}),
  };
  SealedStream stream(key_from(7));
  std::string plain(1, '\0'), records(1, '\1');
  for (const std::string& r : replies) {
    plain += piece(r);
    records += piece(stream.seal(r));
  }
  return {plain, records, std::string(1, '\0') + piece("220 some other service, at your command\r\n")};
}

// ---- the file store's file ----

void store_file(std::string_view bytes) {
  StoreTable table({.keys = 64, .bytes = 1 << 20});
  for (;;) {
    const StoreRecord record = parse_record(bytes);
    if (record.state == ParseState::bad) return check(!record.why.empty(), "refusals say why");
    if (record.state == ParseState::more) return;
    check(record.bytes <= bytes.size(), "a record ends where the bytes do");
    check(make_record(record.change, record.key, record.value) == bytes.substr(0, record.bytes),
          "a record is written as it was read");
    try {
      if (record.change == StoreRecord::Change::set) {
        table.set(record.key, record.value);
      } else {
        table.remove(record.key);
      }
    } catch (const Error&) {}  // full
    bytes.remove_prefix(record.bytes);
  }
}

std::vector<std::string> store_file_seeds() {
  using Change = StoreRecord::Change;
  const std::string a = make_record(Change::set, "job/key", "value"),
                    b = make_record(Change::remove, "job/key", {});
  return {a, a + b + make_record(Change::set, "n", "1"), a.substr(0, a.size() - 1), b + "half a record"};
}

// ---- texts in the store and in variables ----

void texts(std::string_view bytes) {
  const std::string text(bytes);
  if (const auto place = parse_host_port(text))
    check(parse_host_port(shown_host_port(place->host, place->port)) == place,
          "an address is read as it is shown");
  try {
    const ProcessAddress address = ProcessAddress::decode(text);
    check(ProcessAddress::decode(address.encode()) == address, "a process address is read as it is written");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::mismatch, "what is no process address is a mismatch");
  }
  const Failure failure = decode_failure(text);
  check(encode(decode_failure(encode(failure))) == encode(failure), "a failure is read as it is written");
  check(shown_key(text).size() <= 64 + 5, "a key is shown in short");
}

std::vector<std::string> texts_seeds() {
  return {"node7:29500", "[::1]:0", "weft1 boot/pid:[1]/net:[2] weft-00ff 1000 4711",
          encode(Failure{.code = ErrorCode::peer_lost,
                         .text = "rank 1 was lost",
                         .op = Op::all_reduce,
                         .call = 17,
                         .ranks = {1, 3}}),
          "6 1 18446744073709551615 99999999999 1 2\ntext"};
}

// ---- what ranks tell each other when they meet ----

void infos(std::string_view bytes) {
  try {
    const shm::BootstrapInfo info = shm::BootstrapInfo::decode(bytes);
    const std::string written = info.encode();
    check(shm::BootstrapInfo::decode(written).encode() == written,
          "a BootstrapInfo is read as it is written");
    CpuShare all = info.cores;
    all |= info.cores;
    check(all.count() >= 1 && all.count() <= CPU_SETSIZE, "cores are counted");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::mismatch, "what is no info is a mismatch");
  }
  std::vector<std::vector<CpuQuota>> processes;  // a line each
  for (std::string_view rest = bytes; !rest.empty() && processes.size() < 64;) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    processes.push_back(decode_quotas(std::string(line)));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
  }
  check(shared_millicores(processes) >= 0, "a quota is no negative number");
}

std::vector<std::string> infos_seeds() {
  const std::string address = " weft1 boot/pid:[1]/net:[2] weft-00ff 1000 4711 5 12";
  return {"0 0 1 ff/17/5:2500" + address, "1023 2 0 f/1/1:1,2:2/-/7:9" + address, "1024 0 0 f/1/-" + address,
          "1:5,2:5\n2:5,1:5\n3:1000000000", "1:5,1:5,2:5,1:5"};
}

// ---- the data of a training ----

#if WEFT_FUZZ_TOKENS
// The first byte says which form the file is read as.
void tokens(std::string_view bytes) {
  if (bytes.empty()) return;
  constexpr tools::TokenForm kForms[] = {tools::TokenForm::npy, tools::TokenForm::text,
                                         tools::TokenForm::uint16, tools::TokenForm::uint32};
  const tools::TokenForm form = kForms[static_cast<unsigned char>(bytes[0]) % std::size(kForms)];
  bytes.remove_prefix(1);
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  check(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "a memfd");
  try {
    const tools::TokenFile file("/proc/self/fd/" + std::to_string(fd), form, "fuzz");
    check(file.size() >= 1 && static_cast<std::size_t>(file.size()) <= bytes.size(),
          "a file has as many tokens as there is room for");
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < file.size(); ++i) sum ^= file[i];
    check(file.fingerprint() == file.fingerprint() && file.text().size() <= bytes.size(),
          "the bytes of tokens are those of the file");
    if (sum == 1) return void(::close(fd));  // so that the tokens are read
  } catch (const Error& e) {
    check(e.code() == ErrorCode::bad_argument, "a file that is wrong is the caller's to know");
  }
  ::close(fd);
}

std::vector<std::string> tokens_seeds() {
  const auto npy = [](char version, std::string_view header, std::string_view data) {
    std::string file("\0\x93NUMPY", 7);
    file += version;
    file += '\0';
    file += static_cast<char>(header.size());
    file.append(version == 1 ? 1 : 3, '\0');
    return file.append(header).append(data);
  };
  const std::string data(24, '\1');
  return {npy(1, "{'descr': '<u2', 'fortran_order': False, 'shape': (12,), }\n", data),
          npy(2, "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }\n", data),
          npy(1, "{'descr': '|u1', 'shape': (9223372036854775807,)}", data),
          npy(1, "{'descr': '<i4', 'shape': (-1,)}", data),
          npy(1, "{'descr': '<u4', 'shape': (2, 3)}", data),
          npy(1, "{'shape': (", data),
          std::string("\0\x93NUMPY\1\0\xff\xff", 11).append(data),
          "\1a text",
          "\2abcdef",
          "\3abcdef"};
}

// A tokenizer that was read gives tokens of its vocabulary for any text, or an error.
void tokenizer(std::string_view bytes) {
  try {
    const tools::Tokenizer read(bytes, "fuzz");
    for (const std::string_view text : {"", " The end's 1234  \n\n<|endoftext|>\xc3\xa9\xe2\x82\xac x"}) {
      std::vector<std::int64_t> all;
      for (const std::uint32_t token : read.encode(text)) {
        check(static_cast<std::int64_t>(token) < read.size(), "a token is in the vocabulary");
        all.push_back(token);
      }
      check(read.decode(all).size() < 1000 * (bytes.size() + 1), "tokens are as long as the file says");
    }
    check(read.json() == bytes, "the file is kept");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::bad_argument, "a tokenizer that is wrong is the caller's to know");
  }
}

std::vector<std::string> tokenizer_seeds() {
  std::vector<std::string> seeds{"{}", R"({"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}})",
                                 std::string(1000, '[')};
  for (const char* name : {"gpt2", "llama3", "o200k", "spaced"}) {
    std::ifstream in(std::string(WEFT_FUZZ_TOKENIZERS "/") + name + ".json", std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return seeds;
}
#endif

// ---- checkpoints ----

#if WEFT_FUZZ_CHECKPOINTS
void safetensors(std::string_view bytes) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  check(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "a memfd");
  try {
    const SafetensorsFile file = SafetensorsFile::open("/proc/self/fd/" + std::to_string(fd));
    for (const std::string& name : file.names()) {
      const SafetensorsInfo& info = file.info(name);
      check(info.begin >= 0 && info.bytes >= 0 &&
                static_cast<std::size_t>(info.begin + info.bytes) <= bytes.size(),
            "a tensor lies within its file");
      check(info.shape.count() * size_bytes(info.dtype) == info.bytes, "a tensor is as large as its shape");
      std::vector<std::byte> out(static_cast<std::size_t>(info.bytes));
      file.read_bytes(name, 0, out);
    }
  } catch (const Error& e) {
    check(e.code() == ErrorCode::corrupt || e.code() == ErrorCode::unsupported,
          "a file that is wrong is damaged, or newer than this build");
  }
  ::close(fd);
}

std::vector<std::string> safetensors_seeds() {
  const auto file = [](std::string_view header, std::string_view data) {
    const std::uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length).append(header).append(data);
  };
  const std::string data(24, '\1');
  return {
      file("{}", ""),
      file(R"({"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})", data),
      file(
          R"({"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},"b":{"dtype":"I8","shape":[8],"data_offsets":[16,24]},"__metadata__":{"k":"v"}})",
          data),
      file(R"({"e":{"dtype":"BF16","shape":[0,5],"data_offsets":[0,0]}})", ""),
      file(R"({"w":{"dtype":"F32","shape":[9223372036854775807,3],"data_offsets":[0,24]}})", data),
      file(R"({"w":{"dtype":"F32","shape":[0,9223372036854775807,3],"data_offsets":[0,0]}})", ""),
      file(R"({"w":1,"w":{"w":1e300,"shape":8.7}})", data),
      file(R"({"w\u0000x":{"dtype":"I8","shape":[24],"data_offsets":[0,24]}})", data),
      file(std::string(1000, '['), data)};
}

// A checkpoint's index: an index that was read can be written and reads back equal, and its parts are sound.
void index(std::string_view bytes) {
  const std::string text(bytes);
  try {
    const CheckpointIndex read = index_from_json("index.json", text);
    check(read.step >= 0, "a step is no negative number");
    for (const auto& [name, entry] : read.tensors) {
      std::int64_t elements = 0;
      for (const CheckpointPart& part : entry.parts) {
        check(!why_no_file_name(part.file), "a part's file lies beside the index");
        elements += part.box.shape.count();
      }
      check(elements == entry.shape.count(), "the parts have as many elements as the whole");
    }
    const std::string written = to_json(read);
    check(to_json(index_from_json("index.json", written)) == written, "an index is read as it is written");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::bad_argument || e.code() == ErrorCode::unsupported,
          "an index that is wrong is the caller's to know");
  }
}

std::vector<std::string> index_seeds() {
  const auto tensor = [](std::string_view shape, std::string_view parts) {
    return std::string(R"({"format":"weft checkpoint","version":1,"step":7,"mesh":"dp=2","extra":{"k":"v"},)")
        .append(R"x("tensors":{"w":{"dtype":"f32","layout":["Shard(0)"],"shape":)x")
        .append(shape)
        .append(R"(,"parts":[)")
        .append(parts)
        .append("]}}}");
  };
  return {tensor("[2,3]",
                 R"({"file":"a","offset":[0,0],"shape":[1,3]},{"file":"b","offset":[1,0],"shape":[1,3]})"),
          tensor("[2,3]",
                 R"({"file":"a","offset":[0,0],"shape":[1,3]},{"file":"b","offset":[0,0],"shape":[1,3]})"),
          tensor("[]", R"({"file":"a","offset":[],"shape":[]})"),
          tensor("[0,5]", ""),
          tensor("[9223372036854775807,3]", R"({"file":"a","offset":[0,0],"shape":[9223372036854775807,3]})"),
          tensor("[1e300]", R"({"file":"../a","offset":[8.7],"shape":[-1]})"),
          tensor("[1]", R"({"file":"a\u0000b","offset":[0],"shape":[1],"shape":[1]})"),
          std::string(1000, '[')};
}

// The contents of `latest` of a folder of checkpoints: a name beside it, or an error.
void latest(std::string_view bytes) {
  const std::string text(bytes);
  try {
    const std::string name = folder_of_latest("run/latest", text);
    check(!why_no_file_name(name), "latest names what lies beside it");
    check(folder_of_latest("run/latest", latest_text(name)) == name, "latest is read as it is written");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::bad_argument, "a latest that is wrong is the caller's to know");
  }
}

std::vector<std::string> latest_seeds() {
  return {latest_text("step-00000007"),
          "step-00000007\n",
          "../step-00000007",
          "/etc",
          ".\n",
          "",
          "step-00000007\nxxh3 0000000000000000\n",
          std::string("step\0/x", 7)};
}
#endif

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
    {"store_server", store_server, store_server_seeds},
    {"store_client", store_client, store_client_seeds},
    {"store_file", store_file, store_file_seeds},
    {"texts", texts, texts_seeds},
    {"infos", infos, infos_seeds},
#if WEFT_FUZZ_TOKENS
    {"tokens", tokens, tokens_seeds},
    {"tokenizer", tokenizer, tokenizer_seeds},
#endif
#if WEFT_FUZZ_CHECKPOINTS
    {"safetensors", safetensors, safetensors_seeds},
    {"index", index, index_seeds},
    {"latest", latest, latest_seeds},
#endif
  };
  return all;
}

}  // namespace weft::fuzz
