// Handles of the c10d backend's operations on CUDA tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "device.h"

namespace smd::torch_ext {

// Follows torch's rules for a backend on CUDA. `wait` makes the current stream wait and returns at once. The future
// completes as soon as the operations are queued; its events complete when the tensors are ready. `isCompleted` and
// `isSuccess` report what the device has done.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, c10d::OpType type, const char* title, std::int64_t group, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs);

  // Queues the operations into the current stream (`run`) or into the group's communication stream (`start`). Call one
  // of them, once.
  void run(const std::vector<TensorOperation>& operations);
  void start(std::vector<TensorOperation> operations);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // With a timeout, the host waits, too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  // Throws the error that ended the group's operations on devices, if there is one.
  void check() const;

  const std::int64_t group_;
  const char* title_;
  std::vector<at::Tensor> outputs_;
  // Members below are guarded by mutex_.
  std::optional<PendingWork> pending_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace smd::torch_ext
