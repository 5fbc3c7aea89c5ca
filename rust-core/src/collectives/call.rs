//! A member's call of an operation, as a value that can be validated, compared with the other members' calls, and
//! printed.

use std::fmt;

use super::Request;
use crate::buffer::ReduceOp;
use crate::buffer::{DType, Device, TensorView};
use crate::error::{Error, Result};

/// Which operation; the variants of [`Request`] that are compared across members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
pub(crate) enum Kind {
    AllReduce = 1,
    AllReduceWindow = 2,
    Reduce = 3,
    Broadcast = 4,
    AllGather = 5,
    Gather = 6,
    Scatter = 7,
    ReduceScatter = 8,
    AllToAll = 9,
    Barrier = 10,
    /// The collective creation of a window.
    Window = 11,
    /// The member fails the operation instead of taking part.
    Poison = 12,
    /// The first part of an operation on rows: exchanges the numbers of rows.
    AllGatherRows = 13,
    AllToAllRows = 14,
    Adasum = 15,
    /// Compared by name only, without data: which gradients a step has.
    Presence = 16,
}

impl Kind {
    pub(crate) const ALL: [Kind; 16] = [
        Kind::AllReduce,
        Kind::AllReduceWindow,
        Kind::Reduce,
        Kind::Broadcast,
        Kind::AllGather,
        Kind::Gather,
        Kind::Scatter,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Barrier,
        Kind::Window,
        Kind::Poison,
        Kind::AllGatherRows,
        Kind::AllToAllRows,
        Kind::Adasum,
        Kind::Presence,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::AllReduce => "all_reduce",
            Kind::AllReduceWindow => "all_reduce in a window",
            Kind::Reduce => "reduce",
            Kind::Broadcast => "broadcast",
            Kind::AllGather | Kind::AllGatherRows => "all_gather",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllToAll | Kind::AllToAllRows => "all_to_all",
            Kind::Barrier => "barrier",
            Kind::Window => "window",
            Kind::Poison => "failed operation",
            Kind::Adasum => "adasum",
            Kind::Presence => "presence",
        }
    }

    /// The operation's name in Horovod's errors, such as `Allgather`.
    pub(crate) fn title(self) -> String {
        let name = if self == Kind::Adasum { "allreduce".into() } else { self.name().replace('_', "") };
        name[..1].to_uppercase() + &name[1..]
    }

    /// The same in upper case, such as `ALLGATHER`.
    pub(crate) fn capitals(self) -> String {
        self.title().to_uppercase()
    }
}

/// A member's call. Fields that its kind does not use are zero or empty.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// Rank of the root; for operations on rows, the number of elements of one row.
    pub(crate) root: usize,
    /// Number of elements of this member's block, or of the whole tensor if the kind has no blocks; for a window, its
    /// bytes. For operations on rows, this and the next field count rows.
    pub(crate) elems: usize,
    /// Number of the window.
    pub(crate) window: u64,
    /// Offset of this member's range in its window. Not compared.
    pub(crate) offset_bytes: usize,
    /// Elements of the block for each member.
    pub(crate) sent: Vec<usize>,
    /// Elements of the block from each member.
    pub(crate) received: Vec<usize>,
    /// Why the member fails ([`Kind::Poison`]).
    pub(crate) message: String,
}

