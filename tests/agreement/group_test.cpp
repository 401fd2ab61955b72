// Calls of a group: values that are compared with the call, and when groups are made.
#include <gtest/gtest.h>

#include <vector>

#include "agreement/row.hpp"
#include "weft/group/min_loc.hpp"

namespace weft::agreement {
namespace group_test {
namespace {

using test::Rank;

const std::string kCall = "with the call";

// Buffers that a call may use.
struct Floats {
  explicit Floats(const Rank& r) : odd(r.rank == 1), x(64, 1.0f), y(64, 0.0f) {}
  std::span<float> in(std::size_t n) { return std::span(x).first(n); }
  std::span<float> out(std::size_t n) { return std::span(y).first(n); }
  bool odd;  // this rank gives another value
  std::vector<float> x, y;
};

// A row of a call over a group.
Row row(const std::string& function, const std::string& value, const std::string& text,
        const std::function<Work(ProcessGroup&, Floats&)>& call) {
  return {"ProcessGroup::" + function, value, kCall, ErrorCode::mismatch, text, [call](Rank& r) {
            Floats f(r);
            call(r.group(), f).wait();
          }};
}

Rows reductions() {
  return {
      row("all_reduce", "operation", "barrier [call 0]…all_reduce f32 x8 sum [call 0]",
          [](ProcessGroup& g, Floats& f) { return f.odd ? g.barrier() : g.all_reduce(f.in(8)); }),
      row("all_reduce", "count", "all_reduce f32 x8 sum [call 0]…all_reduce f32 x7 sum [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.all_reduce(f.in(f.odd ? 7 : 8)); }),
      row("all_reduce", "dtype", "all_reduce f32 x8 sum [call 0]…all_reduce i32 x8 sum [call 0]",
          [](ProcessGroup& g, Floats& f) {
            static thread_local std::vector<std::int32_t> i(8);
            return f.odd ? g.all_reduce(i) : g.all_reduce(f.in(8));
          }),
      row("all_reduce", "options.op", "all_reduce f32 x8 sum [call 0]…all_reduce f32 x8 max [call 0]",
          [](ProcessGroup& g, Floats& f) {
            return g.all_reduce(f.in(8), {.op = f.odd ? ReduceOp::max : ReduceOp::sum});
          }),
      row("all_reduce", "options.op, the scale of premul_sum",
          "all_reduce f32 x8 premul_sum(0.25)…all_reduce f32 x8 premul_sum(0.5)",
          [](ProcessGroup& g, Floats& f) {
            return g.all_reduce(f.in(8), {.op = ReduceOp::premul_sum(f.odd ? 0.5 : 0.25)});
          }),
      row("all_reduce", "options.order", "all_reduce f32 x8 sum [call 0]…one in canonical order, one not",
          [](ProcessGroup& g, Floats& f) {
            return g.all_reduce(f.in(8), {.order = f.odd ? Order::canonical : Order::native});
          }),
      row("scan", "options.op", "scan f32 x8 sum [call 0]…scan f32 x8 max [call 0]",
          [](ProcessGroup& g, Floats& f) {
            return g.scan(f.in(8), {.op = f.odd ? ReduceOp::max : ReduceOp::sum});
          }),
      row("exscan", "count", "exscan f32 x8 sum [call 0]…exscan f32 x7 sum [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.exscan(f.in(f.odd ? 7 : 8)); }),
      row("reduce", "root", "reduce f32 x8 sum root 0 [call 0]…reduce f32 x8 sum root 1 [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.reduce(f.in(8), f.odd ? 1 : 0); }),
      row("reduce_scatter", "count", "reduce_scatter f32 x4 sum [call 0]…reduce_scatter f32 x3 sum [call 0]",
          [](ProcessGroup& g, Floats& f) {
            return g.reduce_scatter(f.in(f.odd ? 6 : 8), f.out(f.odd ? 3 : 4));
          }),
      row("reduce_scatter_v", "in_blocks.counts",
          "reduce_scatter_v f32 x8 with counts[0] = 4…reduce_scatter_v f32 x8 with counts[0] = 5",
          [](ProcessGroup& g, Floats& f) {
            const std::vector<std::int64_t> counts =
                f.odd ? std::vector<std::int64_t>{5, 3} : std::vector<std::int64_t>{4, 4};
            return g.reduce_scatter_v(f.in(8), f.out(f.odd ? 3 : 4), {counts});
          }),
  };
}

Row exchange_row(const std::string& function,
                 const std::function<void(ProcessGroup&, const ExchangePlan&, const ExchangeField&)>& begin) {
  return {
      function,
      "fields, and boxes of each pair",
      "in what each rank gets of each neighbour",
      ErrorCode::mismatch,
      "exchange: rank …gave 1 field: f32, 32 bytes of boxes (…and rank …1 field: f32, 32 bytes of boxes (…; "
      "expected the same on all ranks",
      [begin](Rank& r) {
        Floats f(r);
        const ExchangeBox box = f.odd ? ExchangeBox{0, 0, {4, 2}, {2, 1}} : ExchangeBox{0, 0, {8}, {1}};
        ExchangePlan plan;
        plan.fields = {DType::f32};
        plan.sends = plan.receives = {{1 - r.rank, {box}}};
        std::vector<float> in(8), out(8);
        begin(r.group(), plan, {in.data(), out.data()});
        r.group().barrier().wait();
      }};
}

Rows movements() {
  return {
      row("all_gather", "count", "all_gather f32 x4 [call 0]…all_gather f32 x3 [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.all_gather(f.in(f.odd ? 3 : 4), f.out(f.odd ? 6 : 8)); }),
      row("all_gather_v", "out_blocks.counts",
          "all_gather_v f32 x8 with counts[0] = 4…all_gather_v f32 x8 with counts[0] = 5",
          [](ProcessGroup& g, Floats& f) {
            const std::vector<std::int64_t> counts =
                f.odd ? std::vector<std::int64_t>{5, 3} : std::vector<std::int64_t>{4, 4};
            return g.all_gather_v(f.in(f.odd ? 3 : 4), f.out(8), {counts});
          }),
      row("gather", "root", "gather f32 x4 root 0 [call 0]…gather f32 x4 root 1 [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.gather(f.in(4), f.out(8), f.odd ? 1 : 0); }),
      row("all_to_all", "count", "all_to_all f32 x8 [call 0]…all_to_all f32 x6 [call 0]",
          [](ProcessGroup& g, Floats& f) { return g.all_to_all(f.in(f.odd ? 6 : 8), f.out(f.odd ? 6 : 8)); }),
      row("all_to_all_v", "counts of each pair",
          "all_to_all_v: rank 1 sends 5 elements to rank 0, which expects 4",
          [](ProcessGroup& g, Floats& f) {
            const std::vector<std::int64_t> expected{4, 4}, sent{f.odd ? 5 : 4, 4};
            g.all_to_all_v(f.in(f.odd ? 9 : 8), f.out(8), {sent}, {expected}).wait();
            return g.barrier();
          }),
      row("broadcast", "count", "broadcast f32 x8 root 0 [call 0]…broadcast f32 x7 root 0 [call 0]",
          [](ProcessGroup& g, Floats& f) {
            g.broadcast(f.in(f.odd ? 7 : 8), 0).wait();
            return g.barrier();
          }),
      row("scatter", "count", "scatter f32 x4 root 0 [call 0]…scatter f32 x3 root 0 [call 0]",
          [](ProcessGroup& g, Floats& f) {
            g.scatter(f.in(8), f.out(f.odd ? 3 : 4), 0).wait();
            return g.barrier();
          }),
      row("broadcast", "root", "broadcast f32 x8 root 0 [call 0]…broadcast f32 x8 root 1 [call 0]",
          [](ProcessGroup& g, Floats& f) {
            g.broadcast(f.in(8), f.odd ? 1 : 0).wait();
            return g.barrier();
          }),
      row("scatter", "root", "scatter f32 x4 root 0 [call 0]…scatter f32 x4 root 1 [call 0]",
          [](ProcessGroup& g, Floats& f) {
            g.scatter(f.in(8), f.out(4), f.odd ? 1 : 0).wait();
            return g.barrier();
          }),
      {"ProcessGroup::leave", "calls before it", "in leave()", ErrorCode::mismatch,
       "leave: …broadcast f32 x8 root 0 [call 0]…barrier [call 0]",
       [](Rank& r) {
         Floats f(r);
         if (!f.odd) r.group().broadcast(f.in(8), 0).wait();
         r.group().leave();
       }},
      row("barrier", "operation", "barrier [call 0]…all_gather f32 x4 [call 0]",
          [](ProcessGroup& g, Floats& f) { return f.odd ? g.all_gather(f.in(4), f.out(8)) : g.barrier(); }),
      {"PersistentCall::start", "operation, and all that is compared of a call", kCall, ErrorCode::mismatch,
       "all_reduce f32 x8 sum [call 0]…all_reduce f32 x8 max [call 0]",
       [](Rank& r) {
         Floats f(r);
         const ReduceOp op = f.odd ? ReduceOp::max : ReduceOp::sum;
         PersistentCall call = r.group().make_all_reduce(f.in(8), {.op = op});
         call.start().wait();
       }},
      exchange_row("PersistentExchange::start",
                   [](ProcessGroup& g, const ExchangePlan& plan, const ExchangeField& field) {
                     g.make_exchange(plan).start({&field, 1}).wait();
                   }),
      exchange_row("ProcessGroup::exchange",
                   [](ProcessGroup& g, const ExchangePlan& plan, const ExchangeField& field) {
                     g.exchange(plan, {&field, 1}).wait();
                   }),
      row("coalesced", "order of the calls", "all_reduce f32 x8 sum [call 0]…barrier [call 0]",
          [](ProcessGroup& g, Floats& f) {
            std::vector<Call> calls{call::all_reduce(f.in(8)), call::barrier()};
            if (f.odd) std::swap(calls[0], calls[1]);
            return g.coalesced(calls);
          }),
      row("send_recv", "count of a message", "f32 x8…f32 x7",
          [](ProcessGroup& g, Floats& f) {
            g.send_recv(f.in(8), 1 - g.rank(), f.out(f.odd ? 7 : 8), 1 - g.rank()).wait();
            return g.barrier();
          }),
  };
}

Rows groups() {
  const auto short_deadline = [](Rank& r) {
    Membership m = r.membership("g");
    m.deadline = std::chrono::milliseconds(300);
    return m;
  };
  return {
      {"ProcessGroup::create", "m.size", "when it is made", ErrorCode::mismatch,
       "group \"g\": rank …says size ",
       [](Rank& r) {
         Membership m = r.membership("g");
         if (r.rank == 1) m.size = 3;
         ProcessGroup::create(r.context, "shm", m);
       }},
      {"ProcessGroup::create", "m.name", "when it is made, by the deadline", ErrorCode::timeout,
       "did not join within",
       [short_deadline](Rank& r) {
         Membership m = short_deadline(r);
         if (r.rank == 1) m.name = "h";
         ProcessGroup::create(r.context, "shm", m);
       }},
      {"ProcessGroup::subgroup", "ranks", "when it is made, by the deadline", ErrorCode::timeout,
       "group \"pair\": …did not join within",
       [short_deadline](Rank& r) {
         ProcessGroup g = ProcessGroup::create(r.context, "shm", short_deadline(r));
         const std::vector<int> ranks = r.rank == 1 ? std::vector<int>{1, 0} : std::vector<int>{0, 1};
         const Error e = test::error_of([&] { g.subgroup("pair", ranks); });
         r.meet("over");  // otherwise the other rank would get the error that a rank has left
         throw Error(e);
       }},
      {"min_loc", "count", kCall, ErrorCode::mismatch,
       "x8 user \"min_loc of f32\"…x7 user \"min_loc of f32\"",
       [](Rank& r) {
         Floats f(r);
         std::vector<std::int64_t> where(r.rank == 1 ? 7 : 8);
         min_loc(r.group(), f.in(where.size()), where);
       }},
      {"max_loc", "least or largest", kCall, ErrorCode::mismatch, "\"max_loc of f32\"…\"min_loc of f32\"",
       [](Rank& r) {
         Floats f(r);
         std::vector<std::int64_t> where(8);
         if (r.rank == 1)
           min_loc(r.group(), f.in(8), where);
         else
           max_loc(r.group(), f.in(8), where);
       }},
  };
}

}  // namespace
}  // namespace group_test

Rows group_rows() {
  using namespace group_test;
  Rows rows;
  for (const Rows& some : {reductions(), movements(), groups()})
    rows.insert(rows.end(), some.begin(), some.end());
  return rows;
}

TEST(AgreementOfGroups, EachRankIsTold) { expect_told(group_rows()); }

}  // namespace weft::agreement
