// Votes of the ranks on how they reduce a round of gradients.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <utility>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// A vote on how the ranks reduce a round of gradients.
class Ballot : public torch::CustomClassHolder {
 public:
  explicit Ballot(rust::Box<smd::Ballot> core) : core_(std::move(core)) {}

  // Waits for what all ranks do: a `VoteResult`. Takes no Python lock.
  int64_t result() const;
  // The same without a wait; -1 if it is not known yet.
  int64_t result_so_far() const;
  // After the result to make reducers: what `PendingReducer` takes.
  int64_t token() const { return static_cast<int64_t>(core_->token()); }

 private:
  rust::Box<smd::Ballot> core_;
};

}  // namespace smd::torch_ext
