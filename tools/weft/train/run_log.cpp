#include "run_log.hpp"

#include <fmt/format.h>

#include <array>
#include <filesystem>
#include <functional>
#include <utility>

#include "base/files/regular_file.hpp"
#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

std::string header_of(const KindWords& words) {
  return fmt::format(
      "step,epoch,loss,grad_norm,lr,{}_per_s,seconds,memory_mib,peak_share,eval_loss,{}eval_{}\n", words.rate,
      words.perplexity ? "eval_perplexity," : "", words.counted);
}

// The lines of a file whose step is below `first`, and its head. A run that was killed had written lines of
// steps after its last checkpoint, perhaps with an incomplete last line: a resumed run repeats these steps.
std::string lines_before(const std::string& file, std::int64_t first, const std::string& subject,
                         const std::function<std::optional<std::int64_t>(const std::string&)>& step_of) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 30;
  std::error_code none;
  std::string kept;
  if (!std::filesystem::is_regular_file(file, none)) return kept;
  TextIn in(read_regular_file(file, fmt::format("{} \"{}\":", subject, file), kMostBytes));
  for (std::string line; std::getline(in, line) && !in.eof();) {  // at its end: a line that was not ended
    const auto step = step_of(line);
    if (step && *step < first) kept += line + "\n";
  }
  return kept;
}

std::optional<std::int64_t> step_of_json(const std::string& line) {
  const auto values = nlohmann::json::parse(line, nullptr, false);
  const auto step = values.is_object() ? values.find("step") : values.end();
  if (!values.is_object() || step == values.end() || !step->is_number_integer()) return std::nullopt;
  return step->get<std::int64_t>();
}
std::optional<std::int64_t> step_of_csv(const std::string& line) {
  return parse_integer<std::int64_t>(std::string_view(line).substr(0, line.find(',')));
}

}  // namespace

void RunLog::Files::check() const {
  if (!curves.empty() && !curves.ends_with(".svg") && !curves.ends_with(".png"))
    throw Error(ErrorCode::bad_argument,
                fmt::format("train: curves is \"{}\"; expected a name that ends in .svg or .png", curves));
}

RunLog::RunLog(const Files& files, std::int64_t first, bool resumed, KindWords words)
    : files_(files), words_(std::move(words)), training_{"training", {}}, held_out_{"held out", {}} {
  const auto begin = [](std::optional<NewFile>& file, const std::string& name, const char* subject,
                        const std::string& kept) {
    file.emplace(name, subject);
    file->write(kept);
    file->publish();
  };
  if (!files.metrics.empty()) {
    const std::string kept = resumed ? lines_before(files.metrics, first, "metrics", step_of_json) : "";
    keep_points(kept);
    begin(metrics_, files.metrics, "train: --metrics: ", kept);
  }
  if (!files.csv.empty())
    begin(csv_, files.csv, "train: --csv: ",
          header_of(words_) + (resumed ? lines_before(files.csv, first, "csv", step_of_csv) : ""));
  if (!files.tensorboard.empty()) events_.emplace(files.tensorboard, first, "train: --tensorboard: ");
  draw();  // so that a name that cannot be written ends the run at its start
}

// The points of curves that a resumed run goes on with, from its metrics.
void RunLog::keep_points(const std::string& lines) {
  TextIn in(lines);
  for (std::string line; std::getline(in, line);) {
    const auto values = nlohmann::json::parse(line);
    const auto add = [&](const char* key, Curve& to) {
      if (const auto at = values.find(key); at != values.end() && at->is_number())
        to.points.emplace_back(values.at("step").get<double>() + 1, at->get<double>());
    };
    add("loss", training_);
    add("eval_loss", held_out_);
  }
}

void RunLog::step(const StepValues& values, bool evaluation_follows) {
  waits_ = {values, std::nullopt};
  if (!evaluation_follows) write_waiting();
}

void RunLog::evaluated(const Trainer::Evaluation& evaluation) {
  if (!waits_) return;  // no step was taken
  waits_->evaluation = evaluation;
  write_waiting();
}

void RunLog::write_waiting() {
  if (!waits_) return;
  const Row row = *waits_;
  waits_.reset();
  const StepValues& v = row.values;
  const auto& e = row.evaluation;
  if (metrics_) {
    nlohmann::json line{{"step", v.step},       {"epoch", v.epoch},
                        {"loss", v.loss},       {"grad_norm", v.grad_norm},
                        {"lr", v.lr},           {words_.rate + "_per_s", v.units_per_s},
                        {"seconds", v.seconds}, {"memory_mib", v.memory_mib}};
    if (v.peak_share > 0) line["peak_share"] = v.peak_share;
    if (!v.imbalance.empty()) line["imbalance"] = v.imbalance, line["dropped"] = v.dropped;
    if (e) line["eval_loss"] = e->loss, line["eval_" + words_.counted] = e->tokens;
    if (e && words_.perplexity) line["eval_perplexity"] = e->perplexity;
    metrics_->write(line.dump() + "\n");
  }
  if (csv_) {
    const std::string perplexity = !words_.perplexity ? "" : e ? fmt::format("{},", e->perplexity) : ",";
    csv_->write(fmt::format("{},{},{},{},{},{},{},{},{},{}\n", v.step, v.epoch, v.loss, v.grad_norm, v.lr,
                            v.units_per_s, v.seconds, v.memory_mib,
                            v.peak_share > 0 ? fmt::format("{}", v.peak_share) : "",
                            e ? fmt::format("{},{}{}", e->loss, perplexity, e->tokens) : "," + perplexity));
  }
  if (events_) {
    const std::string speed = fmt::format("speed/{}_per_s", words_.rate);
    std::vector<EventFile::Scalar> scalars{
        {"train/loss", v.loss}, {"train/grad_norm", v.grad_norm},
        {"train/lr", v.lr},     {"train/epoch", static_cast<double>(v.epoch)},
        {speed, v.units_per_s}, {"speed/memory_mib", v.memory_mib}};
    if (v.peak_share > 0) scalars.emplace_back("speed/peak_share", v.peak_share);
    if (e) scalars.emplace_back("eval/loss", e->loss);
    if (e && words_.perplexity) scalars.emplace_back("eval/perplexity", e->perplexity);
    events_->write(v.step, scalars);
  }
  if (!files_.curves.empty()) {
    training_.points.emplace_back(static_cast<double>(v.step + 1), v.loss);
    if (e) held_out_.points.emplace_back(static_cast<double>(v.step + 1), e->loss);
  }
}

void RunLog::finish() {
  write_waiting();
  draw();
}

void RunLog::draw() const {
  if (files_.curves.empty()) return;
  std::vector<Curve> curves{training_};
  if (!held_out_.points.empty()) curves.push_back(held_out_);
  write_new_file(files_.curves, chart("loss", "steps", words_.loss, curves, files_.curves.ends_with(".png")),
                 "train: --curves: ");
}

}  // namespace weft::tools
