// Collectives by name: ranks submit them in any order.
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
  // Returns when they are complete; throws what they failed with, each time. Takes no Python lock. On CUDA tensors,
  // what is complete is queued into the stream that was current.
  void wait();
  bool is_completed();
  // Tensors that were made for the results, after success: of those that came without outputs.
  std::vector<at::Tensor> results();
  // Of a join: the rank that joined last.
  std::int64_t last();

  // Lets `wait` bring it on.
  void set_handle(rust::Box<NamedHandle> handle);
  // Ends the operation; `error` is empty on success.
  void complete(std::string error, std::vector<at::Tensor> results, std::int64_t last) noexcept;

 private:
  bool drive();

  std::mutex mutex_;
  std::condition_variable completed_;
  // Until it is done.
  std::shared_ptr<rust::Box<NamedHandle>> handle_;
  bool done_ = false;
  std::string error_;
  std::vector<at::Tensor> results_;
  std::int64_t last_ = -1;
};

}  // namespace smd::torch_ext
