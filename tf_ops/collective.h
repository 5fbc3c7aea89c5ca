// The base class of the kernels of collectives.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "adapter.h"
#include "completion.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {

// Reads the attributes that all collectives have, and reports invalid calls.
class CollectiveKernel : public tensorflow::AsyncOpKernel {
 public:
  explicit CollectiveKernel(tensorflow::OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
    if (construction->HasAttr("op")) OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
    if (construction->HasAttr("root")) OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
  }

 protected:
  TensorOperation operation(tensorflow::OpKernelContext* context, Collective collective) const {
    TensorOperation operation(collective, group_, place_of(context));
    operation.core.op = op_;
    operation.core.peer = root_;
    return operation;
  }

  std::uint64_t group() const { return static_cast<std::uint64_t>(group_); }
  std::int64_t root() const { return root_; }

  // Fails an operation whose arguments are invalid, with a message that names the node.
  void refuse(tensorflow::OpKernelContext* context, const DoneCallback& done, const std::string& why) const {
    holds(context, done, to_status(absl::StrCat("`", name(), "`: ", why, " [smd:invalid_argument]")));
  }

  // Returns whether `status` is OK. If not, the operation fails with it, and the other members' next operation fails
  // too.
  bool holds(tensorflow::OpKernelContext* context, const DoneCallback& done, const absl::Status& status) const {
    if (!status.ok()) smd::tf_ops::refuse(context, done, group_, status);
    return status.ok();
  }

 private:
  std::string op_;
  std::int64_t root_ = 0;
  std::int64_t group_ = 0;
};

// Copies `from` to `to`, unless TensorFlow has forwarded the input's buffer to the output.
inline absl::Status copied(const tensorflow::Tensor& from, const tensorflow::Tensor& to, const Place& place) {
  if (from.data() == to.data()) return absl::OkStatus();
  return checked([&] { copy(describe(from, place), describe(to, place)); });
}

}  // namespace smd::tf_ops
