// The list of what exists. Bodies are in kernels.cc, under the same names.
//
// `group` is a communicator of the core, 0 the world; `root` is a rank inside it. Every member of a group calls the
// same operations in the same order.
//
// TF-1: order. Operations are stateful, so nothing removes, merges or folds one. In a `tf.function`, TensorFlow chains
// stateful operations that take no resource in the order in which the body names them, each waiting for the one before
// it, and so it does with calls of functions, branches and loops, unless these take a resource such as a variable: they
// are ordered after other users of that resource only. `tensorflow/ordering.py` puts those which contain operations of
// ours into the chain. In a graph of TensorFlow 1 nothing is chained: there the script orders by control dependencies,
// or by values. Operations with a name (SmdNamed..) are not stateful and have no order: ranks find each other's by
// name.

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

// Types that values can be combined in.
#define SMD_NUMBERS "uint8, int8, int16, int32, int64, half, bfloat16, float, double, bool, complex64, complex128"
// What only moves may be of any type whose elements are plain bytes.
#define SMD_TYPES "{" SMD_NUMBERS ", uint16, uint32, uint64}"

constexpr char kNumber[] = "T: {" SMD_NUMBERS "}";
constexpr char kNumbers[] = "T: list({" SMD_NUMBERS "}) >= 1";
constexpr char kType[] = "T: " SMD_TYPES;
constexpr char kReduction[] = "op: {'sum', 'average', 'min', 'max', 'product', 'bit_and', 'bit_or', 'bit_xor'}";

#undef SMD_TYPES
#undef SMD_NUMBERS

// The first output has the rows of the first input but for their number.
absl::Status rows_shape(InferenceContext* context, DimensionHandle rows) {
  ShapeHandle input;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
  ShapeHandle output;
  TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, rows, &output));
  context->set_output(0, output);
  return absl::OkStatus();
}

// How many rows there are in all depends on the number of ranks, which a graph does not fix.
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
  // As many come as go.
  return rows_shape(context, equal && context->RankKnown(context->input(0)) && context->Rank(context->input(0)) > 0
                                 ? context->Dim(context->input(0), 0)
                                 : context->UnknownDim());
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
rows: How many come from each rank.
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
rows: How many rows each rank gets, the same on all ranks; none for blocks of equal size.
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

// Messages between two members. They have no order with collectives nor among themselves: what was sent to a member
// under a tag is received under it, in order. Stateful, so that nothing removes one; graphs order them by values.

REGISTER_OP("SmdSend")
    .Attr(kType)
    .Attr("peer: int")
    .Attr("tag: int")
    .Attr("group: int = 0")
    .Input("tensor: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(NoOutputs)
    .Doc(R"(
Gives the tensor to another member; completes when it has it.

peer: Rank inside the group.
tag: As the other member receives it.
)");

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
tensor = what another member sends.

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
Gradients of a step, reduced over ranks as their plan says. Each one goes its own way: the operations of a step may run
in any order, and at the same time.

plan: Number that this process drew.
params: The gradients' places in the plan.
whole: Whether these are all gradients of the plan.
)");

// Ranks call the ops below in any order, and find each other's by `tensor_name`. They are not stateful, so that
// TensorFlow runs them whenever their tensors are there. `anchors` are outputs of stateful ops, in a graph: with them,
// TensorFlow does not compute the result once and for all, should the tensor be a constant. `blocking` says that this
// process does nothing else until the op has ended.

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

}  // namespace smd::tf_ops
