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
  // Starts an operation on CUDA tensors.
  explicit Work(TensorOperation operation);

  // Waits until the operation is complete and throws its error, on every call. Takes no Python lock. For CUDA tensors,
  // the current stream waits instead of the host.
  //
  // There is no timeout here, because the core ends every operation at its own timeout at the latest.
  void wait();
  bool is_completed();

  // Ends the operation with `error`, which is empty on success.
  void complete(std::string error) noexcept;

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  bool done_ = false;
  std::string error_;
  std::uint64_t group_ = 0;
  std::unique_ptr<PendingWork> pending_;
};

// Copies results back after the core has completed an operation. Returns the report of an error, or an empty text.
std::string copy_back(const TensorOperation& operation) noexcept;

// Runs `operation` on this thread; for CUDA tensors, queues it into the current stream.
void run(const TensorOperation& operation);

// Submits `operation` to the core, together with the memory that it works on.
c10::intrusive_ptr<Work> start(TensorOperation operation);

}  // namespace smd::torch_ext
