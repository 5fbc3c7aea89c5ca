#include "c10d/group_work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>

#include "completion.h"
#include "smd/exposed_time.h"
#include "smd/status.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

// The interval at which a wait looks for signals. A signal whose handler raises an exception, as Ctrl-C does, ends the
// wait but not the operation.
constexpr std::chrono::milliseconds kSignalsEvery(50);
// How long a callback thread without work stays.
constexpr std::chrono::seconds kIdleTime(10);

// Threads that run the callbacks of futures. A callback may run Python and may wait for the group's next operation, so
// it must not run on the group's worker thread. It may also wait for another callback, so each running callback has a
// thread of its own.
class Callbacks {
 public:
  // Never destroyed, because threads may still use it while the process ends.
  static Callbacks& instance() {
    static auto* callbacks = new Callbacks;
    return *callbacks;
  }

  void post(std::function<void()> callback) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(callback));
    if (queue_.size() > idle_) {
      std::thread([this] { work(); }).detach();
    } else {
      posted_.notify_one();
    }
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (queue_.empty()) {
        ++idle_;
        const bool more = posted_.wait_for(lock, kIdleTime, [this] { return !queue_.empty(); });
        --idle_;
        if (!more) return;
      }
      auto callback = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> queue_;
  std::size_t idle_ = 0;
};

std::vector<at::Tensor> aliases(const std::vector<at::Tensor>& tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  // `at::alias` does not support sparse tensors.
  for (const auto& tensor : tensors) result.push_back(tensor.layout() == at::kStrided ? at::alias(tensor) : tensor);
  return result;
}

