#include "weft/nn/module.hpp"

#include "nn/support.hpp"
#include "weft/nn/linear.hpp"

namespace weft::module_test {
namespace {

using test::error_text;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// y = factor · x, and dx = factor · dy; keeps x, as a layer would.
class Scale : public Module {
 public:
  explicit Scale(float factor) {
    weight = add("factor", std::make_shared<Parameter>(Shape{1}, Constant{factor}));
  }
  ParameterRef weight;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    frame.push(*this, {x[0]});
    return {times(x[0], frame)};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    const Tensor x = frame.pop(*this)[0];
    Tensor dw(frame.compute().context(), {1});
    dw.f32()[0] = static_cast<float>(test::dot(dy[0], x));
    weight->accumulate(dw);
    return {times(dy[0], frame)};
  }
  Tensor times(const Tensor& x, Frame& frame) {
    const Tensor y = frame.compute().make(x.shape());
    for (std::size_t i = 0; i < y.f32().size(); ++i) y.f32()[i] = x.f32()[i] * weight->master().f32()[0];
    return y;
  }
};

struct Pair : Module {
  Pair() : first(2), second(3) {
    add("first", first);
    add("second", second);
  }
  Scale first, second;
  bool backward_in_wrong_order = false;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    return second.forward(first.forward(x, frame), frame);
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    return backward_in_wrong_order ? second.backward(first.backward(dy, frame), frame)
                                   : first.backward(second.backward(dy, frame), frame);
  }
};

struct Tree : Module {
  Tree() {
    add("blocks", blocks);
    blocks.append(std::make_unique<Pair>());
    blocks.append(std::make_unique<Pair>());
  }
  Sequential blocks;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override { return blocks.forward(x, frame); }
  Tensors do_backward(Inputs dy, Frame& frame) override { return blocks.backward(dy, frame); }
};

TEST(Module, NamesItsTree) {
  Tree tree;
  EXPECT_EQ(tree.path(), "");
  EXPECT_EQ(tree.get("blocks.1.second").path(), "blocks.1.second");
  EXPECT_EQ(&tree.get(""), &tree);
  EXPECT_EQ(&tree.get("blocks").get("0"), &tree.get("blocks.0"));
  EXPECT_EQ(tree.parameter("blocks.0.first.factor")->path(), "blocks.0.first.factor");
  std::vector<std::string> paths, nodes;
  for (const Parameter* p : tree.parameters()) paths.push_back(p->path());
  EXPECT_THAT(paths, ElementsAre("blocks.0.first.factor", "blocks.0.second.factor", "blocks.1.first.factor",
                                 "blocks.1.second.factor"));
  tree.get("blocks.1").visit([&](Module& m) { nodes.push_back(m.path()); });
  EXPECT_THAT(nodes, ElementsAre("blocks.1", "blocks.1.first", "blocks.1.second"));
}

TEST(Module, SaysWhereAPathEnds) {
  Tree tree;
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { tree.get("blocks.1.third"); }),
            "get \"blocks.1.third\": \"blocks.1\" has no child \"third\"; it has first, second");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { tree.get("blocks.0.first.x"); }),
            "get \"blocks.0.first.x\": \"blocks.0.first\" has no child \"x\"; it has no children");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { tree.parameter("blocks.0.first.weight"); }),
            "parameter \"blocks.0.first.weight\": \"blocks.0.first\" has no parameter \"weight\"");
}

TEST(Module, RefusesNamesThatWouldBeAmbiguous) {
  struct Bad : Scale {
    Bad(const char* name, Module& child) : Scale(1) {
      add("child", own);
      add(name, child);
    }
    Scale own{1};
  };
  Scale other(1);
  EXPECT_THAT(error_text(ErrorCode::bad_argument, [&] { Bad("a.b", other); }),
              HasSubstr("a name is not empty and holds no dot"));
  EXPECT_THAT(error_text(ErrorCode::bad_argument, [&] { Bad("child", other); }),
              HasSubstr("the name is taken"));
  Tree tree;
  EXPECT_THAT(error_text(ErrorCode::bad_argument, [&] { Bad("c", tree.get("blocks")); }),
              HasSubstr("it has a parent already"));
}

TEST(Module, RunsForwardAndItsMirror) {
  test::Bench bench;
  Tree tree;
  materialise(tree, bench.compute);
  initialise(tree, 1);
  Frame frame(bench.compute);
  const Tensor x = test::tensor_of(bench.context, {2}, {1, -2});
  EXPECT_THAT(test::floats(tree.forward(x, frame)[0]), ElementsAre(36, -72));
  EXPECT_FALSE(frame.empty());
  EXPECT_THAT(test::floats(tree.backward(x, frame)[0]), ElementsAre(36, -72));
  EXPECT_TRUE(frame.empty());
  EXPECT_EQ(tree.parameter("blocks.0.second.factor")->gradient().f32()[0], 12 * 5);
}

