// A rank with a fault writes nonsense to the words of a group in shared memory, one word a case. The other
// rank gets an Error that says which word it is. All cases at once and at random: scribble_test.cpp.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <thread>

#include "backends/shm/control.hpp"
#include "support/errors.hpp"
#include "support/pair_from_here.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/shared_memory.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::damaged_words_test {
namespace {

using namespace std::chrono_literals;
using shm::Arrival;
using shm::Buffer;
using shm::Control;
using shm::Envelope;
using shm::Pair;
using testing::HasSubstr;

Control control_of_group() {
  const std::vector<SharedMapping> regions = shared_mappings("region");
  EXPECT_EQ(regions.size(), 1u);
  return regions.empty() ? Control() : Control(regions[0].data, 2);
}

class DamagedWords : public testing::Test {
 protected:
  void SetUp() override {
    if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  }
  using Damages = std::function<void(Rank&, Control)>;
  using Calls = std::function<Work(Rank&)>;
  // Rank 1 makes a call, then damages words; then rank 0 makes a call, which must fail with this text.
  static void check(const Calls& rank_1, const Damages& damages, const Calls& rank_0, const std::string& text,
                    ErrorCode code = ErrorCode::corrupt, const char* single_copy = "off") {
    const auto body = [&](Rank& r) {
      ::setenv("WEFT_SINGLE_COPY", single_copy, 1);
      r.group();
      Work call;
      if (r.rank == 1) {
        if (rank_1) call = rank_1(r);
        damages(r, control_of_group());
      }
      r.meet("damaged");
      try {
        if (r.rank == 0) call = rank_0(r);
        if (r.rank == 0 || rank_1) call.wait();
        if (r.rank == 0) ADD_FAILURE() << "no error; expected one with: " << text;
      } catch (const Error& e) {
        if (r.rank == 0) {
          EXPECT_THAT(e.what(), HasSubstr(text));
          EXPECT_EQ(name(e.code()), name(code)) << e.what();
        }
      }
      r.meet("told");
      call = Work();
      kept.clear();
    };
    RankOptions options;
    options.deadline = 5s;
    run_ranks(Ranks::processes, 2, body, options);
  }
  static Tensor& tensor(Rank& r, std::int64_t floats, Memory memory = Memory::local) {
    kept.push_back(std::make_unique<Tensor>(r.context, Shape{floats}, DType::f32, memory));
    std::memset(kept.back()->data(), 0, static_cast<std::size_t>(kept.back()->bytes()));
    return *kept.back();
  }
  static Calls sends(std::int64_t floats, Memory memory = Memory::local) {
    return [=](Rank& r) { return r.group().send(tensor(r, floats, memory), 1 - r.rank); };
  }
  static Calls receives(std::int64_t floats, Memory memory = Memory::local) {
    return [=](Rank& r) { return r.group().recv(tensor(r, floats, memory), 1 - r.rank); };
  }
  static Damages envelope(const std::function<void(Envelope&)>& change) {
    return [=](Rank& r, const Control& c) { change(pair_from_here(r, c, 0)->envelopes[0]); };
  }
  static inline std::vector<std::unique_ptr<Tensor>> kept;  // of the rank, until its calls are over
  static constexpr std::int64_t kSmall = 10, kLarge = 1 << 18;
};

TEST_F(DamagedWords, TheDtypeOfAMessage) {
  check(sends(kSmall), envelope([](Envelope& e) { e.dtype = static_cast<DType>(200); }), receives(kSmall),
        "message from rank 1 to rank 0: rank 1's words in shared memory are damaged: the number of an "
        "envelope's dtype is "
        "200; expected 0 to 16");
}

TEST_F(DamagedWords, TheCountOfAMessage) {
  const std::string text = "an envelope's count of elements is ";
  check(sends(kSmall), envelope([](Envelope& e) { e.count = std::int64_t{1} << 61; }), receives(kSmall),
        text + "2305843009213693952; expected those of up to 8192 bytes");
  check(sends(kSmall), envelope([](Envelope& e) { e.count = -1; }), receives(kSmall), text + "-1");
  check(sends(kLarge), envelope([](Envelope& e) { e.count = -1; }), receives(kLarge),
        text + "-1; expected 0 or more, of bytes that fit 64 bits");
  check(sends(kLarge), envelope([](Envelope& e) { e.eager = true; }), receives(kLarge), text + "262144");
}

TEST_F(DamagedWords, TheCountOfAMessageThatNobodyExpects) {
  const auto probes = [](Rank& r) {
    r.group().probe(1);
    return r.group().recv(tensor(r, kSmall), 1);
  };
  check(sends(kSmall), envelope([](Envelope& e) { e.count = std::int64_t{1} << 61; }), probes,
        "an envelope's count of elements is 2305843009213693952");
}

TEST_F(DamagedWords, TheAnswerOfAMessage) {
  check(sends(kLarge), envelope([](Envelope& e) { e.number = 64; }), receives(kLarge),
        "the number of an envelope's answer is 64; expected 0 to 63");
}

TEST_F(DamagedWords, TheKindOfAPlace) {
  for (const std::uint32_t kind : {0u, 1u, 4u, 77u})
    check(
        sends(kLarge), envelope([=](Envelope& e) { e.place.kind = static_cast<Buffer::Kind>(kind); }),
        receives(kLarge),
        fmt::format("the kind of an envelope's place is {}; expected a kind of memory that this rank reaches",
                    kind));
}

TEST_F(DamagedWords, ThePlaceOfAMessage) {
  const std::string text = "rank 1's words in shared memory are damaged: the place of a buffer is ";
  check(sends(kLarge, Memory::shared), envelope([](Envelope& e) { e.place.segment = 255; }), receives(kLarge),
        text);
  check(sends(kLarge, Memory::shared), envelope([](Envelope& e) { e.place.segment = 1u << 31; }),
        receives(kLarge), text);
  check(sends(kLarge, Memory::shared),
        envelope([](Envelope& e) { e.place.offset += std::uint64_t{1} << 40; }), receives(kLarge), text);
  check(sends(kLarge, Memory::shared), envelope([](Envelope& e) { e.place.offset = ~std::uint64_t{4095}; }),
        receives(kLarge), text);
  check(sends(kLarge), envelope([](Envelope& e) {
          e.place = {Buffer::remote, 0, 12345};
        }),
        receives(kLarge), "cannot read the memory of rank 1", ErrorCode::system, "pull");
}

TEST_F(DamagedWords, TheOffsetOfAChunk) {
  for (const std::int64_t offset : {std::int64_t{-65536}, std::int64_t{1} << 40})
    check(
        sends(kLarge),
        [=](Rank& r, const Control& c) {
          Pair& pair = *pair_from_here(r, c, 0);
          pair.chunks[0] = {1, offset};
          pair.sent.store(1);
        },
        receives(kLarge), fmt::format("the offset of a chunk is {}; expected 0", offset));
}

TEST_F(DamagedWords, TheCountOfEnvelopesReceived) {
  const auto sends_many = [](Rank& r) {
    for (std::uint64_t i = 0; i < shm::kEnvelopeRing; ++i) r.group().send(tensor(r, kSmall), 1).wait();
    pair_from_here(r, control_of_group(), 1)->drained.store(1000);  // as rank 1 might
    return r.group().send(tensor(r, kSmall), 1);
  };
  check(
      nullptr, [](Rank&, const Control&) {}, sends_many,
      "message from rank 0 to rank 1: rank 1's words in shared memory are damaged: its count of envelopes "
      "received is 1000; "
      "expected up to 16, as many as were sent");
}

// Rank 1 says that its messages to rank 0 lie where it has no memory.
TEST_F(DamagedWords, ThePlaceOfAPair) {
  for (const std::uint64_t place :
       {std::uint64_t{4711}, std::uint64_t{201} << 48, (std::uint64_t{1} << 48) | (std::uint64_t{1} << 46)})
    check(
        nullptr, [=](Rank&, const Control& c) { c.pair(1, 0).store(place); }, receives(kSmall),
        fmt::format(
            "message from rank 1 to rank 0: rank 1's words in shared memory are damaged: the place of its "
            "memory for rank 0 is {}; expected bytes of a segment that is mapped",
            place));
}

// For a message to itself a rank does not read the address from memory that others may write.
TEST_F(DamagedWords, ThePlaceOfAMessageToItself) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    r.group();
    Work send;
    Pair* own = nullptr;
    Tensor& sent = tensor(r, kLarge);
    if (r.rank == 0) {
      std::memset(sent.data(), 1, static_cast<std::size_t>(sent.bytes()));
      send = r.group().send(sent, 0);
      own = pair_from_here(r, control_of_group(), 0);
    }
    r.meet("sent");
    if (r.rank == 1) control_of_group().pair(0, 0).store(4711);
    r.meet("damaged");
    if (r.rank == 0) own->envelopes[0].place.offset = 4711;  // as rank 1 might
    if (r.rank == 0) {
      const Tensor& got = tensor(r, kLarge);
      r.group().recv(got, 0).wait();
      send.wait();
      EXPECT_EQ(std::memcmp(got.data(), sent.data(), static_cast<std::size_t>(sent.bytes())), 0);
    }
    kept.clear();
  });
}