// The value of an operation's future. For an all-gather it is one tensor with an additional leading dimension, as with
// NCCL; PyTorch's communication hooks rely on that.
c10::IValue value_of(c10d::OpType type, const std::vector<at::Tensor>& outputs) {
  const auto like_first = [&](const at::Tensor& output) {
    return output.layout() == at::kStrided && output.sizes() == outputs.front().sizes();
  };
  if (type != c10d::OpType::ALLGATHER || outputs.empty() || !std::all_of(outputs.begin(), outputs.end(), like_first)) {
    return outputs;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return std::vector<at::Tensor>{at::stack(outputs)};
}

// Completes a future with the value of an operation, or with the error if there is no memory for that value.
void complete_future(c10::ivalue::Future& future, c10d::OpType type, const std::vector<at::Tensor>& outputs) {
  c10::IValue value;
  try {
    value = value_of(type, outputs);
  } catch (...) {
    return future.setErrorIfNeeded(std::current_exception());
  }
  future.markCompleted(std::move(value));
}

bool is_message(const TensorOperation& operation) {
  const auto collective = operation.core.collective;
  return collective == Collective::Send || collective == Collective::Recv || collective == Collective::RecvAny;
}

std::vector<Call> calls_of(const std::vector<TensorOperation>& operations) {
  std::vector<Call> calls;
  calls.reserve(operations.size());
  for (const auto& operation : operations) calls.push_back(operation.core.call());
  return calls;
}

std::string copy_back(const std::vector<TensorOperation>& operations) noexcept {
  for (const auto& operation : operations) {
    auto error = torch_ext::copy_back(operation);
    if (!error.empty()) return error;
  }
  return {};
}

std::exception_ptr exception_of(const std::string& report) {
  try {
    throw_report(report);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

class GroupWork::CallCompletion final : public Completion {
 public:
  CallCompletion(c10::intrusive_ptr<GroupWork> work, std::vector<TensorOperation> operations)
      : work_(std::move(work)), operations_(std::move(operations)) {}

  void done(rust::Str error, std::int64_t source) noexcept override {
    std::string text(error.data(), error.size());
    if (text.empty()) text = copy_back(operations_);
    work_->call_done(text, source);
  }

 private:
  c10::intrusive_ptr<GroupWork> work_;
  std::vector<TensorOperation> operations_;
};

GroupWork::GroupWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                     const std::vector<at::Tensor>& outputs)
    : c10d::Work(rank, type, title, inputs), outputs_(aliases(outputs)), title_(title) {}

void GroupWork::run(const std::vector<TensorOperation>& operations) {
  pending_calls_ = 1;
  std::string error;
  try {
    if (operations.size() == 1) {
      operations[0].core.run();
    } else if (!operations.empty()) {
      const auto calls = calls_of(operations);
      run_batch({calls.data(), calls.size()});
    }
    error = copy_back(operations);
  } catch (const rust::Error& failure) {
    error = failure.what();
    if (report_code(error) == "interrupted") raise_on_return();
  }
  call_done(error, -1);
}

void GroupWork::start(std::vector<TensorOperation> operations) {
  // Messages are not ordered with collectives, so they may be submitted before the batch.
  const auto messages = std::stable_partition(operations.begin(), operations.end(), is_message);
  std::vector<std::vector<TensorOperation>> parts;
  for (auto message = operations.begin(); message != messages; ++message) {
    parts.emplace_back().push_back(std::move(*message));
  }
  if (messages != operations.end()) {
    parts.emplace_back(std::make_move_iterator(messages), std::make_move_iterator(operations.end()));
  }
  // Counts one more than there are, so that the work is not complete before all are submitted.
  pending_calls_ = parts.size() + 1;
  for (auto& part : parts) {
    // The core reads the descriptions after the vector has moved into the completion; moving a vector keeps its
    // elements in place.
    const auto calls = calls_of(part);
    auto done = std::make_unique<CallCompletion>(c10::intrusive_ptr<GroupWork>::reclaim_copy(this), std::move(part));
    try {
      if (calls.size() == 1) {
        submit(calls[0], std::move(done));
      } else {
        submit_batch({calls.data(), calls.size()}, std::move(done));
      }
    } catch (const rust::Error& failure) {
      call_done(failure.what(), -1);
    }
  }
  call_done({}, -1);
}

void GroupWork::call_done(const std::string& error, std::int64_t source) noexcept {
  std::exception_ptr failure;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (!error.empty() && !error_) error_ = exception_of(error);
    if (source >= 0) source_ = source;
    if (--pending_calls_ > 0) return;
    // From here on, `getFuture` completes a new future itself.
    done_ = true;
    future = future_;
    failure = error_;
  }
  finish(failure);
  if (!future) return;
  Callbacks::instance().post([future = std::move(future), failure, type = opType_, outputs = outputs_] {
    if (failure) {
      future->setErrorIfNeeded(failure);
    } else {
      complete_future(*future, type, outputs);
    }
  });
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  const ExposedTime exposed;
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  TORCH_CHECK(pending_calls_ > 0 || done_, "`", title_,
              "`: `wait` was called before the coalesced operations that contain it were ended",
              " (was an error raised inside of `_coalescing_manager`?)");
  while (!cv_.wait_for(lock, kSignalsEvery, [this] { return completed_; })) {
    // Without the mutex, because looking for signals may take Python's lock.
    lock.unlock();
    try {
      check_interrupt(title_);
    } catch (const rust::Error& error) {
      if (!raise_on_return()) throw_report(error.what());
      return false;
    }
    if (timeout != kNoTimeout && std::chrono::steady_clock::now() - start >= timeout) {
      throw_report("the wait for `" + std::string(title_) + "` ended after " + std::to_string(timeout.count()) +
                   " ms, while the operation continues; its own time limit will say which ranks are missing" +
                   " [smd:timeout]");
    }
    lock.lock();
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

int GroupWork::sourceRank() const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(source_ >= 0, "`", title_, "` has no source rank: it is not a receive, or not complete");
  return static_cast<int>(source_);
}

std::vector<at::Tensor> GroupWork::result() { return outputs_; }

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future = future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    // If the work is not done, the thread that completes it also completes this future.
    if (!done_) return future;
  }
  if (error_) {
    future->setErrorIfNeeded(error_);
  } else {
    complete_future(*future, opType_, outputs_);
  }
  return future;
}

}  // namespace smd::torch_ext
