// Communication hooks: functions of the user that reduce a bucket instead of the core.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <vector>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// The argument of a hook. It has the interface of torch's GradBucket, which only torch itself can create for Python.
class GradBucket : public torch::CustomClassHolder {
 public:
  struct Slot {
    at::Tensor parameter;
    // The start in the buffer, in elements.
    int64_t start;
    // The strides of the gradient. They differ from the parameter's where the parameter's memory has gaps.
    std::vector<int64_t> strides;
  };

  GradBucket(int64_t index, bool is_last, at::Tensor buffer, std::vector<Slot> slots)
      : index_(index), is_last_(is_last), buffer_(std::move(buffer)), slots_(std::move(slots)) {}

  int64_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  // All gradients of the bucket as one flat tensor.
  at::Tensor buffer() const { return buffer_; }
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  // Views of the buffer, one for each parameter.
  std::vector<at::Tensor> gradients() const;
  std::vector<at::Tensor> parameters() const;

 private:
  const int64_t index_;
  const bool is_last_;
  at::Tensor buffer_;
  const std::vector<Slot> slots_;
};

// Calls the Python function that was registered as `hook`. Communication that the function starts may still run when
// this returns.
void start_comm_hook(int64_t hook, const c10::intrusive_ptr<GradBucket>& bucket);
// Waits for the future that the hook returned, and returns the reduced bucket.
at::Tensor await_comm_hook(int64_t hook, int64_t bucket);

}  // namespace smd::torch_ext