TEST(Module, HooksSeeAndMayReplaceWhatPasses) {
  test::Bench bench;
  Pair pair;
  materialise(pair, bench.compute);
  initialise(pair, 1);
  std::vector<std::string> seen;
  const auto note = [&](const char* what) {
    return [&seen, what](Module& m, Tensors& t, Frame&) {
      seen.push_back(std::string(what) + " " + m.path() + " " +
                     std::to_string(static_cast<int>(t[0].f32()[0])));
    };
  };
  std::vector<HookHandle> handles;
  handles.push_back(pair.second.add_hook(Module::HookPoint::pre_forward, note("pre-forward")));
  handles.push_back(pair.second.add_hook(Module::HookPoint::post_forward, note("post-forward")));
  handles.push_back(pair.second.add_hook(Module::HookPoint::pre_backward, note("pre-backward")));
  handles.push_back(pair.second.add_hook(Module::HookPoint::post_backward, note("post-backward")));
  handles.push_back(pair.second.add_hook(Module::HookPoint::post_forward, [&](Module&, Tensors& t, Frame&) {
    t[0] = test::tensor_of(bench.context, {1}, {100});
  }));
  Frame frame(bench.compute);
  const Tensor x = test::tensor_of(bench.context, {1}, {1});
  EXPECT_EQ(pair.forward(x, frame)[0].f32()[0], 100);
  pair.backward(x, frame);
  EXPECT_THAT(seen, ElementsAre("pre-forward second 2", "post-forward second 6", "pre-backward second 1",
                                "post-backward second 3"));
  handles.clear();
  seen.clear();
  EXPECT_EQ(pair.forward(x, frame)[0].f32()[0], 6) << "hooks go with their handles";
  pair.backward(x, frame);
  EXPECT_TRUE(seen.empty());
}

TEST(Module, AHookMayTakeItselfAway) {
  test::Bench bench;
  Scale scale(2);
  materialise(scale, bench.compute);
  initialise(scale, 1);
  Frame frame(bench.compute);
  std::vector<int> called;
  HookHandle first = scale.add_hook(Module::HookPoint::pre_forward, [&](Module&, Tensors&, Frame&) {
    called.push_back(1);
    first.reset();
  });
  const HookHandle second =
      scale.add_hook(Module::HookPoint::pre_forward, [&](Module&, Tensors&, Frame&) { called.push_back(2); });
  scale.forward(test::tensor_of(bench.context, {1}, {1}), frame);
  EXPECT_THAT(called, ElementsAre(1, 2));
}

TEST(Module, RefusesWhatIsNotThere) {
  test::Bench bench;
  Scale scale(2);
  materialise(scale, bench.compute);
  initialise(scale, 1);
  Frame frame(bench.compute);
  const auto text = [](const auto& call) { return error_text(ErrorCode::bad_argument, call); };
  EXPECT_EQ(text([&] { (void)scale.add_hook(Module::HookPoint::pre_forward, {}); }),
            "module \"\": add_hook: hook is empty; expected a function");
  EXPECT_EQ(text([&] { scale.add_before(nullptr); }),
            "module \"\": add_before: boundary is null; expected one");
  const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"tp", 1}}, 0);
  EXPECT_EQ(text([&] { scale.add_after(boundary::enter(mesh), -2); }),
            "module \"\": add_after of number -2; expected 0 or more, or kEvery");
  EXPECT_EQ(text([&] { scale.forward(Tensor(), frame); }),
            "\"\": input 0 has no memory: it is empty or was moved from");
  scale.add_before(boundary::enter(mesh), 1);
  EXPECT_EQ(text([&] { scale.forward(test::tensor_of(bench.context, {1}, {1}), frame); }),
            "\"\": x: a boundary is for number 1 of the floating-point tensors; there are 1");
  Sequential list;
  EXPECT_EQ(text([&] { list.append(nullptr); }), "append: \"\" got null for \"0\"");
  Linear linear(2, 3);
  EXPECT_EQ(text([&] { linear.tie_weight(nullptr); }), "tie: \"\" got null for \"weight\"");
  struct Open : Scale {
    Open() : Scale(1) {}
    using Module::add;
  };
  Open open, inner;
  EXPECT_EQ(text([&] { open.add("w", ParameterRef()); }), "add: \"\" got null for \"w\"");
  EXPECT_EQ(text([&] { open.add("b", ModuleBufferRef()); }), "add: \"\" got null for \"b\"");
  EXPECT_EQ(text([&] { open.add("w", scale.weight); }),
            "module \"\": cannot add parameter \"w\": it is \"factor\" of another module; tie() shares one");
  open.add("inner", inner);
  EXPECT_EQ(text([&] { inner.add("up", open); }),
            "module \"inner\": cannot add child \"up\": it is this module, or above it");
  EXPECT_EQ(text([&] { open.add("self", open); }),
            "module \"\": cannot add child \"self\": it is this module, or above it");
}

