// All operations of this library. Their kernels are in kernels.cc, or in a file for their kind such as named.cc, under
// the same names.
//
// `group` is a communicator of the core, 0 the world; `root` is a rank inside it. Every member of a group calls the
// same operations in the same order.
//
// - TF-1: order. Operations are stateful, so nothing removes, merges or folds one. In a `tf.function`, TensorFlow
//   chains stateful operations without resources in the order of the body: each waits for the one before it. Calls of
//   functions, branches and loops join this chain too, unless they use a resource such as a variable; then they are
//   ordered only after other users of that resource. `tensorflow/ordering.py` adds those that contain operations of
//   this library to the chain. In a graph of TensorFlow 1 nothing is chained: there the script
//   orders by control dependencies, or by values. Operations with a name (SmdNamed..) are not stateful and have no
//   order: ranks find each other's by name. Horovod's operations have names, too, and are stateful:
//   `horovod/tensorflow/mpi_ops.py` takes them out of the chain.

#include <cstdint>

#include "smd/src/bridge.rs.h"
#include "status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smd::tf_ops {
namespace {

using tensorflow::Tensor;
using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::NoOutputs;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;
using tensorflow::shape_inference::UnchangedShape;

// Element types that can be reduced.
#define SMD_NUMBERS "uint8, int8, int16, int32, int64, half, bfloat16, float, double, bool, complex64, complex128"
// Element types that can be moved: all whose elements are plain bytes.
#define SMD_TYPES "{" SMD_NUMBERS ", uint16, uint32, uint64}"

constexpr char kNumber[] = "T: {" SMD_NUMBERS "}";
constexpr char kNumbers[] = "T: list({" SMD_NUMBERS "}) >= 1";
constexpr char kType[] = "T: " SMD_TYPES;
// Element types of a collective by name; without bool, which Horovod does not reduce.
#define SMD_REDUCIBLE "uint8, int8, int16, int32, int64, half, bfloat16, float, double, complex64, complex128"
constexpr char kReducible[] = "T: {" SMD_REDUCIBLE "}";
constexpr char kReducibles[] = "T: list({" SMD_REDUCIBLE "}) >= 1";
constexpr char kTypes[] = "T: list(" SMD_TYPES ") >= 1";
constexpr char kReduction[] = "op: {'sum', 'average', 'min', 'max', 'product', 'bit_and', 'bit_or', 'bit_xor'}";

#undef SMD_REDUCIBLE
#undef SMD_TYPES
#undef SMD_NUMBERS

// The first output has the shape of the first input, with another number of rows.
absl::Status rows_shape(InferenceContext* context, DimensionHandle rows) {
  ShapeHandle input;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
  ShapeHandle output;
  TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, rows, &output));
  context->set_output(0, output);
  return absl::OkStatus();
}

// The number of rows in all depends on the number of ranks, which a graph does not fix.
absl::Status all_gather_shape(InferenceContext* context) {
  context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
  return rows_shape(context, context->UnknownDim());
}

absl::Status reduce_scatter_shape(InferenceContext* context) {
  ShapeHandle rows;
  TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 1, &rows));
  return rows_shape(context, context->UnknownDim());
}

absl::Status all_to_all_shape(InferenceContext* context) {
  ShapeHandle splits;
  TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 1, &splits));
  const bool equal = context->Value(context->Dim(splits, 0)) == 0;
  context->set_output(1, context->Vector(equal ? context->UnknownDim() : context->Dim(splits, 0)));
  // With equal blocks, a rank receives as many rows as it sends.
  return rows_shape(context, equal && context->RankKnown(context->input(0)) && context->Rank(context->input(0)) > 0
                                 ? context->Dim(context->input(0), 0)
                                 : context->UnknownDim());
}

// Dimension 0 of each output is unknown; the others are as in the inputs.
absl::Status gathered_shapes(InferenceContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) {
    ShapeHandle input;
    ShapeHandle output;
    TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(i), 1, &input));
    TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
    context->set_output(i, output);
  }
  return absl::OkStatus();
}

