// weft check: its flags and reports, and whether it finds mistakes that are made on purpose.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/command_output.hpp"
#include "support/temporary_folder.hpp"

namespace weft::test::check_test {
namespace {

using testing::AnyOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

using Outcome = test::CommandOutput;

Outcome run(const std::string& command) {
  return test::output_of(fmt::format("{} 2>&1 </dev/null", command));
}
Outcome check(const std::string& flags) {
  return run(fmt::format("timeout 100 {} check --progress none {}", WEFT_COMMAND, flags));
}
Outcome mutant(const std::string& name, const std::string& flags) {
  return run(
      fmt::format("WEFT_MUTANT={} timeout 100 {} check --progress none {}", name, WEFT_CHECK_MUTANTS, flags));
}

TEST(Check, WrongFlagsAreNamed) {
  const auto wrong = [](const std::string& flags, const std::string& text) {
    const Outcome o = check(flags);
    EXPECT_EQ(o.status, 2) << flags << ": " << o.text;
    EXPECT_THAT(o.text, HasSubstr(text));
  };
  wrong("--programs 0", "--programs");
  wrong("--ranks 9", "--ranks");
  wrong("--backend tin",
        "check: backend \"tin\" is not one to check; expected shm, gloo, mpi-openmpi, mpi-mpich or a plug-in "
        "in "
        "WEFT_BACKEND_PATH that moves host memory: backend \"tin\" was not found");
  wrong("--backend nccl", "check: backend \"nccl\" is not one to check; expected shm, ");
  wrong("--backend auto", "check: backend \"auto\" is not one to check; expected shm, ");
  wrong("--kinds kill,flood", "check: --kinds: there is no fault \"flood\"; expected some of ");
  wrong("--faults --ranks 1", "check: --ranks is 1; faults need 2 or more, so that somebody notices");
  wrong("--steps dance",
        "check: --steps: there is no kind of step \"dance\"; expected some of call, window, ");
  wrong("--points nowhere",
        "check: --points: there is no point of a call \"nowhere\"; expected some of before_post, ");
  wrong("--program /nowhere", "/nowhere");
  const TemporaryFolder folder;
  const std::string file = folder.path() / "program";
  std::ofstream(file) << "{}";
  wrong("--program " + file, "check: not a program: ");
}

// In a program of one rank no other rank would report a fault, so none is drawn.
TEST(Check, OneRankHasNoFaults) {
  const Outcome o = check("--faults --ranks 1,2 --programs 40");
  EXPECT_EQ(o.status, 0) << o.text;
  EXPECT_THAT(o.text, HasSubstr("40 programs in "));
}

TEST(Check, AProgramFollowsFromSeedAndNumber) {
  const auto steps = [](const std::string& flags) {
    const std::string text = check("--show --faults " + flags).text;
    return text.substr(0, text.find("\nfault  "));
  };
  EXPECT_EQ(steps("--seed 5 --only 3"), steps("--seed 5 --only 3"));
  EXPECT_NE(steps("--seed 5 --only 3"), steps("--seed 5 --only 7"));
  EXPECT_NE(steps("--seed 5 --only 3"), steps("--seed 6 --only 3"));
  EXPECT_THAT(steps("--seed 5 --only 3"), AllOf(HasSubstr("group 0: world"), HasSubstr("step  0: group")));
  // One of many is the same as one alone.
  EXPECT_THAT(steps("--seed 5 --programs 5"), HasSubstr(steps("--seed 5 --only 3")));
}

TEST(Check, SumsUpAsJson) {
  const TemporaryFolder folder;
  const std::string file = folder.path() / "summary.json";
  const Outcome o = check("--seed 2 --programs 6 --json " + file);
  EXPECT_EQ(o.status, 0) << o.text;
  EXPECT_THAT(o.text, HasSubstr("6 programs in "));
  const nlohmann::json j = nlohmann::json::parse(std::ifstream(file));
  EXPECT_EQ(j.at("programs"), 6);
  EXPECT_EQ(j.at("seed"), 2);
  EXPECT_EQ(j.at("backend"), "shm");
  EXPECT_EQ(j.at("outcomes").at("none").at("right bits"), 6);
  EXPECT_TRUE(j.at("failures").empty());
}

// Before the programs run.
TEST(Check, ASummaryThatCannotBeWrittenIsAnError) {
  const Outcome nowhere = check("--programs 2 --json /nowhere/summary.json");
  EXPECT_EQ(nowhere.status, 1) << nowhere.text;
  EXPECT_THAT(nowhere.text, HasSubstr("check: --json: cannot create /nowhere/summary.json.tmp."));
  EXPECT_THAT(nowhere.text, HasSubstr(": No such file or directory"));
  const Outcome full = check("--programs 1 --json /dev/full");
  EXPECT_EQ(full.status, 2) << full.text;
  EXPECT_THAT(full.text,
              HasSubstr("check: --json: cannot write /dev/full: it is a character device; expected a regular "
                        "file or nothing"));
}

// A failing program is reported, made smaller, and can be run again, both ways.
TEST(Check, AFailureIsMadeSmall) {
  const TemporaryFolder folder;
  const std::string there = fmt::format("cd {} && ", folder.path().string());
  const auto fails = [&](const std::string& flags) {
    return run(fmt::format("{}WEFT_MUTANT=avg_undivided timeout 100 {} check --progress none {}", there,
                           WEFT_CHECK_MUTANTS, flags));
  };
  const Outcome o = fails("--steps call --seed 3 --programs 60");
  EXPECT_EQ(o.status, 1) << o.text;
  const std::size_t small = o.text.find("made smaller: ");
  ASSERT_NE(small, std::string::npos) << o.text;
  EXPECT_THAT(o.text.substr(0, small),
              AllOf(HasSubstr("FAILED: program "), HasSubstr("; expected "),
                    HasSubstr("replay: weft check --backend shm --steps call --seed 3 --only ")));
  EXPECT_THAT(o.text.substr(small),
              AllOf(HasSubstr("step  0: "), HasSubstr(" avg"), Not(HasSubstr("step  1: ")),
                    HasSubstr("replay: weft check --backend shm --steps call --program weft-check-3-")));
  const std::size_t at = o.text.find("weft-check-3-");
  const std::string file = o.text.substr(at, o.text.find('\n', at) - at);
  EXPECT_EQ(fails("--program " + file).status, 1);
  EXPECT_EQ(run(fmt::format("{}{} check --progress none --program {}", there, WEFT_COMMAND, file)).status, 0);
}

#if WEFT_CHECK_HAS_OPENMPI
// mpirun does not wait for what it ends, so that it outlives mpirun by some milliseconds.
TEST(Check, WhoOutlivesTheJobForLongIsNamed) {
  const TemporaryFolder folder;
  const auto beside = [&](const char* seconds) {  // mpirun starts one process more
    std::ofstream(folder.path() / "mpirun.openmpi")
        << "#!/bin/sh\nsleep " << seconds << " &\nPATH=${PATH#*:} exec mpirun.openmpi \"$@\"\n";
    return run(
        fmt::format("chmod +x {0}/mpirun.openmpi; PATH={0}:$PATH timeout 100 {1} check --progress none "
                    "--backend mpi-openmpi --ranks 2 --programs 1 --no-shrink",
                    folder.path().string(), WEFT_COMMAND));
  };
  const Outcome shortly = beside("0.2");
  EXPECT_EQ(shortly.status, 0) << shortly.text;
  const Outcome for_long = beside("50");
  EXPECT_EQ(for_long.status, 1) << for_long.text;
  EXPECT_THAT(for_long.text, ContainsRegex("the job left: process [0-9]+ \\(state S\\)"));
}
#endif

struct Mutant {
  const char *name, *flags;
  const char* complaint;  // a part of what is said of it
};
void PrintTo(const Mutant& m, std::ostream* os) { *os << m.name; }

class Mutants : public testing::TestWithParam<Mutant> {};

// Each mistake is found within so many programs; without the mistake, nothing is found with the same flags.
TEST_P(Mutants, AreFound) {
  const std::string flags = std::string("--no-shrink --seed 1 ") + GetParam().flags;
  const Outcome o = mutant(GetParam().name, flags);
  EXPECT_EQ(o.status, 1) << o.text;
  EXPECT_THAT(o.text, HasSubstr(GetParam().complaint));
}
INSTANTIATE_TEST_SUITE_P(
    Check, Mutants,
    testing::Values(
        Mutant{"lost_abort", "--faults --programs 150 --patience 3", "FAILED: program"},
        Mutant{"avg_undivided", "--programs 50", "; expected "},
        Mutant{"swapped_root", "--programs 50", "FAILED: program"},
        Mutant{"slot_early", "--programs 300 --patience 2", "FAILED: program"},
        Mutant{"stage_early", "--programs 300 --patience 2", "FAILED: program"},
        Mutant{"skipped_quiesce", "--kinds stop_resume --points in_chunk --programs 60",
               "was written after quiesce() had returned true"},
        Mutant{"moved_in_use", "--kinds stop_resume --points in_chunk --programs 60 --ranks 3,4",
               "whose memory is in the same block: "},
        Mutant{"asking_drives_one_group", "--programs 40 --ranks 6,8 --patience 2",
               "not finished within 2 s"},
        Mutant{"ignored_offsets", "--programs 50", "FAILED: program"},
        Mutant{"wrong_blame", "--kinds stop,late --programs 30", "the error "},
        Mutant{"slow_deadline", "--kinds late,stop --programs 30 --deadline 0.4", " s; at most "},
        Mutant{"watch_reset_by_traffic",
               "--steps call --kinds stop,late --ranks 3 --programs 120 --deadline 0.4", "FAILED: program"},
        Mutant{"suspension_counts", "--kinds suspend --points before_post --programs 30",
               "it failed though nothing was wrong"},
        Mutant{"unheard_roll_call",
               "--kinds stop,late --ranks 5 --points before_post --programs 100 --deadline 0.4",
               "which waited itself"},
        Mutant{"last_cause",
               "--kinds kill,exit,stop,descriptors,memory --points in_creation --programs 60 --deadline 0.4",
               "the error does not "},
        Mutant{"unchecked_count", "--kinds wrong_count --programs 50 --patience 2", "FAILED: program"},
        Mutant{"unseen_death", "--kinds kill --programs 20 --patience 2",
               "timeout where peer_lost was to be expected"},
        Mutant{"any_tag", "--programs 300 --patience 2", "FAILED: program"},
        Mutant{"leaked_descriptor", "--programs 20", "descriptors open after its Context is gone"},
        // Windows, and memory that moves under them: of another group here.
        Mutant{"exchanges_hold_nothing",
               "--steps window --kinds stop,stop_resume --points in_chunk --programs 60 --ranks 3,4,5",
               "whose memory is in the same block: window"},
        Mutant{"interrupt_ends_done", "--steps window --kinds interrupt --programs 100",
               "it failed though nothing was wrong"},
        // Arguments that must be the same on all ranks.
        Mutant{"overlapping_calls", "--steps overlap --programs 10", "were not refused"},
        Mutant{"silent_leave", "--kinds wrong_root,skip --programs 100 --patience 2", "FAILED: program"},
        Mutant{"left_out_unseen", "--kinds skip --programs 200 --patience 2",
               "no rank's log has a warning of skip"},
        Mutant{"silent_drop", "--kinds drop --programs 40", "no rank's log has a warning of drop"},
        Mutant{"latest_of_each_rank", "--kinds disagree --programs 60",
               "ranks have loaded steps from 1 to 2"},
        Mutant{"layouts_unseen", "--kinds disagree --programs 100 --patience 2", "FAILED: program"},
        Mutant{"meshes_unseen", "--kinds disagree --programs 100 --patience 2", "FAILED: program"},
        Mutant{"norms_unseen", "--kinds disagree --programs 100 --patience 2", "FAILED: program"},
        Mutant{"save_arguments_unseen", "--kinds disagree --programs 60", "FAILED: program"},
        // Gradients, and those of windows.
        Mutant{"adjoint_first_box", "--steps window --programs 30", "adjoint of a window, field "},
        Mutant{"bucket_early", "--steps gradients --programs 60", ": gradients in buckets: round "},
        Mutant{"buckets_unseen", "--steps gradients --kinds disagree --programs 100 --patience 2",
               "FAILED: program"},
        Mutant{"reduced_in_part", "--steps gradients --programs 60", ": gradients at once: round "},
        Mutant{"first_packed", "--steps gradients --programs 30", ": sharded parameters: round "},
        // Two builds in one job cause an error, or, if nothing compares them, wrong results.
        Mutant{"mixed_builds", "--programs 10", "runs weft "},
        Mutant{"mixed_builds_unseen", "--programs 100 --patience 2", "FAILED: program"},
        Mutant{"composed_own_block", "--backend composed-messages --steps call --programs 50", "; expected "},
        Mutant{"composed_order", "--backend composed-messages --programs 100", "; expected "}),
    [](const auto& m) { return std::string(m.param.name); });

// The same, but it takes many programs.
INSTANTIATE_TEST_SUITE_P(Slow, Mutants,
                         testing::Values(Mutant{
                             "exchanges_wait_unseen",
                             "--steps window --kinds stop,late --points before_post --programs 100 --ranks 4",
                             "which waited itself"}),
                         [](const auto& m) { return std::string(m.param.name); });

TEST(Mutants, NoneIsNotFound) {
  for (const char* flags :
       {"--faults --programs 60 --seed 1", "--kinds disagree --programs 30 --seed 1",
        "--kinds wrong_root,skip,drop --programs 60 --seed 1",
        "--steps window,gradients --kinds kill,stop,leave,skip,wrong_order,disagree --programs 40 --seed 1",
        "--steps window --kinds stop,stop_resume --points in_chunk --programs 20 --ranks 3,4 --seed 1",
        "--backend composed-messages --programs 60 --seed 1",
        "--backend composed-some --programs 60 --seed 1"}) {
    const Outcome o = mutant("none", flags);
    EXPECT_EQ(o.status, 0) << o.text;
  }
}

// A store that lost its memory order gives right bits here; the thread sanitizer sees it.
TEST(Mutants, LostMemoryOrderIsSeenByTheThreadSanitizer) {
#if defined(__SANITIZE_THREAD__)
  const std::string flags = "--no-shrink --no-processes --ranks 2,3 --seed 1 --programs 30 --jobs 1";
  const Outcome none = mutant("none", flags);
  EXPECT_EQ(none.status, 0) << none.text;
  const Outcome lost = mutant("lost_order", flags);
  EXPECT_EQ(lost.status, 1) << lost.text;
  EXPECT_THAT(lost.text, HasSubstr("WARNING: ThreadSanitizer: data race"));
#else
  GTEST_SKIP() << "not built with the thread sanitizer";
#endif
}

}  // namespace
}  // namespace weft::test::check_test
