// A program outside weft, linked to libweft.so and to libweft.a. Where the library's types are thrown and
// cast, they are the same types for the program.
#include <weft/backends/plugin.hpp>
#include <weft/weft.hpp>

#include <cstdio>
#include <exception>
#include <vector>

namespace {

// A Store of the program, which only counts.
class CountingStore final : public weft::Store {
 public:
  explicit CountingStore(std::shared_ptr<weft::Store> inner) : inner_(std::move(inner)) {}
  void set(std::string_view key, std::string_view value, weft::Deadline d) override {
    ++calls;
    inner_->set(key, value, d);
  }
  std::string get(std::string_view key, weft::Deadline d) override { return ++calls, inner_->get(key, d); }
  std::optional<std::string> try_get(std::string_view key, weft::Deadline d) override {
    return ++calls, inner_->try_get(key, d);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, weft::Deadline d) override {
    return ++calls, inner_->add(key, delta, d);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          weft::Deadline d) override {
    return ++calls, inner_->compare_set(key, expected, desired, d);
  }
  void remove(std::string_view key, weft::Deadline d) override {
    ++calls;
    inner_->remove(key, d);
  }
  int calls = 0;

 private:
  std::shared_ptr<weft::Store> inner_;
};

}  // namespace

int main() {
  weft::Context context;
  auto members = weft::Membership::from_env(context);
  members.store = std::make_shared<CountingStore>(members.store);
  auto group = weft::ProcessGroup::create(context, "shm", members);
  std::vector<float> x(1000, static_cast<float>(group.rank() + 1));
  group.all_reduce(weft::view(x), weft::view(x)).wait();
  std::printf("rank %d of %d: sum %g\n", group.rank(), group.size(), x[0]);
  const auto* counting = dynamic_cast<const CountingStore*>(members.store.get());
  if (counting == nullptr || counting->calls == 0) std::puts("the store of the program was not called");
  try {
    weft::load_backend(context, "absent");
  } catch (const weft::Error& e) {
    std::printf("caught %s: %s\n", std::string(weft::name(e.code())).c_str(), e.what());
  }
  try {
    group.broadcast(weft::view(x), weft::view(x), 7).wait();
  } catch (const std::exception& e) {
    std::printf("a bad root is%s a weft::Error\n",
                dynamic_cast<const weft::Error*>(&e) == nullptr ? " not" : "");
  }
}
