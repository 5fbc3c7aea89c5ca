// Communication hooks: functions of the user that reduce a bucket in the core's place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <vector>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// What a hook gets: the same as torch's GradBucket, which C++ outside of torch cannot make for Python.
class GradBucket : public torch::CustomClassHolder {
 public:
  struct Slot {
    at::Tensor parameter;
    // In elements of the buffer.
    int64_t start;
    // Of the gradient, which may differ from the parameter's where its memory has gaps.
    std::vector<int64_t> strides;
  };

  GradBucket(int64_t index, bool is_last, at::Tensor buffer, std::vector<Slot> slots)
      : index_(index), is_last_(is_last), buffer_(std::move(buffer)), slots_(std::move(slots)) {}

  int64_t index() const { return index_; }
  bool is_last() const { return is_last_; }
  // All gradients side by side, in one dimension.
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

// Calls the Python function that was registered as `hook`; what it started goes on when this returns.
void start_comm_hook(int64_t hook, const c10::intrusive_ptr<GradBucket>& bucket);
// What the hook made of the bucket, once it is there.
at::Tensor await_comm_hook(int64_t hook, int64_t bucket);

}  // namespace smd::torch_ext
