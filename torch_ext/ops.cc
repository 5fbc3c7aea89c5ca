// All operations of this library. Their kernels are in kernels.cc, under the same names.
//
// `group` is a communicator of the core, 0 the world; roots and peers are ranks inside it. Every member of a group
// calls the same operations in the same order. Blocking operations return when this rank's part is complete.
// `<name>_async` returns a handle at once and keeps the memory of its tensors until the operation is complete. Tensors
// of different ranks with the same role have the same shape and type unless said otherwise.

#include <torch/library.h>

#include "boxed.h"
#include "completion.h"
#include "named.h"

namespace smd::torch_ext {
namespace {

void define(torch::Library& m, const std::string& name, const std::string& arguments) {
  m.def((name + arguments + " -> ()").c_str());
  m.def((name + "_async" + arguments + " -> __torch__.torch.classes.smd.Work").c_str());
}

void define_named(torch::Library& m, const std::string& name, const std::string& arguments) {
  m.def((name + "(" + arguments + ") -> __torch__.torch.classes.smd.NamedWork").c_str());
}

}  // namespace

TORCH_LIBRARY(smd, m) {
  BoxedClass<Work>(m, "Work").def<&Work::wait>("wait() -> NoneType").def<&Work::is_completed>("is_completed() -> bool");
  BoxedClass<NamedWork>(m, "NamedWork")
      .def<&NamedWork::wait>("wait() -> NoneType")
      .def<&NamedWork::is_completed>("is_completed() -> bool")
      .def<&NamedWork::results>("results() -> Tensor[]")
      .def<&NamedWork::last>("last() -> int");

  // The session's rank and size.
  m.def("rank() -> int");
  m.def("size() -> int");
  m.def("session_id() -> int");

  // tensor = op over ranks (tensor). op: sum, average, min, max, product, bit_and, bit_or, bit_xor.
  define(m, "all_reduce_", "(Tensor(a!) tensor, str op, int group)");
  // As all_reduce_, but only the tensor of `root` changes.
  define(m, "reduce_", "(Tensor(a!) tensor, str op, int root, int group)");
  // tensor = root's tensor.
  define(m, "broadcast_", "(Tensor(a!) tensor, int root, int group)");
  // outputs[i] = rank i's input. Blocks may differ in size.
  define(m, "all_gather", "(Tensor(a!)[] outputs, Tensor input, int group)");
  // As all_gather; the outputs are equal blocks of dimension 0.
  define(m, "all_gather_single", "(Tensor(a!) output, Tensor input, int group)");
  // As all_gather on `root`; outputs are empty on other ranks.
  define(m, "gather", "(Tensor(a!)[] outputs, Tensor input, int root, int group)");
  // output = root's inputs[rank]; inputs are empty on other ranks.
  define(m, "scatter", "(Tensor(a!) output, Tensor[] inputs, int root, int group)");
  // output = op over ranks r (inputs[rank] of r).
  define(m, "reduce_scatter", "(Tensor(a!) output, Tensor[] inputs, str op, int group)");
  // As reduce_scatter; the inputs are equal blocks of dimension 0.
  define(m, "reduce_scatter_single", "(Tensor(a!) output, Tensor input, str op, int group)");
  // outputs[i] = rank i's inputs[rank]. Blocks may differ in size.
  define(m, "all_to_all", "(Tensor(a!)[] outputs, Tensor[] inputs, int group)");
  // As all_to_all; blocks are rows of dimension 0, with the given sizes, or equal blocks without sizes.
  define(m, "all_to_all_single", "(Tensor(a!) output, Tensor input, int[] output_sizes, int[] input_sizes, int group)");
  // Returns when every member has called it.
  define(m, "barrier", "(int group)");
  // A message to one member. Messages between two members under one tag arrive in the order in which they were sent.
  define(m, "send", "(Tensor tensor, int to, int tag, int group)");
  // Receives a message from one member; the tensor has as many elements as the sent one.
  define(m, "recv_", "(Tensor(a!) tensor, int source, int tag, int group)");

  // Collectives by name, in any order, in a process set; named.cc has their kernels. The tensors of one call run
  // together or not at all. The name is `<kind>.<name>`; if `name` is empty, the core gives one. `blocking` says that
  // this process does nothing else until completion. Without outputs, the handle has the results. With `is_scaled`, the
  // caller applies the factors itself, and ranks only compare them.
  const std::string factors = ", float prescale, float postscale, bool is_scaled";
  const std::string named = ", str kind, str name, int process_set, bool blocking";
  define_named(m, "named_all_reduce", "Tensor[] inputs, Tensor(a!)[] outputs, str op" + factors + named);
  define_named(m, "named_broadcast", "Tensor input, Tensor(a!)[] outputs, int root" + named);
  define_named(m, "named_all_gather", "Tensor[] inputs" + named);
  define_named(m, "named_all_to_all", "Tensor input, int[]? splits" + named);
  define_named(m, "named_reduce_scatter", "Tensor[] inputs, str op" + factors + named);
  define_named(m, "named_barrier", "str kind, int process_set");
  // Compares across ranks which gradients a step has; `names` has one name in each line. The error says which rank
  // lacks which gradient.
  define_named(m, "named_step", "str name, str names, int process_set");
  // Joins: this rank has no more operations. `named` is the CUDA device that the script has chosen and `current` the
  // framework's current one, negative if there is none. They are used for the other ranks' all-reduces on devices, if
  // no collective of this rank has run on a device before.
  define_named(m, "named_join", "int named, int current");
}

}  // namespace smd::torch_ext
