// Completes asynchronous kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "adapter.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {

// Submits `operation` to the core, which keeps the tensors alive. `done` is called when the operation is complete; no
// thread of TensorFlow waits.
//
// If the step fails or is cancelled before that, the kernel's context stays until `done`. The operation is not
// withdrawn, because the other members take part in it. It ends as every operation does: with theirs, when a rank
// departs, at the timeout, or with the session.
//
// The kernel is written in C++ and not against TensorFlow's C API, where an asynchronous kernel gets a pointer to a
// callback that is valid only during the compute call.
void start(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
           TensorOperation operation);

// As `start`, for several collectives of one group that run as one batch.
void start_batch(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                 std::vector<TensorOperation> operations);

// As `start`, for operations on rows. Output 0 has the shape of `like` except for the number of rows, which the other
// members determine. Output 1 is the number of rows from each member.
void start_rows(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                TensorOperation operation, const tensorflow::TensorShape& like);

// Fails an operation of `group` that this member cannot describe. The kernel fails with `status`; the other members'
// next operation fails instead of waiting for this one.
void refuse(tensorflow::OpKernelContext* context, const tensorflow::AsyncOpKernel::DoneCallback& done,
            std::int64_t group, const absl::Status& status);

// Calls `done` for a kernel whose context has its outputs and status. Called in the core's `Completion::done`.
void finish(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done);

// As `start`, for an operation that all ranks submit under one name, in any order. `shape` is the tensor's shape, which
// ranks compare.
void start_named(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                 TensorOperation operation, const std::string& name, const tensorflow::TensorShape& shape,
                 bool blocking);

}  // namespace smd::tf_ops
