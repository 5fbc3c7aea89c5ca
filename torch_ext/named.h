// Collectives by name, which ranks submit in any order.
#pragma once

#include <torch/custom_class.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adapter.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// One or several collectives under one name, in flight. Dropping the handle does not cancel them.
class NamedWork : public torch::CustomClassHolder {
 public:
  // Waits until all are complete and throws their error, on every call. Takes no Python lock. For CUDA tensors, an
  // operation is complete when it is queued into the stream that was current at its submission.
  void wait();
  bool is_completed();
  // The tensors that were allocated for results, in the order of the operations that had no outputs. Call it after
  // success.
  std::vector<at::Tensor> results();
  // The result of a join: the rank that joined last.
  std::int64_t last();

  // Sets the core's handle, with which `wait` runs the negotiation on the waiting thread.
  void set_handle(rust::Box<NamedHandle> handle);
  // Ends the operation with `error`, which is empty on success.
  void complete(std::string error, std::vector<at::Tensor> results, std::int64_t last) noexcept;

 private:
  bool drive();

  std::mutex mutex_;
  std::condition_variable completed_;
  // Null once the operation is done.
  std::shared_ptr<rust::Box<NamedHandle>> handle_;
  bool done_ = false;
  std::string error_;
  std::vector<at::Tensor> results_;
  std::int64_t last_ = -1;
};

}  // namespace smd::torch_ext