impl Call {
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            dtype: DType::UInt8,
            op: ReduceOp::Sum,
            root: 0,
            elems: 0,
            window: 0,
            offset_bytes: 0,
            sent: Vec::new(),
            received: Vec::new(),
            message: String::new(),
        }
    }

    /// The call of `request`, on tensors in CPU memory, by member `me` of `size`, if it is valid; `None` for
    /// point-to-point messages.
    pub(crate) fn of(request: &Request, me: usize, size: usize) -> Result<Option<Self>> {
        for view in views(request) {
            on_cpu(&view)?;
        }
        Self::describe(request, me, size)
    }

    /// As [`Call::of`], for tensors on any device.
    pub(crate) fn describe(request: &Request, me: usize, size: usize) -> Result<Option<Self>> {
        let call = match request {
            Request::AllReduce { input, output, op } => {
                same_shape("all_reduce", input, output)?;
                Self { dtype: input.dtype(), op: *op, elems: input.elems(), ..Self::new(Kind::AllReduce) }
            }
            Request::Adasum { input, output } => {
                same_shape("adasum", input, output)?;
                let dtype = input.dtype();
                if !matches!(dtype, DType::Float16 | DType::BFloat16 | DType::Float32 | DType::Float64) {
                    return Err(Error::InvalidArgument(format!("adasum: {dtype} is not supported, expected floats")));
                }
                if !size.is_power_of_two() {
                    return Err(Error::Unsupported(format!("adasum among a non-power of 2 ranks: {size}")));
                }
                Self { dtype, elems: input.elems(), ..Self::new(Kind::Adasum) }
            }
            Request::AllReduceWindow { window, offset_bytes, elems, dtype, op } => {
                let (bytes, room) = (elems.checked_mul(dtype.size()), window.bytes());
                if bytes.and_then(|bytes| bytes.checked_add(*offset_bytes)).is_none_or(|end| end > room) {
                    return Err(Error::InvalidArgument(format!(
                        "all_reduce of {elems} {dtype} at byte {offset_bytes} does not lie inside a window of {room} bytes"
                    )));
                }
                if !offset_bytes.is_multiple_of(64) {
                    return Err(Error::InvalidArgument(format!(
                        "all_reduce in a window starts at byte {offset_bytes}, expected a multiple of 64"
                    )));
                }
                let (window, offset_bytes) = (window.number(), *offset_bytes);
                let new = Self::new(Kind::AllReduceWindow);
                Self { dtype: *dtype, op: *op, elems: *elems, window, offset_bytes, ..new }
            }
            Request::Reduce { input, output, op, root } => {
                is_member("reduce", *root, size)?;
                if me == *root {
                    same_shape("reduce", input, output)?;
                }
                let new = Self::new(Kind::Reduce);
                Self { dtype: input.dtype(), op: *op, root: *root, elems: input.elems(), ..new }
            }
            Request::Broadcast { data, root } => {
                is_member("broadcast", *root, size)?;
                Self { dtype: data.dtype(), root: *root, elems: data.elems(), ..Self::new(Kind::Broadcast) }
            }
            Request::AllGather { input, outputs } => {
                let received = blocks("all_gather", "outputs", outputs, input.dtype(), size)?;
                same_shape("all_gather", input, &outputs[me])?;
                Self { dtype: input.dtype(), elems: input.elems(), received, ..Self::new(Kind::AllGather) }
            }
            Request::Gather { input, outputs, root } => {
                is_member("gather", *root, size)?;
                let mut received = Vec::new();
                if me == *root {
                    received = blocks("gather", "outputs", outputs, input.dtype(), size)?;
                    same_shape("gather", input, &outputs[me])?;
                }
                let new = Self::new(Kind::Gather);
                Self { dtype: input.dtype(), root: *root, elems: input.elems(), received, ..new }
            }
            Request::Scatter { inputs, output, root } => {
                is_member("scatter", *root, size)?;
                let mut sent = Vec::new();
                if me == *root {
                    sent = blocks("scatter", "inputs", inputs, output.dtype(), size)?;
                    same_shape("scatter", &inputs[me], output)?;
                }
                let new = Self::new(Kind::Scatter);
                Self { dtype: output.dtype(), root: *root, elems: output.elems(), sent, ..new }
            }
            Request::ReduceScatter { inputs, output, op } => {
                let sent = blocks("reduce_scatter", "inputs", inputs, output.dtype(), size)?;
                same_shape("reduce_scatter", &inputs[me], output)?;
                let new = Self::new(Kind::ReduceScatter);
                Self { dtype: output.dtype(), op: *op, elems: output.elems(), sent, ..new }
            }
            Request::AllToAll { inputs, outputs } => {
                let dtype = outputs.first().map_or(DType::UInt8, TensorView::dtype);
                let sent = blocks("all_to_all", "inputs", inputs, dtype, size)?;
                let received = blocks("all_to_all", "outputs", outputs, dtype, size)?;
                same_shape("all_to_all", &inputs[me], &outputs[me])?;
                Self { dtype, sent, received, ..Self::new(Kind::AllToAll) }
            }
            Request::AllGatherRows { input, rows, row_elems, .. } => {
                are_rows("all_gather", input, *rows, *row_elems)?;
                Self { dtype: input.dtype(), root: *row_elems, elems: *rows, ..Self::new(Kind::AllGatherRows) }
            }
            Request::AllToAllRows { inputs, rows, row_elems, .. } => {
                let dtype = inputs.first().map_or(DType::UInt8, TensorView::dtype);
                blocks("all_to_all", "inputs", inputs, dtype, size)?;
                if rows.len() != size {
                    let rows = rows.len();
                    return Err(Error::InvalidArgument(format!(
                        "all_to_all: {rows} numbers of rows for {size} members"
                    )));
                }
                for (input, rows) in inputs.iter().zip(rows) {
                    are_rows("all_to_all", input, *rows, *row_elems)?;
                }
                Self { dtype, root: *row_elems, sent: rows.clone(), ..Self::new(Kind::AllToAllRows) }
            }
            Request::Barrier => Self::new(Kind::Barrier),
            Request::Send { .. } | Request::Recv { .. } => return Ok(None),
        };
        if call.reduces() {
            super::kernels::check(call.dtype, call.op)
                .map_err(|why| Error::Unsupported(format!("{}: {why}", call.kind.name())))?;
        }
        Ok(Some(call))
    }

    /// Whether the operation combines values of different members.
    pub(crate) fn reduces(&self) -> bool {
        matches!(self.kind, Kind::AllReduce | Kind::AllReduceWindow | Kind::Reduce | Kind::ReduceScatter)
    }

    /// Bytes of `elems` elements.
    pub(crate) fn bytes(&self) -> usize {
        self.elems * self.dtype.size()
    }

    /// The fields on which all members must agree.
    fn common(&self) -> (Kind, DType, ReduceOp, usize, u64) {
        (self.kind, self.dtype, self.op, self.root, self.window)
    }
}

