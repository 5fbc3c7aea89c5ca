// Measures the phases of a step for DistributedDataParallel's logging data.
#pragma once

#include <ATen/core/Dict.h>

#include <cstdint>
#include <string>

namespace smd::torch_ext {

// All times are in nanoseconds of the monotonic clock, which the core uses, too.
class StepTimes {
 public:
  // Samples the first ten steps and then every `rate`-th step.
  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }

  void forward_started(int64_t at) { current_.forward_start = at; }
  void backward_started();
  void gradient_made();
  // Whether the current step is sampled.
  bool is_sampled() const;
  // Notes that all buckets are reduced. `start` and `end` are the times of the communication; they count if the step is
  // sampled.
  void reduced(int64_t start, int64_t end);

  // The last sampled step and averages over all sampled steps, under torch's names.
  c10::Dict<std::string, int64_t> sampled() const;

 private:
  struct Step {
    int64_t forward_start = 0;
    int64_t backward_start = 0;
    int64_t backward_end = 0;
    int64_t communication_start = 0;
    int64_t communication_end = 0;
  };
  struct Durations {
    int64_t forward = 0;
    int64_t backward = 0;
    int64_t communication = 0;
    int64_t overlap = 0;
  };

  static Durations durations(const Step& step);

  int64_t sample_rate_ = 100;
  // Members below describe the current step.
  int64_t iteration_ = 0;
  Step current_;
  int64_t last_iteration_ = 0;
  Step last_;
  int64_t samples_ = 0;
  Durations sums_;
};

}  // namespace smd::torch_ext
