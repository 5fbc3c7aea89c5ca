// Completion of asynchronous kernels.
#pragma once

#include "adapter.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {

// Hands `operation`, and with it the memory it works on, to the core; `done` is called when it is complete. No
// thread of TensorFlow waits.
//
// This is a C++ kernel and not one of TensorFlow's C API, whose asynchronous kernels get a pointer to a callback
// that lives only as long as the compute call.
void start(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
           TensorOperation operation);

}  // namespace smd::tf_ops