/// All views of a request.
pub(crate) fn views(request: &Request) -> Vec<TensorView> {
    match request {
        Request::AllReduce { input, output, .. }
        | Request::Adasum { input, output }
        | Request::Reduce { input, output, .. } => vec![*input, *output],
        Request::Broadcast { data, .. } => vec![*data],
        Request::AllGather { input, outputs } | Request::Gather { input, outputs, .. } => {
            outputs.iter().chain([input]).copied().collect()
        }
        Request::Scatter { inputs, output, .. } | Request::ReduceScatter { inputs, output, .. } => {
            inputs.iter().chain([output]).copied().collect()
        }
        Request::AllToAll { inputs, outputs } => inputs.iter().chain(outputs).copied().collect(),
        Request::AllGatherRows { input, .. } => vec![*input],
        Request::AllToAllRows { inputs, .. } => inputs.clone(),
        Request::Send { data, .. } | Request::Recv { data, .. } => vec![*data],
        Request::AllReduceWindow { .. } | Request::Barrier => vec![],
    }
}

/// The same request in another stream.
pub(super) fn on_stream(request: &Request, stream: usize) -> Request {
    let mut moved = request.clone();
    let each = |view: &mut TensorView| *view = view.on_stream(stream);
    match &mut moved {
        Request::AllReduce { input, output, .. }
        | Request::Adasum { input, output }
        | Request::Reduce { input, output, .. } => {
            each(input);
            each(output);
        }
        Request::Broadcast { data, .. } | Request::Send { data, .. } | Request::Recv { data, .. } => each(data),
        Request::AllGather { input, outputs } | Request::Gather { input, outputs, .. } => {
            each(input);
            outputs.iter_mut().for_each(each);
        }
        Request::Scatter { inputs, output, .. } | Request::ReduceScatter { inputs, output, .. } => {
            inputs.iter_mut().for_each(each);
            each(output);
        }
        Request::AllToAll { inputs, outputs } => inputs.iter_mut().chain(outputs).for_each(each),
        Request::AllGatherRows { input, .. } => each(input),
        Request::AllToAllRows { inputs, .. } => inputs.iter_mut().for_each(each),
        Request::AllReduceWindow { .. } | Request::Barrier => {}
    }
    moved
}

