// Compares element-wise sums with a plain loop and with memcpy. bus_GBs counts every byte read and written.
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "harness.hpp"
#include "plain_loops.hpp"
#include "reduce/reduce.hpp"

namespace weft::bench {
namespace {

enum class How { weft, weft_stream, plain };

// Sums of small integers are exact in every dtype and depend on rank and index.
template <class T>
T value(int rank, std::int64_t i) {
  return static_cast<T>(static_cast<float>((i * 7 + rank * 3) % 13));
}

// Memory aligned to cache lines, like Storage.
template <class T>
struct Aligned {
  using value_type = T;
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T* p, std::size_t) { ::operator delete (p, std::align_val_t{64}); }
  friend bool operator==(Aligned, Aligned) { return true; }
};

// n inputs and one output. If `in_place`, every input is also an output, as on the direct path of shm.
template <class T>
struct Buffers {
  std::vector<std::vector<T, Aligned<T>>> data;
  std::vector<const std::byte*> in;
  std::vector<std::byte*> out;
  std::vector<const T*> typed_in;

  Buffers(int n, std::int64_t count, bool in_place)
      : data(in_place ? n : n + 1, std::vector<T, Aligned<T>>(count)) {
    for (int k = 0; k < n; ++k) {
      for (std::int64_t i = 0; i < count; ++i) data[k][i] = value<T>(k, i);
      in.push_back(reinterpret_cast<const std::byte*>(data[k].data()));
      typed_in.push_back(data[k].data());
    }
    for (auto& x : data)
      if (in_place || &x == &data.back()) out.push_back(reinterpret_cast<std::byte*>(x.data()));
  }

  std::string wrong_sum(int n) const {
    for (const std::byte* bytes : out)
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(data[0].size()); ++i) {
        float want = 0, got = 0;
        for (int k = 0; k < n; ++k) want += static_cast<float>(value<T>(k, i));
        got = static_cast<float>(reinterpret_cast<const T*>(bytes)[i]);
        if (got != want)
          return "element " + std::to_string(i) + ": " + std::to_string(got) + "; expected " +
                 std::to_string(want);
      }
    return "";
  }
};

template <class T>
void add_sum(Bench& bench, How how, int n, std::int64_t bytes, bool in_place = false) {
  const char* const who = how == How::plain ? "plain" : how == How::weft ? "weft" : "weft_stream";
  TableRow c;
  c.name = "sum/" + std::string(name(dtype_of<T>)) + "/n" + std::to_string(n) +
           (in_place ? "/in_place/" : "/") + std::to_string(bytes) + "/" + who;
  c.bytes = bytes;
  c.bus_factor = n + (in_place ? n : 1);
  c.prepare = [how, n, bytes, in_place] {
    const std::int64_t count = bytes / static_cast<std::int64_t>(sizeof(T));
    auto b = std::make_shared<Buffers<T>>(n, count, in_place);
    Prepared p;
    p.verify = [b, n] { return b->wrong_sum(n); };
    if (how == How::plain) {
      p.run = [b, n, count] { plain_sum(b->typed_in.data(), n, reinterpret_cast<T*>(b->out[0]), count); };
    } else {
      const bool stream = how == How::weft_stream;
      p.run = [b, count, stream] { reduce(dtype_of<T>, ReduceOp::sum, b->in, b->out, count, stream); };
    }
    return p;
  };
  bench.add(std::move(c));
}

void add_copy(Bench& bench, std::int64_t bytes, bool stream) {
  TableRow c;
  c.name = "copy/" + std::to_string(bytes) + (stream ? "/weft_stream" : "/memcpy");
  c.bytes = bytes;
  c.bus_factor = 2;
  c.prepare = [bytes, stream] {
    auto b = std::make_shared<Buffers<float>>(1, bytes / 4, false);
    return Prepared{[b, bytes, stream] {
                      if (stream) {
                        copy_bytes(b->out[0], b->in[0], bytes, true);
                      } else {
                        std::memcpy(b->out[0], b->in[0], static_cast<std::size_t>(bytes));
                      }
                    },
                    [b] { return b->wrong_sum(1); }};
  };
  bench.add(std::move(c));
}

void add_all(Bench& bench) {
  constexpr std::int64_t kSmall = 8, kFirst = 32 << 10, kSecond = 512 << 10, kBeyond = 32 << 20;
  for (const std::int64_t bytes : {kSmall, kFirst, kSecond, kBeyond}) {
    add_copy(bench, bytes, false);
    for (const How how : {How::plain, How::weft}) {
      add_sum<float>(bench, how, 2, bytes);
      add_sum<bf16>(bench, how, 2, bytes);
      add_sum<f16>(bench, how, 2, bytes);
      add_sum<double>(bench, how, 2, bytes);
      add_sum<float>(bench, how, 4, bytes);
      add_sum<float>(bench, how, 8, bytes);
      add_sum<bf16>(bench, how, 8, bytes);
    }
    add_sum<float>(bench, How::weft, 2, bytes, true);
  }
  add_copy(bench, kBeyond, true);
  add_sum<float>(bench, How::weft_stream, 2, kBeyond);
  add_sum<bf16>(bench, How::weft_stream, 2, kBeyond);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::Bench bench(argc, argv);
  weft::bench::add_all(bench);
  bench.run();
}
