// Point-to-point messages between two members.
//
// A send is two operations. SmdSend starts the message and returns a handle; SmdSent waits for its end. Between the
// two, a graph can run longer operations without delaying the message.

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "adapter.h"
#include "completion.h"
#include "pipeline/held.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The state of a message that was sent: under way, or ended with a status.
class SentMessage {
 public:
  static constexpr char kTypeName[] = "smd::SentMessage";

  using Listener = std::function<void(const absl::Status&)>;

  void end(const absl::Status& status) {
    std::vector<Listener> listeners;
    {
      absl::MutexLock lock(&mutex_);
      ended_ = true;
      status_ = status;
      listeners.swap(listeners_);
    }
    for (const auto& each : listeners) each(status);
  }

  // Calls `listener` once: when the message ends, or now if it has ended.
  void when_ended(Listener listener) {
    {
      absl::MutexLock lock(&mutex_);
      if (!ended_) {
        listeners_.push_back(std::move(listener));
        return;
      }
    }
    listener(status_);
  }

 private:
  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  // Does not change after the message has ended.
  absl::Status status_;
  std::vector<Listener> listeners_ ABSL_GUARDED_BY(mutex_);
};

// Namespaces that TensorFlow's macros refer to.
namespace variant_op_registry_fn_registration = tensorflow::variant_op_registry_fn_registration;
using tensorflow::TypeIndex;
using Message = Held<SentMessage>;
SMD_REGISTER_HELD(SentMessage);

class SendCompletion final : public Completion {
 public:
  SendCompletion(std::shared_ptr<SentMessage> message, TensorOperation operation)
      : message_(std::move(message)), operation_(std::move(operation)) {}

  void done(rust::Str error, std::int64_t) noexcept override {
    operation_.release();
    message_->end(error.empty() ? absl::OkStatus() : to_status({error.data(), error.size()}));
  }

 private:
  std::shared_ptr<SentMessage> message_;
  TensorOperation operation_;
};

// The peer and the tag of a message.
class Address {
 public:
  explicit Address(OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
    OP_REQUIRES_OK(construction, construction->GetAttr("peer", &peer_));
    std::int64_t tag = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("tag", &tag));
    OP_REQUIRES(
        construction, tag >= 0 && tag <= std::numeric_limits<std::uint32_t>::max(),
        to_status(absl::StrCat("`", construction->def().name(), "`: ", tag, " is not a tag [smd:invalid_argument]")));
    tag_ = static_cast<std::uint32_t>(tag);
  }

  std::int64_t group() const { return group_; }

  TensorOperation message(OpKernelContext* context, Collective collective) const {
    TensorOperation message(collective, group_, place_of(context));
    message.core.peer = peer_;
    message.core.tag = tag_;
    return message;
  }

 private:
  std::int64_t group_ = 0;
  std::int64_t peer_ = 0;
  std::uint32_t tag_ = 0;
};

class SendKernel final : public OpKernel {
 public:
  explicit SendKernel(OpKernelConstruction* construction) : OpKernel(construction), address_(construction) {}

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    auto message = std::make_shared<SentMessage>();
    output->scalar<tensorflow::Variant>()() = Message{message};
    const Tensor& input = context->input(0);
    // An empty tensor is not sent: the receiver knows from the shape that nothing comes.
    if (input.NumElements() == 0) return message->end(absl::OkStatus());
    TensorOperation call = address_.message(context, Collective::Send);
    call.read(input);
    const Operation core = call.core;
    auto completion = std::make_unique<SendCompletion>(std::move(message), std::move(call));
    OP_REQUIRES_OK(context, checked([&] { core.submit(std::move(completion)); }));
  }

 private:
  Address address_;
};

class SentKernel final : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto wait = std::make_shared<PendingMessages>(context, std::move(done));
    for (int i = 0; i < context->num_inputs(); ++i) {
      const auto* message = context->input(i).scalar<tensorflow::Variant>()().get<Message>();
      if (message == nullptr) {
        wait->end_message(
            to_status(absl::StrCat("`", name(), "`: input ", i, " is not a message [smd:invalid_argument]")));
      } else {
        message->value->when_ended([wait](const absl::Status& status) { wait->end_message(status); });
      }
    }
  }

 private:
  // Completes the kernel in its destructor, after the last message has ended.
  class PendingMessages {
   public:
    PendingMessages(OpKernelContext* context, DoneCallback done) : context_(context), done_(std::move(done)) {}
    PendingMessages(const PendingMessages&) = delete;
    PendingMessages& operator=(const PendingMessages&) = delete;

    ~PendingMessages() {
      if (!status_.ok()) context_->CtxFailure(status_);
      finish(context_, std::move(done_));
    }

    // Records the end of one message. Several threads may call it at the same time.
    void end_message(const absl::Status& status) {
      absl::MutexLock lock(&mutex_);
      status_.Update(status);
    }

   private:
    OpKernelContext* context_;
    DoneCallback done_;
    absl::Mutex mutex_;
    absl::Status status_;
  };
};

class RecvKernel final : public AsyncOpKernel {
 public:
  explicit RecvKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction), address_(construction) {}

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    TensorShape shape;
    Tensor* output = nullptr;
    const auto sizes = context->input(0).flat<std::int32_t>();
    const absl::Span<const std::int32_t> span(sizes.data(), static_cast<std::size_t>(sizes.size()));
    auto status = tensorflow::TensorShapeUtils::MakeShape(span, &shape);
    if (status.ok()) status = context->allocate_output(0, shape, &output);
    if (!status.ok()) return refuse(context, done, address_.group(), status);
    if (shape.num_elements() == 0) return done();
    TensorOperation call = address_.message(context, Collective::Recv);
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }

 private:
  Address address_;
};

REGISTER_KERNEL_BUILDER(Name("SmdSend").Device(tensorflow::DEVICE_CPU), SendKernel);
REGISTER_KERNEL_BUILDER(Name("SmdSend").Device(tensorflow::DEVICE_GPU).HostMemory("message"), SendKernel);
REGISTER_KERNEL_BUILDER(Name("SmdSent").Device(tensorflow::DEVICE_CPU), SentKernel);
REGISTER_KERNEL_BUILDER(Name("SmdRecv").Device(tensorflow::DEVICE_CPU), RecvKernel);
REGISTER_KERNEL_BUILDER(Name("SmdRecv").Device(tensorflow::DEVICE_GPU).HostMemory("shape"), RecvKernel);

}  // namespace
}  // namespace smd::tf_ops
