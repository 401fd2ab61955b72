#include "agreement/row.hpp"

#include <gtest/gtest.h>

namespace weft::agreement {
namespace {

std::vector<std::string> pieces(const std::string& text) {
  const std::string between = "…";
  std::vector<std::string> all;
  for (std::size_t at = 0;;) {
    const std::size_t end = text.find(between, at);
    all.push_back(text.substr(at, end - at));
    if (end == std::string::npos) return all;
    at = end + between.size();
  }
}

}  // namespace

std::vector<WithoutRow> without_row() {
  return {
      {"ProcessGroup::split", "", "color and key are each rank's own"},
      {"ProcessGroup::split_by_host", "", "ranks find out themselves which are on one host"},
      {"ProcessGroup::duplicate", "", "it takes no argument"},
      {"ProcessGroup::shrink", "", "`limit` is each rank's own; the ranks agree on who is left"},
      {"distribute", "the whole", "no communication; `check_replicas()` compares"},
      {"enter", "axes", "makes a boundary, whose passes call `redistribute()`"},
      {"leave", "axes", "makes a boundary, whose passes call `redistribute()`"},
      {"gather", "axes, dimension", "makes a boundary, whose passes call `redistribute()`"},
      {"scatter", "axes, dimension", "makes a boundary, whose passes call `redistribute()`"},
      {"AsyncCheckpoint", "", "makes a group of the mesh's ranks; save() compares"},
      {"latest_checkpoint", "", "reads a file on this rank alone"},
      {"start_save", "as `AsyncCheckpoint::save`", "calls it"},
      {"Trainer::save", "as `save_checkpoint`", "calls it"},
      {"Trainer::load", "as `load_checkpoint`", "calls it"},
      {"Trainer::load_newest", "the checkpoint",
       "rank 0 says which, and all load it as `load_checkpoint` does"},
      {"init_from", "as `load_checkpoint`", "calls it"},
      {"start_save_stages", "as `AsyncCheckpoint::save`", "calls it"},
      {"init_stages_from", "as `load_checkpoint`", "calls it"},
      {"expert_balance", "none", "each rank has the reports of its own stages"},
      {"pipeline_grad_norm", "", "ranks of several stages have different gradients"},
      {"TokenRoutes::start_dispatch", "choices of experts",
       "the counts of rows between two ranks are compared by their exchange"},
      {"TokenRoutes::start_combine", "as `TokenRoutes::start_dispatch`", "it makes the same exchange"},
      {"Trainer::evaluate", "as `Trainer::backward`", "it makes the same exchange"},
      {"FullySharded::finish", "", "it takes no argument; blocks compare as `ShardedParameters` does"},
      {"FullyShardOptions", "options of `fully_shard()`",
       "the blocks are compared, as `ShardedParameters` does; options that change neither blocks nor dtypes "
       "are each rank's own"},
      {"default_mp_policy", "", "gives a value"},
      {"sync_domain_gradients", "as `reduce_gradients`", "calls it"},
      {"vocab_part", "", "arithmetic"},
      {"BatchNorm", "its options, and the layout of x",
       "the sums are compared with the call: their count, dtype and reduction"},
      {"GroupNorm", "its groups, and the layout of x",
       "the sums are compared with the call: their count, dtype and reduction"},
      {"SpectralNorm", "its options",
       "the sums are compared with the call: their count, dtype and reduction"},
      {"initialise", "seed",
       "no communication; `GradientReducer::finish()`, `apply_ddp()` and `fully_shard()` compare the values "
       "that are replicated; the first passes of `fully_shard()` and the first step of a Trainer compare the "
       "seeds of parts of one parameter"},
      {"build_parallel_model", "options", "no communication; values are compared as for `initialise()`"},
      {"apply_ac", "policy",
       "no communication; ranks that run other modules again make other calls, which are compared"},
      {"ActivationProfile", "", "calls the passes of the model"},
      {"Float8Linears::update_scales", "", "`apply_float8()` and `Trainer::step()` compare the options"},
      {"Float8Linears::expect_finite", "", "`apply_float8()` and `Trainer::step()` compare the options"},
      {"BucketReducer", "parameters",
       "it sees gradients only; where the program makes it itself, `check_replicas()` compares the "
       "parameters"},
      {"Sampler", "population, batch and seed",
       "arithmetic, and no exchange follows that is a sampler's; `Trainer::step()` compares the batches of "
       "the "
       "tensor axis. `extra` of `save_checkpoint()` is compared: a program may save them there"},
      {"Ema", "options",
       "no communication, and a rank may keep averages alone; `Trainer::step()` compares those of a Trainer"},
      {"Frame", "seed, step, micro-batch", "no communication; `Trainer::step()` compares those of a Trainer"},
  };
}

void expect_told(const Rows& rows) {
  for (const Row& row : rows) {
    SCOPED_TRACE(row.function + ": " + row.value);
    test::run_ranks(test::Ranks::threads, row.ranks, [&](test::Rank& r) {
      const std::string told = test::error_text([&] { row.run(r); });
      EXPECT_TRUE(told.starts_with(std::string(name(row.code)) + ": ")) << "rank " << r.rank << ": " << told;
      for (const std::string& piece : pieces(row.text))
        EXPECT_NE(told.find(piece), std::string::npos)
            << "rank " << r.rank << ": \"" << told << "\" has no \"" << piece << "\"";
    });
  }
}

}  // namespace weft::agreement
