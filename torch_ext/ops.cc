// The list of what exists. Bodies are in kernels.cc, under the same names.
//
// `group` is a communicator of the core, 0 the world; roots and peers are ranks inside it. Every member of a group
// calls the same operations in the same order. Blocking operations return when this rank's part is complete;
// `<name>_async` returns a handle at once and keeps the memory of its tensors until the operation is complete.
// Tensors of other ranks with the same role have the same shape and type unless said otherwise.

#include <torch/custom_class.h>
#include <torch/library.h>

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
  m.class_<Work>("Work").def("wait", &Work::wait).def("is_completed", &Work::is_completed);
  m.class_<NamedWork>("NamedWork")
      .def("wait", &NamedWork::wait)
      .def("is_completed", &NamedWork::is_completed)
      .def("results", &NamedWork::results)
      .def("last", &NamedWork::last);

  // The session as the core sees it.
  m.def("rank() -> int");
  m.def("size() -> int");
  m.def("session_id() -> int");

  // tensor = op over ranks (tensor). op: sum, average, min, max, product, bit_and, bit_or, bit_xor.
  define(m, "all_reduce_", "(Tensor(a!) tensor, str op, int group)");
  // As all_reduce_ on `root`; other ranks' tensors stay as they are.
  define(m, "reduce_", "(Tensor(a!) tensor, str op, int root, int group)");
  // tensor = root's tensor.
  define(m, "broadcast_", "(Tensor(a!) tensor, int root, int group)");
  // outputs[i] = rank i's input. Blocks may differ in size.
  define(m, "all_gather", "(Tensor(a!)[] outputs, Tensor input, int group)");
  // As all_gather; the outputs are equal parts of dimension 0.
  define(m, "all_gather_single", "(Tensor(a!) output, Tensor input, int group)");
  // As all_gather on `root`; outputs are empty on other ranks.
  define(m, "gather", "(Tensor(a!)[] outputs, Tensor input, int root, int group)");
  // output = root's inputs[rank]; inputs are empty on other ranks.
  define(m, "scatter", "(Tensor(a!) output, Tensor[] inputs, int root, int group)");
  // output = op over ranks r (inputs[rank] of r).
  define(m, "reduce_scatter", "(Tensor(a!) output, Tensor[] inputs, str op, int group)");
  // As reduce_scatter; the inputs are equal parts of dimension 0.
  define(m, "reduce_scatter_single", "(Tensor(a!) output, Tensor input, str op, int group)");
  // outputs[i] = rank i's inputs[rank]. Blocks may differ in size.
  define(m, "all_to_all", "(Tensor(a!)[] outputs, Tensor[] inputs, int group)");
  // As all_to_all; blocks are rows of dimension 0: as many as the sizes say, or equal parts without sizes.
  define(m, "all_to_all_single", "(Tensor(a!) output, Tensor input, int[] output_sizes, int[] input_sizes, int group)");
  // Returns when every member has called it.
  define(m, "barrier", "(int group)");
  // A message to one member; messages of one pair and tag arrive in order.
  define(m, "send", "(Tensor tensor, int to, int tag, int group)");
  // A message from one member, as many elements as were sent.
  define(m, "recv_", "(Tensor(a!) tensor, int source, int tag, int group)");

  // By name, in any order, in a process set; bodies are in named.cc. Several tensors run together or not at all. The
  // name is
  // `<kind>.<name>`, and is given by the core if `name` is empty; `blocking`: this process does nothing else meanwhile.
  // Without outputs the handle has the results.
  // With `is_scaled`, who calls multiplies with the factors, and they are only compared.
  const std::string factors = ", float prescale, float postscale, bool is_scaled";
  const std::string named = ", str kind, str name, int process_set, bool blocking";
  define_named(m, "named_all_reduce", "Tensor[] inputs, Tensor(a!)[] outputs, str op" + factors + named);
  define_named(m, "named_broadcast", "Tensor input, Tensor(a!)[] outputs, int root" + named);
  define_named(m, "named_all_gather", "Tensor[] inputs" + named);
  define_named(m, "named_all_to_all", "Tensor input, int[]? splits" + named);
  define_named(m, "named_reduce_scatter", "Tensor[] inputs, str op" + factors + named);
  define_named(m, "named_barrier", "str kind, int process_set");
  // Whether all ranks have asked for the same gradients, whose names are lines of `names`: an error says which rank
  // lacks which.
  define_named(m, "named_step", "str name, str names, int process_set");
  // Devices for all-reduces of others on devices, where collectives have not run on one: which the script has named, or
  // which is the current one; negative if there is none.
  define_named(m, "named_join", "int named, int current");
}

}  // namespace smd::torch_ext