TEST(Module, OnlyTheOutermostBackwardEnds) {
  test::Bench bench;
  Pair pair;
  materialise(pair, bench.compute);
  initialise(pair, 1);
  std::vector<std::string> ended;
  const auto note = [&](Module& m, Tensors&, Frame&) { ended.push_back("\"" + m.path() + "\""); };
  const HookHandle of_pair = pair.add_hook(Module::HookPoint::end_of_backward, note);
  const HookHandle of_second = pair.second.add_hook(Module::HookPoint::end_of_backward, note);
  Frame frame(bench.compute);
  const Tensor x = test::tensor_of(bench.context, {1}, {1});
  pair.forward(x, frame);
  pair.backward(x, frame);
  EXPECT_THAT(ended, ElementsAre("\"\""));
  pair.second.forward(x, frame);
  pair.second.backward(x, frame);
  EXPECT_THAT(ended, ElementsAre("\"\"", "\"second\""));
}

// Weights that are gathered for a pass are released however the pass ends.
TEST(Module, WhatRunsAroundAPassIsLeftInReverseOrderAlsoWhereItThrows) {
  test::Bench bench;
  Pair pair;
  materialise(pair, bench.compute);
  initialise(pair, 1);
  std::vector<std::string> seen;
  const auto around = [&](const std::string& name, bool throws = false) {
    return Module::Around{[&seen, name, throws](Module&, Frame&) {
                            if (throws) throw Error(ErrorCode::bad_argument, name + " cannot enter");
                            seen.push_back("enter " + name);
                          },
                          [&seen, name](Module&, Frame&) { seen.push_back("leave " + name); }};
  };
  HookHandle handles[] = {pair.second.around_forward(around("a")), pair.second.around_forward(around("b")),
                          pair.second.around_backward(around("c"))};
  Frame frame(bench.compute);
  const Tensor x = test::tensor_of(bench.context, {1}, {1});
  pair.forward(x, frame);
  EXPECT_THAT(seen, ElementsAre("enter a", "enter b", "leave b", "leave a"));
  seen.clear();
  pair.backward_in_wrong_order = true;
  EXPECT_THROW(pair.backward(x, frame), Error) << "first's backward comes first";
  EXPECT_TRUE(seen.empty());
  frame.clear();
  EXPECT_THROW(pair.second.backward(x, frame), Error) << "nothing was kept";
  EXPECT_THAT(seen, ElementsAre("enter c", "leave c"));
  seen.clear();
  {
    const HookHandle third = pair.second.around_forward(around("third", true));
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { pair.second.forward(x, frame); }),
              "third cannot enter");
    EXPECT_THAT(seen, ElementsAre("enter a", "enter b", "leave b", "leave a"));
  }
  handles[0].reset();
  seen.clear();
  pair.second.forward(x, frame);
  EXPECT_THAT(seen, ElementsAre("enter b", "leave b"));
}

TEST(Module, HandlesMayOutliveTheirModule) {
  HookHandle handle;
  {
    Pair pair;
    handle = pair.add_hook(Module::HookPoint::pre_forward, [](Module&, Tensors&, Frame&) {});
    pair.first.add_hook(Module::HookPoint::pre_forward, [](Module&, Tensors&, Frame&) {}).detach();
  }
  handle.reset();
}

TEST(Module, SequentialTakesNames) {
  Sequential list;
  list.append("in", std::make_unique<Scale>(2.0F));
  list.append(std::make_unique<Scale>(3.0F));
  EXPECT_EQ(list.get("in").path(), "in");
  EXPECT_EQ(list.get("1").path(), "1");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { list.append("in", std::make_unique<Scale>(1.0F)); }),
            "module \"\": cannot add child \"in\": the name is taken");
  EXPECT_EQ(list.size(), 2U);
}

