// Messages between two members.
//
// A send is two operations, since a graph has to know when it began, which lets what is longer follow without delaying
// the message, and when it ended: SmdSend begins it and gives what SmdSent waits for.

#include <atomic>
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
#include "status.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/platform/env.h"

namespace smd::tf_ops {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// How a message that was sent fares.
class Delivery {
 public:
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

  // Calls `listener` once, now if the message has ended.
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
  // Changes no more once the message has ended.
  absl::Status status_;
  std::vector<Listener> listeners_ ABSL_GUARDED_BY(mutex_);
};

// A delivery as the element of a tensor.
struct Message {
  std::shared_ptr<Delivery> delivery;

  // For `Variant`, which asks for all of these: messages stay in their process.
  static std::string TypeName() { return "smd::Message"; }
  static std::string DebugString() { return "a message that was sent"; }
  static void Encode(tensorflow::VariantTensorData*) {}
  static bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// TensorFlow takes the elements of a variant to where its tensor is. A message stays here.
absl::Status stays(const Message& from, Message* to,
                   const tensorflow::UnaryVariantOpRegistry::AsyncTensorDeviceCopyFn&) {
  *to = from;
  return absl::OkStatus();
}

// What the macro names.
namespace variant_op_registry_fn_registration = tensorflow::variant_op_registry_fn_registration;
using tensorflow::TypeIndex;
using Direction = tensorflow::VariantDeviceCopyDirection;
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Message, Direction::HOST_TO_DEVICE, stays);
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Message, Direction::DEVICE_TO_HOST, stays);
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Message, Direction::DEVICE_TO_DEVICE, stays);

class DeliveryCompletion final : public Completion {
 public:
  DeliveryCompletion(std::shared_ptr<Delivery> delivery, TensorOperation operation)
      : delivery_(std::move(delivery)), operation_(std::move(operation)) {}

  void done(rust::Str error, std::int64_t) noexcept override {
    operation_.release();
    delivery_->end(error.empty() ? absl::OkStatus() : to_status({error.data(), error.size()}));
  }

 private:
  std::shared_ptr<Delivery> delivery_;
  TensorOperation operation_;
};

// How long an operation that waits for a message goes on when another one of its step has failed.
constexpr std::int64_t kPatienceMicros = 3'000'000;

// Around a wait for other members: if another operation of the step fails here, they wait for what it would have
// become, and this member for them, so that nobody would ever hear of it. Then this member gives up. It is left some
// time: the others may all have failed alike, or have nothing to do with it.
class Watch {
 public:
  explicit Watch(OpKernelContext* context)
      : state_(std::make_shared<State>()), cancellation_(context->cancellation_manager()) {
    if (cancellation_ == nullptr) return;
    token_ = cancellation_->get_cancellation_token();
    const auto watch = [state = state_] { later(state); };
    if (!cancellation_->RegisterCallback(token_, watch)) watch();
  }

  void end() const {
    state_->ended.store(true);
    // Not the call that waits: this may run inside the callback.
    if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
  }

 private:
  struct State {
    std::atomic<bool> ended{false};
  };

  static void later(const std::shared_ptr<State>& state) {
    tensorflow::Env::Default()->SchedClosureAfter(kPatienceMicros, [state] {
      if (state->ended.load()) return;
      (void)checked([] {
        give_up("an operation of its step failed",
                "an operation of this step failed, and the others wait for what comes of it");
      });
    });
  }

  std::shared_ptr<State> state_;
  tensorflow::CancellationManager* cancellation_;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
};

AsyncOpKernel::DoneCallback watched(OpKernelContext* context, AsyncOpKernel::DoneCallback done) {
  return [watch = Watch(context), done = std::move(done)] {
    watch.end();
    done();
  };
}

// Who it is to or from, and under which tag.
class Address {
 public:
  explicit Address(OpKernelConstruction* construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
    OP_REQUIRES_OK(construction, construction->GetAttr("peer", &peer_));
    std::int64_t tag = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("tag", &tag));
    OP_REQUIRES(
        construction, tag >= 0 && tag <= std::numeric_limits<std::uint32_t>::max(),
        to_status(absl::StrCat("`", construction->def().name(), "`: ", tag, " is no tag [smd:invalid_argument]")));
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
    auto delivery = std::make_shared<Delivery>();
    output->scalar<tensorflow::Variant>()() = Message{delivery};
    const Tensor& input = context->input(0);
    // The other member knows as much.
    if (input.NumElements() == 0) return delivery->end(absl::OkStatus());
    TensorOperation call = address_.message(context, Collective::Send);
    call.read(input);
    const Operation core = call.core;
    auto completion = std::make_unique<DeliveryCompletion>(std::move(delivery), std::move(call));
    OP_REQUIRES_OK(context, checked([&] { core.submit(std::move(completion)); }));
  }

 private:
  Address address_;
};

class SentKernel final : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const auto wait = std::make_shared<Wait>(context, watched(context, std::move(done)));
    for (int i = 0; i < context->num_inputs(); ++i) {
      const auto* message = context->input(i).scalar<tensorflow::Variant>()().get<Message>();
      if (message == nullptr) {
        wait->hear(to_status(absl::StrCat("`", name(), "`: input ", i, " is no message [smd:invalid_argument]")));
      } else {
        message->delivery->when_ended([wait](const absl::Status& status) { wait->hear(status); });
      }
    }
  }

 private:
  // Finishes the kernel when nobody refers to it any more: when all messages have ended.
  class Wait {
   public:
    Wait(OpKernelContext* context, DoneCallback done) : context_(context), done_(std::move(done)) {}
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

    ~Wait() {
      if (!status_.ok()) context_->CtxFailure(status_);
      finish(context_, std::move(done_));
    }

    // Messages may end on several threads.
    void hear(const absl::Status& status) {
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
    start(context, watched(context, std::move(done)), std::move(call));
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
