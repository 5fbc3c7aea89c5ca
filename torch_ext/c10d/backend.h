// The c10d backend `smddp`, which process groups of torch.distributed call.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "c10d/device_work.h"
#include "c10d/group_work.h"
#include "operations.h"

namespace smd::torch_ext {

// The backend of one process group, over a communicator of its own.
//
// A synchronous collective on the CPU runs on the caller's thread and is complete when the function returns; its error
// is in the returned work. On CUDA tensors, a synchronous collective is queued into the current stream and an
// asynchronous one into the group's communication stream. Where torch passes a list of tensors, one for each device of
// this process, the list has one tensor.
class Backend final : public c10d::Backend {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // Creates the group of the global ranks in `ranks`, or of all ranks if it is empty. Collective. With a parent, the
  // group is split from it: all ranks of the parent call this function or `split_nocolor`.
  static c10::intrusive_ptr<Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                          const std::vector<int64_t>& ranks, std::chrono::milliseconds timeout,
                                          const Backend* parent = nullptr);

  Backend(rust::Box<Membership> membership, int rank, int size, std::chrono::milliseconds timeout);
  ~Backend() override;

  const std::string getBackendName() const override { return "smddp"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Works allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override;
  Works gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Works reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                       const c10d::ReduceScatterOptions& options) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;
  Works barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  // Operations between `startCoalescing` and `endCoalescing` become one operation.
  void startCoalescing() override;
  Works endCoalescing() override;

  // The number of collectives so far. Torch's debug mode compares it between ranks.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void split_nocolor() const;
  // Connects the device, as `init_process_group(device_id=...)` requests. Without this call, the first operation on the
  // device does it.
  void eagerConnectSingleDevice(at::Device device) override;
  void abort() override;
  void shutdown() override;

 private:
  struct Issue;
  struct Batch {
    // Created with the first operation, on the device of its tensors.
    c10::intrusive_ptr<GroupWork> work;
    c10::intrusive_ptr<DeviceWork> device_work;
    std::vector<TensorOperation> operations;
  };

  template <class Body>
  Works in_turn(const Tensors& tensors, Body&& body);
  void give_up(const std::string& message, bool on_device) noexcept;

  Works issue(const Issue& what, std::vector<TensorOperation> operations, const Tensors& inputs,
              const Tensors& outputs);
  Works issue(const Issue& what, TensorOperation operation, const Tensors& inputs, const Tensors& outputs);

  rust::Box<Membership> membership_;
  const int64_t group_;
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<std::uint64_t> sequence_{0};
  std::optional<Batch> batch_;
};

}  // namespace smd::torch_ext