TEST(Frame, NamesBothPathsWhenBackwardDoesNotMirrorForward) {
  test::Bench bench;
  Pair pair;
  materialise(pair, bench.compute);
  initialise(pair, 1);
  const Tensor x = test::tensor_of(bench.context, {1}, {1});
  Frame frame(bench.compute);
  pair.forward(x, frame);
  pair.backward_in_wrong_order = true;
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { pair.backward(x, frame); }),
            "frame: backward of \"first\", but the newest entry is of \"second\": backward must run in the "
            "reverse order of "
            "forward");
  frame.clear();
  EXPECT_TRUE(frame.empty());
  Frame fresh(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { pair.second.backward(x, fresh); }),
            "frame: backward of \"second\", but the Frame is empty: its forward did not run on this Frame, "
            "or its backward "
            "already has");
  Frame inference = Frame::inference(bench.compute);
  EXPECT_EQ(pair.forward(x, inference)[0].f32()[0], 6);
  EXPECT_TRUE(inference.empty());
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { pair.second.backward(x, inference); }),
            "frame: backward of \"second\" on an inference Frame, which keeps nothing");
}

TEST(Frame, SeveralMayBeInFlight) {
  test::Bench bench;
  Pair pair;
  materialise(pair, bench.compute);
  initialise(pair, 1);
  Frame a(bench.compute), b(bench.compute);
  pair.forward(test::tensor_of(bench.context, {1}, {1}), a);
  pair.forward(test::tensor_of(bench.context, {1}, {10}), b);
  const Tensor one = test::tensor_of(bench.context, {1}, {1});
  pair.backward(one, a);
  EXPECT_EQ(pair.second.weight->gradient().f32()[0], 2);  // d(3·2·1)/d3
  pair.backward(one, b);
  EXPECT_EQ(pair.second.weight->gradient().f32()[0], 2 + 20);
}

TEST(Compute, RefusesToComputeWithNoThread) {
  Context context;
  EXPECT_THAT(error_text(ErrorCode::bad_argument, [&] { Compute(context, 0); }), HasSubstr("threads"));
}

// A linear layer and its reverse, with one weight: y = W (W x), as tied embeddings share one.
struct Tied : Module {
  Tied() : first(2, 2), second(2, 2) {
    add("first", first);
    add("second", second);
    second.tie_weight(first.weight);
  }
  Linear first, second;

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    return second.forward(first.forward(x, frame), frame);
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    return first.backward(second.backward(dy, frame), frame);
  }
};

TEST(Parameter, WithoutValuesIsAnErrorAndNotWhateverIsInItsMemory) {
  test::Bench bench;
  Linear layer(2, 2);
  materialise(layer, bench.compute);
  EXPECT_FALSE(layer.weight->has_values());
  Frame frame(bench.compute);
  const auto pass = [&] { layer.forward(test::tensor_of(bench.context, {1, 2}, {1, 1}), frame); };
  EXPECT_EQ(
      error_text(ErrorCode::bad_argument, pass),
      "parameter \"weight\" has no values: initialise() the model or load a checkpoint first; code that "
      "writes master() itself must call write_master()");
  EXPECT_EQ(layer.weight->weight().count(), 4);  // to be looked at it is there
  layer.weight->set_master(layer.weight->master());
  EXPECT_FALSE(layer.weight->has_values());  // the same memory
  initialise(*layer.weight, 1);
  EXPECT_TRUE(layer.weight->has_values());
  initialise(layer, 1);
  EXPECT_EQ(error_text([&] { return pass(), 0; }), "no error");
}

