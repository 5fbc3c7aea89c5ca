// Handles of the c10d backend's operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "adapter.h"

namespace smd::torch_ext {

// One c10d operation: one or several of the core's. Complete when the last of them is; the first error is its own.
class GroupWork final : public c10d::Work {
 public:
  // `title` names it in profiles. `outputs` is what its future holds.
  GroupWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
            const std::vector<at::Tensor>& outputs);

  // Runs the operations here, or hands them to the core. Several collectives are a batch. Called once.
  void run(const std::vector<TensorOperation>& operations);
  void start(std::vector<TensorOperation> operations);

  // False if a signal ended it: Python raises what the signal's handler raised as soon as this thread is back in it.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  class CallCompletion;

  void call_done(const std::string& error, std::int64_t source) noexcept;

  // Aliases, which Python does not know: the last to let go of one may be a thread of the core.
  std::vector<at::Tensor> outputs_;
  const char* title_;
  // What follows is guarded by mutex_, as the base class's state is.
  std::size_t pending_calls_ = 0;  // 0 before the start, too.
  bool done_ = false;
  std::exception_ptr error_;
  std::int64_t source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace smd::torch_ext
