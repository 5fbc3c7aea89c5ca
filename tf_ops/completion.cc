#include "completion.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "status.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace smd::tf_ops {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class KernelCompletion : public Completion {
 public:
  KernelCompletion(OpKernelContext* context, AsyncOpKernel::DoneCallback done, std::vector<TensorOperation> operations)
      : context_(context), done_(std::move(done)), operations_(std::move(operations)) {}

  void done(rust::Str error, std::int64_t) noexcept override {
    if (!error.empty()) context_->CtxFailure(to_status({error.data(), error.size()}));
    operations_.clear();
    finish(context_, std::move(done_));
  }

 protected:
  OpKernelContext* context() const { return context_; }
  TensorOperation& operation() { return operations_.front(); }

 private:
  OpKernelContext* context_;
  AsyncOpKernel::DoneCallback done_;
  std::vector<TensorOperation> operations_;
};

class RowsCompletion final : public KernelCompletion {
 public:
  RowsCompletion(OpKernelContext* context, AsyncOpKernel::DoneCallback done, std::vector<TensorOperation> operations,
                 TensorShape like)
      : KernelCompletion(context, std::move(done), std::move(operations)), shape_(std::move(like)) {}

  void make_outputs(rust::Slice<const std::size_t> rows, rust::Vec<TensorView>& outputs) override {
    Tensor* counts = nullptr;
    check(context()->allocate_output(1, TensorShape({static_cast<std::int64_t>(rows.size())}), &counts));
    std::int64_t total = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      counts->vec<std::int64_t>()(static_cast<std::int64_t>(i)) = static_cast<std::int64_t>(rows[i]);
      total += static_cast<std::int64_t>(rows[i]);
    }
    check(shape_.SetDimWithStatus(0, total));
    Tensor* output = nullptr;
    check(context()->allocate_output(0, shape_, &output));
    operation().write_rows(*output, {rows.begin(), rows.end()});
    for (const TensorView& view : operation().core.outputs) outputs.push_back(view);
  }

 private:
  static void check(const absl::Status& status) {
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

  TensorShape shape_;
};

// Submits the operation that a completion owns.
template <class Submit>
void submit(OpKernelContext* context, const AsyncOpKernel::DoneCallback& done, std::uint64_t group, Submit&& submit) {
  const absl::Status status = checked(submit);
  if (!status.ok()) refuse(context, done, static_cast<std::int64_t>(group), status);
}

}  // namespace

void finish(OpKernelContext* context, AsyncOpKernel::DoneCallback done) {
  // `done` may destroy the context.
  if (context->run_all_kernels_inline()) {
    // `done` would run the next kernels on this thread, which belongs to the group and must run its next operation.
    context->device()->tensorflow_cpu_worker_threads()->workers->Schedule(std::move(done));
  } else {
    done();
  }
}

void start(OpKernelContext* context, AsyncOpKernel::DoneCallback done, TensorOperation operation) {
  // `submit` reads the description after the operation has moved into the completion.
  const Operation core = operation.core;
  std::vector<TensorOperation> operations;
  operations.push_back(std::move(operation));
  auto completion = std::make_unique<KernelCompletion>(context, done, std::move(operations));
  submit(context, done, core.group, [&] { core.submit(std::move(completion)); });
}

void start_batch(OpKernelContext* context, AsyncOpKernel::DoneCallback done, std::vector<TensorOperation> operations) {
  std::vector<Operation> cores;
  cores.reserve(operations.size());
  for (const auto& operation : operations) cores.push_back(operation.core);
  std::vector<Call> calls;
  calls.reserve(cores.size());
  for (const auto& core : cores) calls.push_back(core.call());
  auto completion = std::make_unique<KernelCompletion>(context, done, std::move(operations));
  submit(context, done, cores.front().group,
         [&] { submit_batch({calls.data(), calls.size()}, std::move(completion)); });
}

void start_rows(OpKernelContext* context, AsyncOpKernel::DoneCallback done, TensorOperation operation,
                const TensorShape& like) {
  const Operation core = operation.core;
  std::vector<TensorOperation> operations;
  operations.push_back(std::move(operation));
  auto completion = std::make_unique<RowsCompletion>(context, done, std::move(operations), like);
  submit(context, done, core.group, [&] { core.submit(std::move(completion)); });
}

void start_named(OpKernelContext* context, AsyncOpKernel::DoneCallback done, TensorOperation operation,
                 const std::string& name, const TensorShape& shape, bool blocking) {
  const Operation core = operation.core;
  const auto sizes = shape.dim_sizes();
  const std::vector<std::uint64_t> dimensions(sizes.begin(), sizes.end());
  std::vector<TensorOperation> operations;
  operations.push_back(std::move(operation));
  auto completion = std::make_unique<KernelCompletion>(context, done, std::move(operations));
  const auto status = checked([&] { core.submit_named(name, dimensions, blocking, std::move(completion)); });
  OP_REQUIRES_OK_ASYNC(context, status, done);
}

void refuse(OpKernelContext* context, const AsyncOpKernel::DoneCallback& done, std::int64_t group,
            const absl::Status& status) {
  std::string text(status.message());
  text.resize(std::min(text.size(), text.rfind(" [smd:")));
  // Without a session there is no group, and no other member waits; the error is ignored.
  (void)checked([&] { fail_next(static_cast<std::uint64_t>(group), text); });
  context->CtxFailure(status);
  done();
}

}  // namespace smd::tf_ops
