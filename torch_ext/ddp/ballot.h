// Votes on how the ranks reduce a round of gradients.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <utility>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// This rank's vote on how a round of gradients is reduced, and the common result.
class Ballot : public torch::CustomClassHolder {
 public:
  explicit Ballot(rust::Box<smd::Ballot> core) : core_(std::move(core)) {}

  // Waits for the result, a `VoteResult` that is the same on all ranks. Takes no Python lock.
  int64_t result() const;
  // Returns the result without waiting, or -1 if it is not known yet.
  int64_t result_so_far() const;
  // The token for `PendingReducer`, after a result that says to create reducers.
  int64_t token() const { return static_cast<int64_t>(core_->token()); }

 private:
  rust::Box<smd::Ballot> core_;
};

}  // namespace smd::torch_ext
