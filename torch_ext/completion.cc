#include "completion.h"

#include <chrono>
#include <exception>
#include <memory>
#include <utility>

#include "smd/exposed_time.h"
#include "status.h"

namespace smd::torch_ext {

// The interval at which a wait looks for signals. Ctrl-C ends the wait but not the operation.
constexpr std::chrono::milliseconds kLookForSignals(50);

Work::Work(TensorOperation operation) : group_(operation.core.group) {
  std::vector<TensorOperation> operations;
  operations.push_back(std::move(operation));
  pending_ = std::make_unique<PendingWork>(std::move(operations));
}

void Work::wait() {
  const ExposedTime exposed;
  if (pending_) {
    checked([this] { check_device(group_, "wait for an asynchronous operation"); });
    const std::lock_guard lock(mutex_);
    return pending_->wait();
  }
  std::unique_lock lock(mutex_);
  while (!completed_.wait_for(lock, kLookForSignals, [this] { return done_; })) {
    // Without the mutex, because looking for signals may take Python's lock.
    lock.unlock();
    checked([] { check_interrupt("wait for an asynchronous operation"); });
    lock.lock();
  }
  if (!error_.empty()) throw_report(error_);
}

bool Work::is_completed() {
  if (pending_ && !pending_->is_done()) {
    checked([this] { check_device(group_, "an asynchronous operation"); });
    return false;
  }
  if (pending_) return true;
  const std::lock_guard lock(mutex_);
  return done_;
}

void Work::complete(std::string error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    error_ = std::move(error);
  }
  completed_.notify_all();
}

namespace {

class WorkCompletion final : public Completion {
 public:
  WorkCompletion(c10::intrusive_ptr<Work> work, TensorOperation operation)
      : work_(std::move(work)), operation_(std::move(operation)) {}

  void done(rust::Str error, std::int64_t) noexcept override {
    std::string text(error.data(), error.size());
    if (text.empty()) text = copy_back(operation_);
    work_->complete(std::move(text));
  }

 private:
  c10::intrusive_ptr<Work> work_;
  TensorOperation operation_;
};

}  // namespace

std::string copy_back(const TensorOperation& operation) noexcept {
  try {
    operation.finish();
    return {};
  } catch (const std::exception& failure) {
    return std::string("the result could not be copied to its tensor: ") + failure.what() + " [smd:internal]";
  }
}

void run(const TensorOperation& operation) {
  operation.core.run();
  operation.finish();
}

c10::intrusive_ptr<Work> start(TensorOperation operation) {
  if (operation.device()) return c10::make_intrusive<Work>(std::move(operation));
  auto work = c10::make_intrusive<Work>();
  // `submit` reads the description after the operation has moved into the completion.
  const Operation core = operation.core;
  core.submit(std::make_unique<WorkCompletion>(work, std::move(operation)));
  return work;
}

}  // namespace smd::torch_ext