// The outputs' rows for this rank, if the process knows its rank already.
absl::Status scattered_shapes(InferenceContext* context) {
  std::int64_t process_set = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("process_set_id", &process_set));
  std::int64_t ranks = 0;
  std::int64_t rank = 0;
  const absl::Status known = checked([&] {
    const std::uint64_t group = process_set_group(process_set);
    ranks = static_cast<std::int64_t>(group_size(group));
    rank = static_cast<std::int64_t>(group_rank(group));
  });
  for (int i = 0; i < context->num_inputs(); ++i) {
    ShapeHandle input = context->input(i);
    if (!context->RankKnown(input)) {
      context->set_output(i, context->UnknownShape());
      continue;
    }
    TF_RETURN_IF_ERROR(context->WithRankAtLeast(input, 1, &input));
    DimensionHandle rows = context->UnknownDim();
    if (known.ok() && context->ValueKnown(context->Dim(input, 0))) {
      const std::int64_t all = context->Value(context->Dim(input, 0));
      rows = context->MakeDim(all / ranks + (rank < all % ranks ? 1 : 0));
    }
    ShapeHandle output;
    TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, rows, &output));
    context->set_output(i, output);
  }
  return absl::OkStatus();
}

absl::Status exchanged_shapes(InferenceContext* context) {
  ShapeHandle input;
  ShapeHandle output;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
  TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
  context->set_output(0, output);
  const ShapeHandle splits = context->input(1);
  const bool given = context->RankKnown(splits) && context->Rank(splits) == 1 &&
                     context->ValueKnown(context->Dim(splits, 0)) && context->Value(context->Dim(splits, 0)) > 0;
  context->set_output(1, given ? splits : context->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

absl::Status unchanged_shapes(InferenceContext* context) {
  for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
  return absl::OkStatus();
}

absl::Status received_shape(InferenceContext* context) {
  ShapeHandle output;
  TF_RETURN_IF_ERROR(context->MakeShapeFromShapeTensor(0, &output));
  context->set_output(0, output);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SmdRank")
    .Attr("group: int = 0")
    .Output("rank: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Rank of this process in the group.");

REGISTER_OP("SmdSize")
    .Attr("group: int = 0")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Members of the group.");

REGISTER_OP("SmdSessionId")
    .Output("id: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("A number for the session, the same on all ranks and new for each `init`.");

REGISTER_OP("SmdAllReduce")
    .Attr(kNumber)
    .Attr(kReduction)
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = op over ranks (tensor).

tensor: Same shape and type on all ranks.
)");

REGISTER_OP("SmdGroupedAllReduce")
    .Attr(kNumbers)
    .Attr(kReduction)
    .Attr("group: int = 0")
    .Input("tensors: T")
    .Output("outputs: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchanged_shapes)
    .Doc(R"(
outputs[i] = op over ranks (tensors[i]), as one operation; small tensors travel together.

tensors: Same number, shapes and types on all ranks.
)");

REGISTER_OP("SmdReduce")
    .Attr(kNumber)
    .Attr(kReduction)
    .Attr("root: int")
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = op over ranks (tensor) on the root, zeros elsewhere.

tensor: Same shape and type on all ranks.
)");

REGISTER_OP("SmdBroadcast")
    .Attr(kType)
    .Attr("root: int")
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = root's tensor.

tensor: Same shape and type on all ranks.
)");

REGISTER_OP("SmdAllGather")
    .Attr(kType)
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .Output("rows: int64")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(all_gather_shape)
    .Doc(R"(
output = the ranks' tensors, one after the other along dimension 0.

tensor: Same shape but for dimension 0, and same type, on all ranks; at least one dimension.
rows: Rows received from each rank.
)");

REGISTER_OP("SmdReduceScatter")
    .Attr(kNumber)
    .Attr(kReduction)
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Input("rows: int64")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(reduce_scatter_shape)
    .Doc(R"(
output = op over ranks (this rank's block of tensor).

tensor: Same shape and type on all ranks; blocks of dimension 0, one a rank.
rows: Rows for each rank, the same on all ranks; empty for blocks of equal size.
)");

REGISTER_OP("SmdAllToAll")
    .Attr(kType)
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Input("splits: int64")
    .Output("output: T")
    .Output("received: int64")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(all_to_all_shape)
    .Doc(R"(
output = the blocks for this rank of the ranks' tensors, one after the other.

tensor: Blocks of dimension 0, one for each rank; rows of the same shape and type on all ranks.
splits: How many rows each rank gets; none for blocks of one size, the same on all ranks.
received: How many rows come from each rank.
)");

REGISTER_OP("SmdBarrier")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(NoOutputs)
    .Doc("Completes when every member has called it.");

// SmdBeginStep and SmdEndStep enclose a step. If the step fails on this rank alone in between, the core tells the other
// ranks.

REGISTER_OP("SmdBeginStep").Output("step: variant").SetIsStateful().SetShapeFn(ScalarShape).Doc(R"(
Begins a step. Runs before all operations of the step for which other ranks wait.

step: Handle of the step, for its `SmdEndStep`.
)");

REGISTER_OP("SmdEndStep")
    .Input("step: variant")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("Ends a step. Runs after all operations of the step, or when all ranks know that it failed.");

// Point-to-point messages between two members. They are not ordered with collectives. Messages to one member under one
// tag arrive in the order in which they were sent. The operations are stateful, so that TensorFlow removes none; a
// graph orders them by data dependencies.

REGISTER_OP("SmdSend")
    .Attr(kType)
    .Attr("peer: int")
    .Attr("tag: int")
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("message: variant")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ScalarShape)
    .Doc(R"(
Starts a send of the tensor to another member.

message: Handle of the send, for `SmdSent`.
peer: Rank inside the group.
tag: As the other member receives it.
)");

REGISTER_OP("SmdSent")
    .Attr("N: int >= 1")
    .Input("messages: N * variant")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(NoOutputs)
    .Doc("Completes when the other members have received the messages.");

REGISTER_OP("SmdRecv")
    .Attr(kType)
    .Attr("peer: int")
    .Attr("tag: int")
    .Attr("group: int = 0")
    .Input("shape: int32")
    .Output("tensor: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(received_shape)
    .Doc(R"(
tensor = the tensor that another member sends.

shape: The shape it sends.
peer: Rank inside the group.
tag: As the other member sends it.
)");

REGISTER_OP("SmdReduceGradients")
    .Attr(kNumbers)
    .Attr("plan: int")
    .Attr("params: list(int)")
    .Attr("whole: bool")
    .Input("gradients: T")
    .Output("reduced: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchanged_shapes)
    .Doc(R"(
Gradients of a step, reduced over ranks by their plan. Gradients are independent: the operations of a step may run
in any order, and at the same time.

plan: Number of the plan in this process.
params: Indices of the gradients in the plan.
whole: Whether these are all gradients of the plan.
)");

// Ranks call the operations below in any order and match them by `tensor_name`. They are not stateful, so TensorFlow
// runs them as soon as their inputs are ready. In a graph, `anchors` are outputs of stateful operations: they keep
// TensorFlow from folding the result into a constant where the input is one. `blocking` says that this process does
// nothing else until the operation ends.

REGISTER_OP("SmdNamedAllReduce")
    .Attr(kNumber)
    .Attr(kReduction)
    .Attr("tensor_name: string")
    .Attr("blocking: bool")
    .Attr("group: int = 0")
    .Attr("num_anchors: int >= 0")
    .Input("tensor: T")
    .Input("anchors: num_anchors * int64")
    .Output("output: T")
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = op over ranks (tensor), once every rank has called it under the same name.

tensor: Same shape and type on all ranks.
)");

REGISTER_OP("SmdNamedBroadcast")
    .Attr(kType)
    .Attr("root: int")
    .Attr("tensor_name: string")
    .Attr("blocking: bool")
    .Attr("group: int = 0")
    .Attr("num_anchors: int >= 0")
    .Input("tensor: T")
    .Input("anchors: num_anchors * int64")
    .Output("output: T")
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = root's tensor, once every rank has called it under the same name.

tensor: Same shape and type on all ranks.
)");

// Horovod's operations. The ranks of a process set match them by name: `tensor_name` if it is given, which also says
// that the caller is blocked, as eager callers are; otherwise the node's name, or its part after the last slash with
// `ignore_name_scope`. The operations of one call run together or not at all. `reduce_op` is Horovod's number of the
// reduction. Ranks are those of Horovod's world.

REGISTER_OP("HorovodAllreduce")
    .Attr(kReducible)
    .Attr("reduce_op: int")
    .Attr("prescale_factor: float = 1.0")
    .Attr("postscale_factor: float = 1.0")
    .Attr("is_scaled: bool = false")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = postscale_factor * op over ranks (prescale_factor * tensor).

is_scaled: Whether the caller multiplies by the factors; ranks then only compare them.
)");

REGISTER_OP("HorovodGroupedAllreduce")
    .Attr(kReducibles)
    .Attr("reduce_op: int")
    .Attr("prescale_factor: float = 1.0")
    .Attr("postscale_factor: float = 1.0")
    .Attr("is_scaled: bool = false")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Attr("num_tensors: int = 0")
    .Input("tensors: T")
    .Output("outputs: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchanged_shapes)
    .Doc("As HorovodAllreduce, of several tensors.");

REGISTER_OP("HorovodAllgather")
    .Attr(kType)
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(gathered_shapes)
    .Doc("output = the ranks' tensors, one after the other along dimension 0, in which they may differ.");

REGISTER_OP("HorovodGroupedAllgather")
    .Attr(kTypes)
    .Attr("num_tensors: int = 0")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensors: T")
    .Output("outputs: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(gathered_shapes)
    .Doc("As HorovodAllgather, of several tensors.");

REGISTER_OP("HorovodBroadcast")
    .Attr(kType)
    .Attr("root_rank: int")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc("output = the tensor of a rank of the world.");

REGISTER_OP("HorovodBroadcastInplace")
    .Attr(kType)
    .Attr("root_rank: int")
    .Attr("num_variables: int >= 1")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensors: Ref(num_variables * T)")
    .Output("outputs: Ref(num_variables * T)")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(unchanged_shapes)
    .Doc("Sets variables to the values of a rank of the world.");

REGISTER_OP("HorovodBroadcastInplaceResource")
    .Attr("root_rank: int")
    .Attr("num_variables: int >= 1")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("resources: num_variables * resource")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(NoOutputs)
    .Doc("As HorovodBroadcastInplace.");

REGISTER_OP("HorovodAlltoall")
    .Attr(kType)
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensor: T")
    .Input("splits: int32")
    .Output("output: T")
    .Output("received_splits: int32")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(exchanged_shapes)
    .Doc(R"(
output = the rows that the ranks send to this one.

splits: Rows for each rank; empty for equal parts. Rows beyond their sum are not sent.
received_splits: Rows received from each rank.
)");

REGISTER_OP("HorovodReducescatter")
    .Attr(kReducible)
    .Attr("reduce_op: int")
    .Attr("prescale_factor: float = 1.0")
    .Attr("postscale_factor: float = 1.0")
    .Attr("is_scaled: bool = false")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(scattered_shapes)
    .Doc(
        "output = this rank's rows of the reduced tensor; the first ranks have one more if the rows cannot be split "
        "evenly.");

REGISTER_OP("HorovodGroupedReducescatter")
    .Attr(kReducibles)
    .Attr("reduce_op: int")
    .Attr("prescale_factor: float = 1.0")
    .Attr("postscale_factor: float = 1.0")
    .Attr("is_scaled: bool = false")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .Attr("num_tensors: int = 0")
    .Input("tensors: T")
    .Output("outputs: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(scattered_shapes)
    .Doc("As HorovodReducescatter, of several tensors.");

REGISTER_OP("HorovodStep")
    .Attr("numbers: list(int)")
    .Attr("names: string")
    .Attr("ignore_name_scope: bool = false")
    .Attr("process_set_id: int = 0")
    .Attr("tensor_name: string = ''")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .Doc(R"(
Fails on all ranks, naming the ranks and the missing gradients, unless the next step of all ranks has the same gradients.

numbers: Indices of the gradients of this step in the list of all gradients.
names: Names of all gradients, one a line.
)");

REGISTER_OP("HorovodJoin")
    .Output("output: int32")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(ScalarShape)
    .Doc(
        "Joins: this rank has no more data. Completes when all ranks have joined; output = the rank that joined last.");

REGISTER_OP("HorovodBarrier")
    .Attr("process_set_id: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(NoOutputs)
    .Doc("Completes when every rank of the process set has called it.");

REGISTER_OP("HorovodSize")
    .Attr("process_set_id: int = 0")
    .Output("size: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Ranks of the process set.");

REGISTER_OP("HorovodProcessSetIncluded")
    .Attr("process_set_id: int = 0")
    .Output("included: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("1 if this rank is in the process set, else 0.");

REGISTER_OP("HorovodLocalSize")
    .Output("local_size: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Ranks on this host.");

REGISTER_OP("HorovodRank").Output("rank: int32").SetIsStateful().SetShapeFn(ScalarShape).Doc("This process's rank.");

REGISTER_OP("HorovodLocalRank")
    .Output("local_rank: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("This process's rank among those of this host.");

}  // namespace smd::tf_ops
