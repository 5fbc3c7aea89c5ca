// Reports the beginning, the end and a failure of a pipeline step to the core, which decides what follows
// (`smd_core::session::step_scope`).

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pipeline/held.h"
#include "smd/src/bridge.rs.h"
#include "status.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {
namespace {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::OpKernel;
using tensorflow::OpKernelContext;

// A step that TensorFlow runs. TensorFlow cancels the step if one of its operations fails.
class StepRun {
 public:
  static constexpr char kTypeName[] = "smd::StepRun";

  StepRun(rust::Box<StepScope> scope, CancellationManager* cancellation)
      : scope_(std::move(scope)), cancellation_(cancellation) {}

  static void watch(const std::shared_ptr<StepRun>& run) {
    if (run->cancellation_ == nullptr) return;
    run->token_ = run->cancellation_->get_cancellation_token();
    const auto failed = [run] { run->scope_->fail(); };
    if (!run->cancellation_->RegisterCallback(run->token_, failed)) failed();
  }

  // Ends the scope. Called while the step runs.
  void end() const {
    scope_->end();
    // `DeregisterCallback` would wait for the callback, in which this may run.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
  }

 private:
  rust::Box<StepScope> scope_;
  CancellationManager* cancellation_;
  CancellationToken token_ = CancellationManager::kInvalidToken;
};

// Namespaces that TensorFlow's macros refer to.
namespace variant_op_registry_fn_registration = tensorflow::variant_op_registry_fn_registration;
using tensorflow::TypeIndex;
SMD_REGISTER_HELD(StepRun);

class BeginStepKernel final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, tensorflow::TensorShape({}), &output));
    std::shared_ptr<StepRun> run;
    OP_REQUIRES_OK(context,
                   checked([&] { run = std::make_shared<StepRun>(begin_step(), context->cancellation_manager()); }));
    StepRun::watch(run);
    output->scalar<tensorflow::Variant>()() = Held<StepRun>{std::move(run)};
  }
};

class EndStepKernel final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const auto* held = context->input(0).scalar<tensorflow::Variant>()().get<Held<StepRun>>();
    OP_REQUIRES(context, held != nullptr,
                to_status(absl::StrCat("`", name(), "`: the input is not a step [smd:invalid_argument]")));
    held->value->end();
  }
};

REGISTER_KERNEL_BUILDER(Name("SmdBeginStep").Device(tensorflow::DEVICE_CPU), BeginStepKernel);
REGISTER_KERNEL_BUILDER(Name("SmdEndStep").Device(tensorflow::DEVICE_CPU), EndStepKernel);

}  // namespace
}  // namespace smd::tf_ops
