// A configuration as text: what is read, what is refused with its line, and that what is written is read
// back.
#include "weft/models/transformer_text.hpp"

#include <gtest/gtest.h>

#include <string>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft::transformer_text_test {
namespace {

std::string refusal(const std::string& text) {
  const Error e = test::error_of([&] { transformer_from_text(text); });
  EXPECT_EQ(e.code(), ErrorCode::bad_argument);
  return e.what();
}

TEST(TransformerText, GivesWhatItNamesAndLeavesTheRest) {
  TransformerConfig initial;
  initial.dim = 24, initial.heads = 2, initial.kv_heads = 2, initial.layers = 9;
  const TransformerConfig c = transformer_from_text(
      "steps = 3  # of weft train\n[other]\nwhat = 'ever'\n[model]\ndim = 48\nrope_theta = 500000\n"
      "norm_eps = 1e-6\ntied = true\n",
      "a.toml", initial);
  EXPECT_EQ(c.dim, 48);
  EXPECT_EQ(c.heads, 2);
  EXPECT_EQ(c.layers, 9);
  EXPECT_EQ(c.rope_theta, 500000.0) << "an integer is a number";
  EXPECT_EQ(c.norm_eps, 1e-6);
  EXPECT_TRUE(c.tied);
  EXPECT_EQ(transformer_from_text("[model]").dim, TransformerConfig().dim);
}

TEST(TransformerText, IsReadBackAsItWasWritten) {
  TransformerConfig c;
  c.dim = 40, c.layers = 3, c.heads = 5, c.kv_heads = 1, c.ffn_hidden = 7, c.vocab = 99, c.max_seq = 11;
  c.head_size = 6, c.rope_theta = 12345.678901234567, c.norm_eps = 1e-300, c.tied = true, c.init_std = 0;
  const std::string text = transformer_text(c);
  EXPECT_EQ(text.rfind("[model]\ndim = 40\n", 0), 0u) << text;
  const TransformerConfig d = transformer_from_text(text);
  EXPECT_EQ(d.dim, c.dim);
  EXPECT_EQ(d.layers, c.layers);
  EXPECT_EQ(d.heads, c.heads);
  EXPECT_EQ(d.kv_heads, c.kv_heads);
  EXPECT_EQ(d.ffn_hidden, c.ffn_hidden);
  EXPECT_EQ(d.vocab, c.vocab);
  EXPECT_EQ(d.max_seq, c.max_seq);
  EXPECT_EQ(d.head_size, c.head_size);
  EXPECT_EQ(d.rope_theta, c.rope_theta);
  EXPECT_EQ(d.norm_eps, c.norm_eps);
  EXPECT_EQ(d.tied, c.tied);
  EXPECT_EQ(d.init_std, c.init_std);
  EXPECT_EQ(transformer_text(d), text);
}

TEST(TransformerText, WhatIsWrongIsNamedWithItsLine) {
  EXPECT_EQ(refusal(""), "text: has no table [model]");
  EXPECT_EQ(refusal("dim = 4\n[models]\ndim = 8\n"), "text: has no table [model]; [models] is at line 2");
  EXPECT_EQ(refusal("\nmodel = 3\n"), "text:2: model is 3; expected a table, [model]");
  EXPECT_EQ(refusal("[model]\nhead = 4\n"), "text:2: [model] has no \"head\"; is heads or head_size meant?");
  EXPECT_EQ(refusal("[model]\nfoo = 4\n"), "text:2: [model] has no \"foo\"");
  EXPECT_EQ(refusal("[model]\n\nheads = '4'\n"), "text:3: heads is '4'; expected an integer");
  EXPECT_EQ(refusal("[model]\nheads = 4.0\n"), "text:2: heads is 4.0; expected an integer");
  EXPECT_EQ(refusal("[model]\nheads = [4]\n"), "text:2: heads is an array; expected an integer");
  EXPECT_EQ(refusal("[model.heads]\n"), "text:1: heads is a table; expected an integer");
  EXPECT_EQ(refusal("[model]\nheads = 0\n"), "text:2: heads is 0; expected 1 or more");
  EXPECT_EQ(refusal("[model]\nhead_size = -2\n"), "text:2: head_size is -2; expected 0 or more");
  EXPECT_EQ(refusal("[model]\ntied = 1\n"), "text:2: tied is 1; expected true or false");
  EXPECT_EQ(refusal("[model]\nrope_theta = true\n"), "text:2: rope_theta is true; expected a number");
  EXPECT_EQ(refusal("[model]\nrope_theta = 0\n"),
            "text:2: rope_theta is 0; expected a finite number above 0");
  EXPECT_EQ(refusal("[model]\ninit_std = inf\n"),
            "text:2: init_std is inf; expected a finite number of 0 or more");
  EXPECT_EQ(refusal("[model]\nnorm_eps = -1.5\n"),
            "text:2: norm_eps is -1.5; expected a finite number of 0 or more");
  EXPECT_EQ(refusal("[model]\nlayers = 2\nheads = 3\n"),
            "text:3: transformer: dim 256 does not divide into heads 3")
      << "of the line that says it";
  EXPECT_EQ(refusal("[model]\nheads = 2\ndim = 4\nkv_heads = 3\n"),
            "text:2: transformer: heads 2 do not divide into kv_heads 3");
  EXPECT_EQ(refusal("[model]\ndim = 4\ndim = 5\n").substr(0, 17), "text:3: not TOML:");
  EXPECT_EQ(refusal("[model\n").substr(0, 17), "text:1: not TOML:");
  const Error e = test::error_of([] { transformer_from_text("[model]\nhead = 4\n", "run.toml"); });
  EXPECT_EQ(std::string(e.what()).rfind("run.toml:2: ", 0), 0u) << e.what();
}

TEST(TransformerConfig, NumbersThatNoModelHasAreRefused) {
  const auto refused = [](const auto& change) {
    TransformerConfig c;
    change(c);
    return std::string(test::error_of([&] { c.check(); }).what());
  };
  EXPECT_EQ(refused([](TransformerConfig& c) { c.rope_theta = -1; }),
            "transformer: rope_theta is -1; expected a finite number above 0");
  EXPECT_EQ(refused([](TransformerConfig& c) { c.norm_eps = -0.5; }),
            "transformer: norm_eps is -0.5; expected a finite number of 0 or more");
  EXPECT_EQ(refused([](TransformerConfig& c) { c.init_std = -0.5; }),
            "transformer: init_std is -0.5; expected a finite number of 0 or more");
}

}  // namespace
}  // namespace weft::transformer_text_test