TEST_F(DamagedWords, TheNumberOfAMessageToItself) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    r.group();
    Work send;
    Tensor& sent = tensor(r, kLarge);
    if (r.rank == 0) send = r.group().send(sent, 0);
    r.meet("sent");
    if (r.rank != 0) return kept.clear();
    pair_from_here(r, control_of_group(), 0)->answers[0].store(Pair::taken);  // as rank 1 might
    control_of_group().rank(0).inbox.fetch_add(1);
    send.wait();  // as it seems
    try {
      r.group().recv(tensor(r, kLarge), 0).wait();
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_THAT(
          e.what(),
          HasSubstr("the number of a message to itself is 1; expected that of one that is not received"));
    }
    kept.clear();
  });
}

TEST_F(DamagedWords, WhatARankCalled) {
  const auto reduces = [](Rank& r) { return r.group().all_reduce(tensor(r, kSmall)); };
  check(
      reduces, [](Rank&, const Control& c) { c.rank(1).arrivals[0].word = 0xfffffffffffffff0u; }, reduces,
      "rank 1's words in shared memory are damaged: what it called is 18446744073709551600; expected the "
      "word of a "
      "collective");
}

TEST_F(DamagedWords, ThePlacesOfACollective) {
  const std::string text = "rank 1's words in shared memory are damaged: the place of a buffer is ";
  const auto reduces = [](Rank& r) { return r.group().all_reduce(tensor(r, kLarge, Memory::shared)); };
  const auto gathers = [](Rank& r) {
    return r.group().all_gather(tensor(r, kLarge, Memory::shared), tensor(r, 2 * kLarge, Memory::shared));
  };
  const auto scans = [](Rank& r) { return r.group().scan(tensor(r, kLarge, Memory::shared)); };
  const auto in = [](const auto& change) {
    return [=](Rank&, const Control& c) { change(c.rank(1).arrivals[0].places.in); };
  };
  const auto out = [](const auto& change) {
    return [=](Rank&, const Control& c) { change(c.rank(1).arrivals[0].places.out); };
  };
  check(reduces, in([](Buffer& b) { b.segment = 200; }), reduces, text);
  check(reduces, out([](Buffer& b) { b.offset = std::uint64_t{1} << 45; }), reduces, text);
  check(reduces, in([](Buffer& b) { b = {Buffer::pointer, 0, 4711}; }), reduces, text);
  check(gathers, in([](Buffer& b) { b.offset = ~std::uint64_t{0}; }), gathers, text);
  check(scans, out([](Buffer& b) { b.kind = Buffer::none; }), scans, text);
  check(scans, in([](Buffer& b) { b.kind = static_cast<Buffer::Kind>(9); }), scans, text);
}

