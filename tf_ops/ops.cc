// The list of what exists. Bodies are in kernels.cc, under the same names.
//
// `group` is a communicator of the core, 0 the world; `root` is a rank inside it. Every member of a group calls the
// same operations in the same order: they are stateful, so TensorFlow keeps the order in which a function's body
// names them, and marked as communication, so that it neither prunes nor folds them.

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smd::tf_ops {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;
using tensorflow::shape_inference::UnchangedShape;

constexpr char kTypes[] =
    "T: {uint8, int8, int16, int32, int64, half, bfloat16, float, double, bool, complex64, complex128}";

// How many rows there are in all depends on the number of ranks, which a graph does not fix.
absl::Status all_gather_shape(InferenceContext* context) {
  ShapeHandle input;
  TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &input));
  ShapeHandle output;
  TF_RETURN_IF_ERROR(context->ReplaceDim(input, 0, context->UnknownDim(), &output));
  context->set_output(0, output);
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("SmdRank")
    .Output("rank: int32")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Global rank of this process.");

REGISTER_OP("SmdSize").Output("size: int32").SetIsStateful().SetShapeFn(ScalarShape).Doc("Processes of the job.");

REGISTER_OP("SmdSessionId")
    .Output("id: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("A number for the session, the same on all ranks and new for each `init`.");

REGISTER_OP("SmdAllReduce")
    .Attr(kTypes)
    .Attr("op: string")
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(UnchangedShape)
    .Doc(R"(
output = op over ranks (tensor).

tensor: Same shape and type on all ranks.
op: sum, average, min, max, product, bit_and, bit_or, bit_xor.
)");

REGISTER_OP("SmdBroadcast")
    .Attr(kTypes)
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
    .Attr(kTypes)
    .Attr("group: int = 0")
    .Input("tensor: T")
    .Output("output: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(all_gather_shape)
    .Doc(R"(
output = the ranks' tensors, one after the other along dimension 0.

tensor: Same shape and type on all ranks, at least one dimension.
)");

REGISTER_OP("SmdReduceGradients")
    .Attr(
        "T: list({uint8, int8, int16, int32, int64, half, bfloat16, float, double, bool, complex64, complex128}) >= 1")
    .Attr("plan: int")
    .Attr("params: list(int)")
    .Attr("whole: bool")
    .Input("gradients: T")
    .Output("reduced: T")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn([](InferenceContext* context) {
      for (int i = 0; i < context->num_inputs(); ++i) context->set_output(i, context->input(i));
      return absl::OkStatus();
    })
    .Doc(R"(
Gradients of a step, reduced over ranks as their plan says. Each one goes its own way: the operations of a step may run
in any order, and at the same time.

plan: Number that this process drew.
params: The gradients' places in the plan.
whole: Whether these are all gradients of the plan.
)");

}  // namespace smd::tf_ops
