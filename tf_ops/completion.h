// Completion of asynchronous kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "adapter.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {

// Hands `operation`, and with it the memory it works on, to the core; `done` is called when it is complete. No
// thread of TensorFlow waits.
//
// A step that fails or is cancelled in the meantime keeps the context until `done`, and the operation is not withdrawn:
// the other members count on it. It ends as every operation does, with them, with a departure, at the time limit or
// with the session.
//
// This is a C++ kernel and not one of TensorFlow's C API, whose asynchronous kernels get a pointer to a callback
// that lives only as long as the compute call.
void start(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
           TensorOperation operation);

// As `start`, several collectives of one group as one.
void start_batch(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                 std::vector<TensorOperation> operations);

// As `start`, for operations on rows: output 0 has the shape of `like` but for the number of rows, which comes from
// the other members; output 1 is how many come from each.
void start_rows(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                TensorOperation operation, const tensorflow::TensorShape& like);

// For an operation of `group` that this member cannot even describe: it fails with `status`, and so does the other
// members' next one instead of waiting for this one.
void refuse(tensorflow::OpKernelContext* context, const tensorflow::AsyncOpKernel::DoneCallback& done,
            std::int64_t group, const absl::Status& status);

// Calls `done`, from the core's `Completion::done`, for a kernel whose context has its outputs and its status.
void finish(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done);

// As `start`, for an operation that every rank names alike and calls in any order; `shape` is its tensor's.
void start_named(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                 TensorOperation operation, const std::string& name, const tensorflow::TensorShape& shape,
                 bool blocking);

}  // namespace smd::tf_ops
