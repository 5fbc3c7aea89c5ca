// Handles of asynchronous operations.
#pragma once

#include <torch/custom_class.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "adapter.h"
#include "device.h"

namespace smd::torch_ext {

// An operation in flight. Dropping the handle does not cancel the operation.
class Work : public torch::CustomClassHolder {
 public:
  Work() = default;
  // An operation on CUDA tensors.
  explicit Work(TensorOperation operation);

  // Returns when the operation is complete; throws what it failed with, each time. Takes no Python lock. On CUDA
  // tensors, the current stream waits instead.
  //
  // There is no time limit here: the core ends every operation by itself, at its own deadline at the latest.
  void wait();
  bool is_completed();

  // Ends the operation; `error` is empty on success.
  void complete(std::string error) noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  bool done_ = false;
  std::string error_;
  std::uint64_t group_ = 0;
  std::unique_ptr<PendingWork> pending_;
};

// The last step of an operation that the core is done with; the report of an error, or nothing.
std::string copy_back(const TensorOperation& operation) noexcept;

// Runs `operation` on this thread; on CUDA tensors, in the current stream.
void run(const TensorOperation& operation);

// Hands `operation`, and with it the memory it works on, to the core.
c10::intrusive_ptr<Work> start(TensorOperation operation);

}  // namespace smd::torch_ext
