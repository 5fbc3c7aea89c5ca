// The description of one operation, which the adapters of both frameworks fill and pass to the core.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "smd/completion.h"
#include "smd/src/bridge.rs.h"

namespace smd {

struct Operation {
  Collective collective;
  std::uint64_t group = 0;
  // Name of the reduction; empty if there is none.
  std::string op;
  // Root or peer, as a rank inside the group.
  std::int64_t peer = 0;
  std::uint32_t tag = 0;
  // Timeout for other members; 0 selects the session's.
  std::uint64_t timeout_ms = 0;
  // Blocks in rank order, if the collective has one block for each rank.
  std::vector<TensorView> inputs;
  std::vector<TensorView> outputs;
  // For operations on rows: the number of rows of each input, and the elements of one row.
  std::vector<std::size_t> rows;
  std::size_t row_elems = 0;

  // Runs the operation: on the CPU on this thread, until this rank's part is complete; on a device, queues it. Throws
  // rust::Error with the core's report.
  void run() const { smd::run(call()); }

  // Queues the operation; `done` is called once, unless this throws.
  void submit(std::unique_ptr<Completion> done) const { smd::submit(call(), std::move(done)); }

  // As `submit`, in any order: it runs when every rank has submitted an operation under `name`; see bridge.rs.
  void submit_named(const std::string& name, const std::vector<std::uint64_t>& shape, bool blocking,
                    std::unique_ptr<Completion> done) const {
    smd::submit_named(rust::Str(name.data(), name.size()), call(), {shape.data(), shape.size()}, blocking,
                      std::move(done));
  }

  // The description for the core; it refers to this object.
  Call call() const {
    Call call;
    call.collective = collective;
    call.group = group;
    call.op = rust::Str(op.data(), op.size());
    call.peer = peer;
    call.tag = tag;
    call.timeout_ms = timeout_ms;
    call.inputs = {inputs.data(), inputs.size()};
    call.outputs = {outputs.data(), outputs.size()};
    call.rows = {rows.data(), rows.size()};
    call.row_elems = row_elems;
    return call;
  }
};

}  // namespace smd