TEST_F(DamagedWords, TheBlocksOfACollective) {
  static constexpr std::array<std::int64_t, 2> counts{4, 4};
  const auto reduces = [](Rank& r) {
    return r.group().reduce_scatter_v(tensor(r, 8), tensor(r, 4), {counts});
  };
  for (const std::int64_t offset : {std::int64_t{-4}, std::int64_t{1} << 50, std::int64_t{1} << 62})
    check(
        reduces, [=](Rank&, const Control& c) { c.detail(1, 0).blocks()[0].offset = offset; }, reduces,
        fmt::format("the offset of its block for rank 0 is {}; expected that of 4 elements among 8160 bytes",
                    offset));
}

TEST_F(DamagedWords, TheLongestBlock) {
  const auto exchanges = [](Rank& r) {
    static constexpr std::array<std::int64_t, 2> counts{kLarge, kLarge};
    return r.group().all_to_all_v(tensor(r, 2 * kLarge), tensor(r, 2 * kLarge), {counts}, {counts});
  };
  for (const std::int64_t longest : {std::int64_t{-5}, std::int64_t{1} << 62})
    check(
        exchanges, [=](Rank&, const Control& c) { c.detail(1, 0).longest = longest; }, exchanges,
        fmt::format("the elements of its longest block is {}; expected 0 to", longest));
}