fn on_cpu(view: &TensorView) -> Result<()> {
    match view.device() {
        Device::Cpu => Ok(()),
        Device::Cuda(index) => Err(Error::Unsupported(format!(
            "a tensor on `cuda:{index}` was passed to a group whose transport moves CPU memory only"
        ))),
    }
}

fn is_member(name: &str, root: usize, size: usize) -> Result<()> {
    if root < size {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{name}: root {root} is not a rank of a group of {size}")))
}

fn same_shape(name: &str, input: &TensorView, output: &TensorView) -> Result<()> {
    if input.dtype() == output.dtype() && input.elems() == output.elems() {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "{name}: the input has {} {} elements, the output for it {} {}",
        input.elems(),
        input.dtype(),
        output.elems(),
        output.dtype()
    )))
}

fn are_rows(name: &str, view: &TensorView, rows: usize, row_elems: usize) -> Result<()> {
    if rows.checked_mul(row_elems) == Some(view.elems()) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{name}: {} elements are not {rows} rows of {row_elems}", view.elems())))
}

fn blocks(name: &str, which: &str, views: &[TensorView], dtype: DType, size: usize) -> Result<Vec<usize>> {
    if views.len() != size {
        return Err(Error::InvalidArgument(format!(
            "{name}: {} {which} were passed, expected one for each of the {size} members",
            views.len()
        )));
    }
    if let Some(other) = views.iter().find(|view| view.dtype() != dtype) {
        return Err(Error::InvalidArgument(format!("{name}: {which} of {} and {dtype} are mixed", other.dtype())));
    }
    Ok(views.iter().map(TensorView::elems).collect())
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, elems, root, .. } = self;
        let op = format!("{:?}", self.op).to_lowercase();
        let name = kind.name();
        match kind {
            Kind::AllReduce => write!(f, "{name}({op}) of {elems} {dtype}"),
            Kind::AllReduceWindow => write!(f, "all_reduce({op}) of {elems} {dtype} in window {}", self.window),
            Kind::Reduce => write!(f, "{name}({op}) of {elems} {dtype} to rank {root} of the group"),
            Kind::Broadcast => write!(f, "{name} of {elems} {dtype} from rank {root} of the group"),
            Kind::AllGather => write!(f, "{name} of {} {dtype}", list(&self.received)),
            Kind::Gather if self.received.is_empty() => {
                write!(f, "{name} of {elems} {dtype} to rank {root} of the group")
            }
            Kind::Gather => write!(f, "{name} of {} {dtype} to itself", list(&self.received)),
            Kind::Scatter if self.sent.is_empty() => {
                write!(f, "{name} of {elems} {dtype} from rank {root} of the group")
            }
            Kind::Scatter => write!(f, "{name} of {} {dtype} from itself", list(&self.sent)),
            Kind::ReduceScatter => write!(f, "{name}({op}) of {} {dtype}", list(&self.sent)),
            Kind::AllToAll => {
                write!(f, "{name} of {} {dtype} for {} {dtype}", list(&self.sent), list(&self.received))
            }
            Kind::AllGatherRows | Kind::AllToAllRows => write!(f, "{name} of rows of {root} {dtype}"),
            Kind::Barrier | Kind::Poison | Kind::Presence => f.write_str(name),
            Kind::Adasum => write!(f, "{name} of {elems} {dtype}"),
            Kind::Window => write!(f, "{name} of {elems} bytes"),
        }
    }
}

/// Formats block sizes: `3 blocks of 5`, or the first few sizes where they differ.
fn list(counts: &[usize]) -> String {
    match counts {
        [first, rest @ ..] if rest.iter().all(|count| count == first) => format!("{} blocks of {first}", counts.len()),
        [head @ .., _] if counts.len() > 16 => format!("{} blocks of {:?}..", counts.len(), &head[..16]),
        _ => format!("blocks of {counts:?}"),
    }
}

