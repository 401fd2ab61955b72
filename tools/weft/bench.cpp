// weft bench: the flags; see bench/.
#include <CLI/CLI.hpp>
#include <memory>

#include "commands.hpp"
#include "run_bench.hpp"

namespace weft::tools {

void add_bench(CLI::App& app, Body& chosen) {
  auto o = std::make_shared<bench::Options>();
  CLI::App* c = app.add_subcommand("bench", "How fast this is here, beside its peers, in one run");
  c->add_option("operation", o->op, bench::known_ops());
  c->add_flag("--list", o->list,
              "Say what can be measured here: operations, peers and where their programs are");
  c->add_flag("--c", o->c, "facade: what a call of weft.h costs above ProcessGroup's");
  c->add_option("--against", o->against, "Peers: openmpi, mpich, intelmpi, gloo, torch, deepspeed")
      ->delimiter(',');
  c->add_option("--ranks", o->ranks, "How many ranks")->capture_default_str();
  c->add_option("--ranks-as", o->ranks_as, "processes or threads (ours alone)")->capture_default_str();
  c->add_option("--dtype", o->dtypes, "f32, bf16, f64, i32, …; several: beside each other; layers: f8, too")
      ->transform([](const std::string& dtype) { return dtype == "f8" ? "f8e4m3" : dtype; })
      ->delimiter(',')
      ->capture_default_str();
  c->add_option("--bytes", o->sizes, "Sizes: 8, 32K, 8M; default: 8 bytes to 128 MB in steps of four")
      ->delimiter(',');
  c->add_option("--memory", o->memory,
                "Of ours: shared, foreign, single_copy, staged; default: shared,foreign")
      ->delimiter(',');
  c->add_option("--backend", o->backends, "Of ours: shm, gloo, mpi-openmpi, mpi-mpich or a plug-in's name")
      ->delimiter(',');
  c->add_option("--place", o->place, "in or out; default: in for all_reduce, broadcast and reduce");
  c->add_option("--buffers", o->buffers, "hot: the same every time; rotating: others every time")
      ->capture_default_str();
  c->add_option("--layers", o->layers,
                "layers: linear2, mlp, attention, conv, head; default: all but linear2")
      ->delimiter(',');
  c->add_option("--tokens", o->tokens, "layers: how many; default: 8,128,512,2048")->delimiter(',');
  c->add_option("--maps", o->maps,
                "domain: convolutions, channels x rows of each rank x columns; default: 8x16x16,32x64x128,"
                "64x32x64,16x256x256")
      ->delimiter(',');
  c->add_option("--dispatch", o->dispatches,
                "experts: tokens of each rank x width, such as 128x7168; default: 128x7168,2048x1024")
      ->delimiter(',');
  c->add_option("--expert-layers", o->expert_layers,
                "experts: a layer with these tokens of each rank; default: 512")
      ->delimiter(',');
  c->add_option("--sequences", o->sequences, "domain: attention, positions of all ranks; default: 1024,4096")
      ->delimiter(',');
  c->add_option("--passes", o->passes, "layers and domain: forward, both; default: each")->delimiter(',');
  c->add_option("--tp", o->tp, "layers: over how many ranks, beside one; default: 2")->delimiter(',');
  c->add_option("--cases", o->cases, "data: reduce/one, reduce/buckets, step/ddp, …; default: all")
      ->delimiter(',');
  c->add_option("--rounds", o->rounds, "How often every size is measured; the better median counts")
      ->capture_default_str();
  c->add_option("--seconds", o->seconds, "Of sampling for each size, program and round")
      ->capture_default_str();
  c->add_option("--limit", o->limit, "Seconds after which a program is said not to finish")
      ->capture_default_str();
  c->add_option("--json", o->json, "Write all results to this file");
  c->add_option("--plot", o->plot, "Draw the curves into this SVG file");
  c->add_flag("--markdown", o->markdown, "Tables as Markdown");
  c->add_option("--programs", o->programs,
                "Folder of the benchmark programs; default: where weft is installed");
  c->add_option("--python", o->python, "The python that has torch")->capture_default_str();
  c->add_option("--intel-mpi", o->intel_mpi,
                "Folder of Intel MPI; default: the one the benchmark was built with");
  c->footer([o] { return bench::about(o->op); });
  c->callback([o, &chosen] { chosen = [o] { return bench::run_bench(*o); }; });
}

}  // namespace weft::tools
