// Handles of the c10d backend's operations on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "adapter.h"

namespace smd::torch_ext {

// One c10d operation, which consists of one or several of the core's. It completes with the last of them, and its error
// is the first of theirs.
class GroupWork final : public c10d::Work {
 public:
  // `title` is the name in profiles. `outputs` are the values of the future.
  GroupWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
            const std::vector<at::Tensor>& outputs);

  // Runs the operations on this thread (`run`) or submits them to the core (`start`). Several collectives become one
  // batch. Call one of them, once.
  void run(const std::vector<TensorOperation>& operations);
  void start(std::vector<TensorOperation> operations);

  // Returns false if a signal ended the wait. Python then raises what the signal's handler raised, as soon as this
  // thread is back in Python.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  class CallCompletion;

  void call_done(const std::string& error, std::int64_t source) noexcept;

  // Aliases that Python does not know, because a thread of the core may release the last reference and must not take
  // Python's lock.
  std::vector<at::Tensor> outputs_;
  const char* title_;
  // Members below are guarded by mutex_, as the base class's state is.
  std::size_t pending_calls_ = 0;  // 0 before the start, too.
  bool done_ = false;
  std::exception_ptr error_;
  std::int64_t source_ = -1;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace smd::torch_ext