/// The result of comparing the members' calls.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum CallAgreement {
    /// All calls agree.
    Agreed,
    /// The member at this position fails the operation.
    Poisoned(usize, String),
    /// The calls of two members differ; the text names both.
    Mismatch(String),
}

/// Compares the calls of all members (COL-3). A pure function, so that members with the same calls get the same
/// result.
pub(crate) fn compare(calls: &[Call], ranks: &[usize]) -> CallAgreement {
    if let Some(rank) = calls.iter().position(|call| call.kind == Kind::Poison) {
        return CallAgreement::Poisoned(rank, calls[rank].message.clone());
    }
    let differ = |a: usize, b: usize| {
        CallAgreement::Mismatch(format!("rank {} called {}, rank {} called {}", ranks[a], calls[a], ranks[b], calls[b]))
    };
    let first = &calls[0];
    for (rank, call) in calls.iter().enumerate().skip(1) {
        if call.common() != first.common() {
            return differ(0, rank);
        }
        let same = match call.kind {
            Kind::AllGather => call.received == first.received,
            Kind::ReduceScatter => call.sent == first.sent,
            // Compared below, or exchanged by the members.
            Kind::Gather | Kind::Scatter | Kind::AllToAll | Kind::AllGatherRows | Kind::AllToAllRows => true,
            _ => call.elems == first.elems,
        };
        if !same {
            return differ(0, rank);
        }
    }
    match first.kind {
        Kind::Gather | Kind::Scatter => {
            let root = first.root;
            let counts = if first.kind == Kind::Gather { &calls[root].received } else { &calls[root].sent };
            match (0..calls.len()).find(|rank| counts.get(*rank) != Some(&calls[*rank].elems)) {
                Some(rank) => differ(root.min(rank), root.max(rank)),
                None => CallAgreement::Agreed,
            }
        }
        Kind::AllToAll => {
            for from in 0..calls.len() {
                for to in 0..calls.len() {
                    if calls[from].sent.get(to) != calls[to].received.get(from) {
                        return differ(from.min(to), from.max(to));
                    }
                }
            }
            CallAgreement::Agreed
        }
        _ => CallAgreement::Agreed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_names_two_ranks_and_their_calls() {
        let sum = Call { dtype: DType::Float32, elems: 10, ..Call::new(Kind::AllReduce) };
        let other = Call { elems: 11, ..sum.clone() };
        let verdict = compare(&[sum.clone(), sum.clone(), other], &[4, 5, 7]);
        let text = "rank 4 called all_reduce(sum) of 10 float32, rank 7 called all_reduce(sum) of 11 float32";
        assert_eq!(verdict, CallAgreement::Mismatch(text.into()));
        let max = Call { op: ReduceOp::Max, ..sum.clone() };
        let text = "rank 0 called all_reduce(sum) of 10 float32, rank 1 called all_reduce(max) of 10 float32";
        assert_eq!(compare(&[sum, max], &[0, 1]), CallAgreement::Mismatch(text.into()));
    }

    #[test]
    fn block_sizes_are_compared_pair_by_pair() {
        let call = |sent: &[usize], received: &[usize]| Call {
            dtype: DType::Int32,
            sent: sent.to_vec(),
            received: received.to_vec(),
            ..Call::new(Kind::AllToAll)
        };
        let ranks = [0, 1];
        assert_eq!(compare(&[call(&[1, 2], &[1, 3]), call(&[3, 4], &[2, 4])], &ranks), CallAgreement::Agreed);
        let text = "rank 0 called all_to_all of blocks of [1, 2] int32 for blocks of [1, 3] int32, \
                    rank 1 called all_to_all of blocks of [9, 4] int32 for blocks of [2, 4] int32";
        let verdict = compare(&[call(&[1, 2], &[1, 3]), call(&[9, 4], &[2, 4])], &ranks);
        assert_eq!(verdict, CallAgreement::Mismatch(text.into()));
    }
}
