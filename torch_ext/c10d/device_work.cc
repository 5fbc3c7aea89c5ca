#include "c10d/device_work.h"

#include <ATen/core/ivalue.h>

#include <thread>
#include <utility>

#include "smd/exposed_time.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

// The interval at which a waiting host polls the device.
constexpr std::chrono::microseconds kLookEvery(200);

}  // namespace

DeviceWork::DeviceWork(int rank, c10d::OpType type, const char* title, std::int64_t group,
                       const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, inputs), group_(group), title_(title), outputs_(std::move(outputs)) {}

void DeviceWork::run(const std::vector<TensorOperation>& operations) {
  checked([&] { queue(operations); });
  for (const auto& operation : operations) operation.finish();
  finish();
}

void DeviceWork::start(std::vector<TensorOperation> operations) {
  checked([&] { pending_.emplace(std::move(operations)); });
  // For the profiler: the host's work ends when the operations are queued.
  finish();
}

bool DeviceWork::isCompleted() {
  {
    const std::lock_guard lock(mutex_);
    if (!pending_ || pending_->is_done()) return completed_;
  }
  return exception() != nullptr;
}

bool DeviceWork::isSuccess() const { return exception() == nullptr; }

std::exception_ptr DeviceWork::exception() const {
  try {
    check();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  const ExposedTime exposed;
  synchronize();
  if (timeout == kNoTimeout) return true;
  const auto start = std::chrono::steady_clock::now();
  while (!isCompleted()) {
    checked([this] { check_interrupt(title_); });
    if (std::chrono::steady_clock::now() - start >= timeout) {
      throw_report("the wait for `" + std::string(title_) + "` ended after " + std::to_string(timeout.count()) +
                   " ms, while the operation continues; its own time limit will say which ranks are missing" +
                   " [smd:timeout]");
    }
    std::this_thread::sleep_for(kLookEvery);
  }
  check();
  return true;
}

void DeviceWork::synchronize() {
  check();
  const std::lock_guard lock(mutex_);
  if (pending_) pending_->wait();
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::getFuture() {
  const std::lock_guard lock(mutex_);
  if (!future_) {
    std::vector<c10::Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    // The future records an event in the current stream.
    std::optional<StreamScope> scope;
    if (pending_) scope.emplace(pending_->stream());
    future_->markCompleted(c10::IValue(outputs_));
  }
  return future_;
}

void DeviceWork::check() const {
  checked([this] { check_device(static_cast<std::uint64_t>(group_), title_); });
}

}  // namespace smd::torch_ext
