// Handles of the c10d backend's operations on CUDA tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "device.h"

namespace smd::torch_ext {

// As torch expects of a backend for CUDA: `wait` makes the current stream wait and returns, and the future is complete
// as soon as the operations are queued, with events that say when its tensors are. Complete or successful is what the
// device has done.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, const char* title, std::int64_t group, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs);

  // Queues the operations into the current stream, or into the group's communication stream. Called once.
  void run(const std::vector<TensorOperation>& operations);
  void start(std::vector<TensorOperation> operations);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // With a time limit: the host waits, too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Throws what ended the group's operations on devices.
  void check() const;

  const std::int64_t group_;
  const char* title_;
  std::vector<at::Tensor> outputs_;
  // What follows is guarded by mutex_.
  std::optional<PendingWork> pending_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace smd::torch_ext