TEST(Parameter, TiedIsOneWithOnePathAndTwoUses) {
  test::Bench bench;
  Tied tied;
  EXPECT_EQ(tied.parameters().size(), 1u);
  EXPECT_EQ(tied.parameter("second.weight"), tied.parameter("first.weight"));
  EXPECT_EQ(tied.parameter("second.weight")->path(), "first.weight");
  EXPECT_EQ(tied.first.weight->holders(), 2);
  materialise(tied, bench.compute);
  std::copy_n(std::array<float, 4>{1, 2, 3, 4}.data(), 4, tied.first.weight->write_master().f32().data());

  int final_calls = 0;
  std::vector<float> final_gradient;
  const int id = tied.first.weight->listen([&](Parameter& p) {
    ++final_calls;
    final_gradient = test::floats(p.gradient());
  });
  Frame frame(bench.compute);
  EXPECT_THAT(test::floats(tied.forward(test::tensor_of(bench.context, {1, 2}, {1, 1}), frame)[0]),
              ElementsAre(17, 37));
  tied.second.backward(test::tensor_of(bench.context, {1, 2}, {1, 0}), frame);
  EXPECT_EQ(final_calls, 0);  // one use is still to come
  EXPECT_THAT(test::floats(tied.first.weight->gradient()), ElementsAre(3, 7, 0, 0));
  tied.first.backward(test::tensor_of(bench.context, {1, 2}, {1, 2}), frame);
  EXPECT_EQ(final_calls, 1);
  EXPECT_THAT(final_gradient, ElementsAre(4, 8, 2, 2));
  tied.first.weight->stop_listening(id);

  // A second pass adds; after zero_gradient the next one overwrites.
  for (const float expected : {8.0f, 4.0f}) {
    tied.forward(test::tensor_of(bench.context, {1, 2}, {1, 1}), frame);
    tied.backward(test::tensor_of(bench.context, {1, 2}, {1, 0}), frame);
    EXPECT_EQ(tied.first.weight->gradient().f32()[0], expected);
    tied.first.weight->zero_gradient();
  }
  EXPECT_EQ(final_calls, 1);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { tied.first.weight->gradient(); }),
            "parameter \"first.weight\": has no gradient; no backward pass has used it since zero_gradient");
}

// A pass may use one of the two places of a tied weight, or run a module twice. Its gradient is final after
// as many uses in backward as there were in forward.
TEST(Parameter, IsFinalAfterAsManyUsesAsThePassMade) {
  test::Bench bench;
  Tied tied;
  materialise(tied, bench.compute);
  initialise(tied, 1);
  int final_calls = 0;
  tied.first.weight->listen([&](Parameter&) { ++final_calls; });
  const Tensor x = test::tensor_of(bench.context, {1, 2}, {1, 1});
  Frame frame(bench.compute), other(bench.compute);
  tied.first.forward(x, frame);
  tied.first.backward(x, frame);
  EXPECT_EQ(final_calls, 1) << "the second place was not used";

  for (int run = 0; run < 3; ++run) tied.first.forward(x, frame);
  tied.second.forward(x, other);  // another micro-batch
  for (int run = 0; run < 3; ++run) {
    EXPECT_EQ(final_calls, 1);
    tied.first.backward(x, frame);
  }
  EXPECT_EQ(final_calls, 2);
  tied.second.backward(x, other);
  EXPECT_EQ(final_calls, 3);

  // A forward pass without a backward pass leaves nothing behind.
  tied.forward(x, frame);
  frame.clear();
  tied.first.forward(x, frame);
  tied.first.backward(x, frame);
  EXPECT_EQ(final_calls, 4);
  Frame inference = Frame::inference(bench.compute);
  tied.forward(x, inference);
  tied.first.forward(x, frame);
  tied.first.backward(x, frame);
  EXPECT_EQ(final_calls, 5);
}

TEST(Parameter, TieRefusesAnotherShape) {
  Linear narrow(2, 3), wide(3, 2);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { narrow.tie_weight(wide.weight); }),
            "tie: \"weight\" is (3, 2), \"weight\" is (2, 3)");
}

TEST(Parameter, GradientMayLiveElsewhere) {
  test::Bench bench;
  Parameter p({2});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.master(); }),
            "parameter \"\": used before materialise");
  p.materialise(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.materialise(bench.compute); }),
            "parameter \"\": materialised twice");
  EXPECT_THAT(error_text(ErrorCode::bad_argument, [&] { p.set_layout(nullptr); }),
              HasSubstr("set_layout after materialise"));
  p.accumulate(test::tensor_of(bench.context, {2}, {1, 2}));
  const Tensor bucket = Tensor::zeros(bench.context, {5});
  p.place_gradient(bucket.slice_flat(2, {2}));
  EXPECT_THAT(test::floats(bucket), ElementsAre(0, 0, 1, 2, 0));
  p.accumulate(test::tensor_of(bench.context, {2}, {10, 10}));
  EXPECT_THAT(test::floats(bucket), ElementsAre(0, 0, 11, 12, 0));
  p.zero_gradient();
  p.accumulate(test::tensor_of(bench.context, {2}, {5, 6}));
  EXPECT_THAT(test::floats(bucket), ElementsAre(0, 0, 5, 6, 0));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.place_gradient(bucket); }),
            "parameter \"\": place_gradient got f32 (5); expected f32 (2)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_master(bucket); }),
            "parameter \"\": set_master got f32 (5); expected f32 (2)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.accumulate(bucket); }),
            "parameter \"\": a gradient of shape (5); expected (2)");
}

}  // namespace
}  // namespace weft::module_test
