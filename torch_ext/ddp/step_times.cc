#include "ddp/step_times.h"

#include <algorithm>
#include <chrono>

namespace smd::torch_ext {
namespace {

constexpr int64_t kFirstSteps = 10;

int64_t now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

bool StepTimes::is_sampled() const { return iteration_ < kFirstSteps || iteration_ % sample_rate_ == 0; }

void StepTimes::backward_started() {
  if (is_sampled()) current_.backward_start = now();
}

void StepTimes::gradient_made() {
  if (is_sampled()) current_.backward_end = now();
}

void StepTimes::reduced(int64_t start, int64_t end) {
  if (is_sampled()) {
    current_.communication_start = start;
    current_.communication_end = end;
    last_ = current_;
    last_iteration_ = iteration_;
    const auto lasted = durations(last_);
    sums_.forward += lasted.forward;
    sums_.backward += lasted.backward;
    sums_.communication += lasted.communication;
    sums_.overlap += lasted.overlap;
    ++samples_;
  }
  ++iteration_;
}

StepTimes::Durations StepTimes::durations(const Step& step) {
  Durations lasted;
  lasted.forward = step.backward_start - step.forward_start;
  lasted.backward = step.backward_end - step.backward_start;
  lasted.communication = step.communication_end - step.communication_start;
  lasted.overlap = std::max<int64_t>(0, std::min(step.backward_end, step.communication_end) - step.communication_start);
  return lasted;
}

c10::Dict<std::string, int64_t> StepTimes::sampled() const {
  const auto lasted = durations(last_);
  const auto samples = std::max<int64_t>(samples_, 1);
  c10::Dict<std::string, int64_t> times;
  times.insert("iteration", last_iteration_);
  times.insert("forward_compute_time_start", last_.forward_start);
  times.insert("backward_compute_time_start", last_.backward_start);
  times.insert("backward_compute_time_end", last_.backward_end);
  times.insert("backward_comm_time_start", last_.communication_start);
  times.insert("backward_comm_time_end", last_.communication_end);
  times.insert("forward_compute_time", lasted.forward);
  times.insert("backward_compute_time", lasted.backward);
  times.insert("backward_comm_time", lasted.communication);
  times.insert("backward_compute_comm_overlap_time", lasted.overlap);
  times.insert("avg_forward_compute_time", sums_.forward / samples);
  times.insert("avg_backward_compute_time", sums_.backward / samples);
  times.insert("avg_backward_comm_time", sums_.communication / samples);
  times.insert("avg_backward_compute_comm_overlap_time", sums_.overlap / samples);
  return times;
}

}  // namespace smd::torch_ext
