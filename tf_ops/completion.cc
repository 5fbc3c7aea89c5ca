#include "completion.h"

#include <memory>
#include <string_view>
#include <utility>

#include "status.h"

namespace smd::tf_ops {
namespace {

class KernelCompletion final : public Completion {
 public:
  KernelCompletion(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
                   TensorOperation operation)
      : context_(context), done_(std::move(done)), operation_(std::move(operation)) {}

  void done(rust::Str error, std::int64_t) noexcept override {
    if (!error.empty()) context_->CtxFailure(to_status({error.data(), error.size()}));
    // The context may be gone once the callback has been called.
    done_();
  }

 private:
  tensorflow::OpKernelContext* context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  TensorOperation operation_;
};

}  // namespace

void start(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
           TensorOperation operation) {
  // `submit` reads the description while the completion already owns the operation.
  const Operation core = operation.core;
  auto completion = std::make_unique<KernelCompletion>(context, done, std::move(operation));
  const auto status = checked([&] { core.submit(std::move(completion)); });
  OP_REQUIRES_OK_ASYNC(context, status, done);
}

}  // namespace smd::tf_ops
