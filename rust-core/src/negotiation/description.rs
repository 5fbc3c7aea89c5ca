//! What a member asks for under a name, as a value that is compared with what the others ask for.

use std::fmt;

use crate::buffer::{DType, Device};
use crate::collectives::{Call, Kind, ReduceOp, Request, views};
use crate::error::{Error, Result};

/// See the module's text. Members agree if their descriptions are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub(super) struct Description {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: u32,
    /// On CUDA devices.
    pub(super) on_device: bool,
    /// Dimensions, where they are the same on all members; without the first one where members have blocks.
    pub(super) shape: Vec<u64>,
    /// Elements of the members' blocks, where every member knows them all; one number if they are equal.
    pub(super) blocks: Vec<u64>,
    /// Bytes that move, for fusion, where all members know. Follows from the rest.
    pub(super) bytes: u64,
    /// Why the member cannot take part ([`Kind::Poison`]).
    pub(super) message: String,
}

impl Description {
    /// What `request` asks for, of a tensor with the dimensions `shape` (if the caller has them).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Unsupported`] for what member `me` of `size` may not ask for.
    pub(super) fn of(request: &Request, shape: Option<&[u64]>, me: usize, size: usize) -> Result<Self> {
        let call = match request {
            Request::AllReduceWindow { .. } => None,
            _ => Call::describe(request, me, size)?,
        };
        let call = call.ok_or_else(|| Error::InvalidArgument("only collectives on tensors can have a name".into()))?;
        let views = views(request);
        let on_device = views.iter().any(|view| view.device() != Device::Cpu);
        if on_device && views.iter().any(|view| view.device() == Device::Cpu && view.elems() > 0) {
            return Err(Error::InvalidArgument("tensors in CPU memory and on a device are mixed".into()));
        }
        let flat = [call.elems as u64];
        let shape = shape.unwrap_or(&flat);
        // Where members' blocks differ, they are compared when the operation runs.
        let same = matches!(call.kind, Kind::AllReduce | Kind::Reduce | Kind::Broadcast);
        if same && shape.iter().product::<u64>() != call.elems as u64 {
            return Err(Error::Internal(format!("a tensor of {} elements came with the shape {shape:?}", call.elems)));
        }
        let shape = match call.kind {
            Kind::AllGather | Kind::ReduceScatter | Kind::AllGatherRows | Kind::AllToAllRows => {
                shape.get(1..).unwrap_or_default().to_vec()
            }
            _ if same => shape.to_vec(),
            _ => Vec::new(),
        };
        let blocks = match call.kind {
            Kind::AllGather => call.received,
            Kind::ReduceScatter => call.sent,
            _ => Vec::new(),
        };
        let elems = if same { call.elems } else { blocks.iter().sum() };
        let bytes = (elems * call.dtype.size()) as u64;
        let mut blocks: Vec<u64> = blocks.into_iter().map(|elems| elems as u64).collect();
        if blocks.windows(2).all(|pair| pair[0] == pair[1]) {
            blocks.truncate(1);
        }
        // That of operations on rows is the size of a row, which the shape says better.
        let on_rows = matches!(call.kind, Kind::AllGatherRows | Kind::AllToAllRows);
        let root = if on_rows { 0 } else { call.root as u32 };
        let (kind, dtype, op) = (call.kind, call.dtype, call.op);
        Ok(Self { kind, dtype, op, root, on_device, shape, blocks, bytes, message: String::new() })
    }

    /// Whether any of the tensors is in a device's memory.
    pub(super) fn is_on_device(request: &Request) -> bool {
        views(request).iter().any(|view| view.device() != Device::Cpu)
    }

    /// The part of a member that cannot take part.
    pub(super) fn poison(message: String) -> Self {
        let (shape, blocks) = Default::default();
        let (kind, dtype, op) = (Kind::Poison, DType::UInt8, ReduceOp::Sum);
        Self { kind, dtype, op, root: 0, on_device: false, shape, blocks, bytes: 0, message }
    }

    /// Neighbours with the same class can be packed together, so answers are sorted by it.
    pub(super) fn class(&self) -> u64 {
        let Self { kind, dtype, op, root, on_device, .. } = self;
        let what = u64::from(*on_device) << 24 | (*kind as u64) << 16 | (*dtype as u64) << 8 | *op as u64;
        what << 32 | u64::from(*root)
    }

    /// What differs, in a few words.
    pub(super) fn difference(&self, other: &Self) -> &'static str {
        match () {
            () if self.kind == Kind::Poison || other.kind == Kind::Poison => "a rank cannot take part",
            () if self.kind != other.kind => "different operations",
            () if self.dtype != other.dtype => "different element types",
            () if self.op != other.op => "different reductions",
            () if self.root != other.root => "different roots",
            () if self.on_device != other.on_device => "CPU and device memory",
            () => "different shapes",
        }
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, root, shape, blocks, .. } = self;
        let name = kind.name();
        let op = format!("{:?}", self.op).to_lowercase();
        match kind {
            Kind::Poison => return write!(f, "an error ({})", self.message),
            Kind::Barrier => f.write_str(name)?,
            Kind::AllReduce => write!(f, "{name}({op}) of {dtype} {shape:?}")?,
            Kind::Reduce => write!(f, "{name}({op}) of {dtype} {shape:?} to rank {root} of the group")?,
            Kind::Broadcast => write!(f, "{name} of {dtype} {shape:?} from rank {root} of the group")?,
            Kind::AllGather => write!(f, "{name} of {dtype}, blocks of {blocks:?} elements, rows of {shape:?}")?,
            Kind::ReduceScatter => {
                write!(f, "{name}({op}) of {dtype}, blocks of {blocks:?} elements, rows of {shape:?}")?;
            }
            Kind::AllGatherRows | Kind::AllToAllRows => write!(f, "{name} of {dtype}, rows of {shape:?}")?,
            Kind::Gather => write!(f, "{name} of {dtype} to rank {root} of the group")?,
            Kind::Scatter => write!(f, "{name} of {dtype} from rank {root} of the group")?,
            _ => write!(f, "{name} of {dtype}")?,
        }
        f.write_str(if self.on_device { " on a device" } else { "" })
    }
}