TEST_F(DamagedWords, ATextWithoutAnEnd) {
  static const auto nothing = [](const void*, const void*, void*, std::int64_t, DType) {};
  static const UserReduction first{"first", nothing}, second{"second", nothing};
  const auto reduces = [](Rank& r) {
    return r.group().all_reduce(tensor(r, kSmall), {.op = ReduceOp::of(r.rank == 0 ? first : second)});
  };
  check(
      reduces,
      [](Rank&, const Control& c) { std::memset(c.detail(1, 0).user, 'x', sizeof(shm::Detail::user)); },
      reduces, '"' + std::string(sizeof(shm::Detail::user), 'x') + '"', ErrorCode::mismatch);
}

TEST_F(DamagedWords, TheFirstCause) {
  const auto reduces = [](Rank& r) { return r.group().all_reduce(tensor(r, kSmall)); };
  for (const std::uint32_t state : {78u, 78u | shm::AbortRecord::kSealed, shm::AbortRecord::kSealed})
    check(
        nullptr, [=](Rank&, const Control& c) { c.abort().state.store(state); }, reduces,
        fmt::format("the group's words in shared memory are damaged: the rank that reported a failure is {}; "
                    "expected 0 to 1",
                    static_cast<int>(state & ~shm::AbortRecord::kSealed) - 1));
  check(
      nullptr,
      [](Rank&, const Control& c) {
        shm::AbortRecord& record = c.abort();
        std::memset(record.text, 'x', sizeof(record.text));
        record.code = static_cast<ErrorCode>(200);
        record.op = static_cast<Op>(200);
        record.state.store(2 | shm::AbortRecord::kSealed);
      },
      reduces, std::string(sizeof(shm::AbortRecord::text), 'x') + " [group", ErrorCode::system);
}

// The memory of the group that this process has begun to make, mapped once more.
void* map_region(std::size_t bytes) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry.path(), gone).string().find("memfd:weft-region") !=
        std::string::npos)
      return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, std::stoi(entry.path().filename()),
                    0);
  }
  return MAP_FAILED;
}

// Rank 0 has the group's memory before rank 1 arrives, and damages it again and again while the group is
// made. If the damage came too late, it tries again.
template <class Change>
void check_creation(const Change& change, const char* single_copy, const std::string& text) {
  const auto attempt = [&](Rank& r, int number) {
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    const std::string found = fmt::format("test/found{}", number);
    if (r.rank == 0)
      threads.emplace_back([&] {
        void* region = MAP_FAILED;
        while (region == MAP_FAILED) region = map_region(Control::bytes(2));
        r.store->set(found, "1");
        while (!over) change(Control(static_cast<std::byte*>(region), 2));
        ::munmap(region, Control::bytes(2));
      });
    else
      r.store->get(found, Deadline::after(10s));
    ProcessGroup group;
    try {
      group = ProcessGroup::create(r.context, "shm", r.membership(fmt::format("attempt{}", number)));
    } catch (const Error& e) {
      if (std::string(e.what()).find(text) != std::string::npos) r.store->add("test/hits", 1);
    }
    r.meet(fmt::format("tried{}", number));
    over = true;
    for (std::thread& t : threads) t.join();
    return r.store->add("test/hits", 0) > 0;
  };
  const auto body = [&](Rank& r) {
    ::setenv("WEFT_SINGLE_COPY", single_copy, 1);
    for (int k = 0; k < 100; ++k) {
      if (attempt(r, k)) return;
      r.meet(fmt::format("seen{}", k));
    }
    ADD_FAILURE() << "no error with: " << text;
  };
  RankOptions options;
  options.deadline = 1s;
  run_ranks(Ranks::processes, 2, body, options);
}

TEST_F(DamagedWords, TheCountOfRanksThatHaveCome) {
  check_creation([](const Control& c) { c.assembly().came[1].store(0); }, "off",
                 "the group's words in shared memory are damaged: the number of ranks that have arrived is ");
}

TEST_F(DamagedWords, WhatRanksMayReadOfEachOther) {
  check_creation(
      [](const Control& c) {
        for (int r = 0; r < 2; ++r) c.rank(r).single.store(0xf);
      },
      "pull", "the result of its check of the others' memory is 15; expected 1 to 2");
}

}  // namespace
}  // namespace weft::test::damaged_words_test
