#include "tensor_parallel/chunks.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "completion.h"
#include "device.h"
#include "operations.h"

namespace smd::torch_ext {
namespace {

// The number of steps that have begun.
std::atomic<std::uint64_t> steps = 0;

// A measured call: its number of chunks, and the events before and after it.
struct Measured {
  std::uint32_t chunks;
  c10::Event begin;
  c10::Event end;
};

// A trial, with the measured calls whose times have not been read.
struct Trial {
  rust::Box<ChunkTrial> choice = new_chunk_trial();
  std::vector<Measured> measured;
};

Trial& trial_of(const ProductKey& key) {
  static std::mutex mutex;
  static auto* trials = new std::map<ProductKey, std::unique_ptr<Trial>>;
  const std::lock_guard lock(mutex);
  auto& found = (*trials)[key];
  if (found == nullptr) found = std::make_unique<Trial>();
  return *found;
}

// Sums the ranks' times, so that all of them choose the same number.
void choose(Trial& trial, std::int64_t group) {
  for (auto& each : trial.measured) {
    each.end.synchronize();
    trial.choice->add(each.chunks, static_cast<float>(each.begin.elapsedTime(each.end) / 1e3));
  }
  trial.measured.clear();
  auto sums = trial.choice->medians();
  const auto tensor = at::from_blob(sums.data(), {static_cast<std::int64_t>(sums.size())}, at::kFloat);
  run(all_reduce_(tensor, "sum", group));
  trial.choice->choose({sums.data(), sums.size()});
}

}  // namespace

void begin_step_of_products() { ++steps; }

void run_in_chunks(const ProductKey& key, c10::Device device, std::int64_t group,
                   const std::function<void(std::uint32_t)>& product) {
  if (at::globalContext().deterministicAlgorithms()) return product(1);
  const auto stream = current_stream(device);
  auto& trial = trial_of(key);
  // Events of a captured stream have no times, and the host must not wait.
  if (is_capturing(static_cast<std::uint16_t>(device.index()), handle_of(stream))) {
    return product(trial.choice->chosen());
  }
  auto turn = trial.choice->turn(steps);
  if (turn.chunks == 0) {
    choose(trial, group);
    turn = trial.choice->turn(steps);
  }
  if (!turn.is_measured) return product(turn.chunks);
  const auto timed = c10::EventFlag::BACKEND_DEFAULT;
  Measured measured{turn.chunks, c10::Event(device.type(), timed), c10::Event(device.type(), timed)};
  measured.begin.record(stream);
  product(turn.chunks);
  measured.end.record(stream);
  trial.measured.push_back(std::move(measured));
}

}  // namespace smd::torch_ext
