//! The description of a named call, which is compared between members.

use std::fmt;

use super::factors::Factors;

use crate::buffer::{DType, Device, ReduceOp};
use crate::collectives::{Call, Kind, Request, views};
use crate::error::{Error, Result};

/// The properties of a named operation that all members compare. Members agree if their descriptions are equal.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Description {
    pub(super) kind: Kind,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: u32,
    /// Whether the tensors are on CUDA devices.
    pub(super) on_device: bool,
    /// Dimensions of the tensor. Where each member has a block, without the first dimension, which may differ.
    pub(super) shape: Vec<u64>,
    /// Numbers of elements of the members' blocks, where every member knows all of them; one number if they are
    /// equal.
    pub(super) blocks: Vec<u64>,
    /// Bytes that are transferred, for fusion, where all members know them. Derived from the other fields.
    pub(super) bytes: u64,
    /// The reason why the member cannot take part ([`Kind::Poison`]), or names of parameters, which are not compared
    /// ([`Kind::Presence`]).
    pub(super) message: String,
    /// For [`Kind::Presence`]: whether all gradients of the step have been submitted.
    pub(super) is_last: bool,
    /// Prescale and postscale factors.
    pub(super) factors: Factors,
    /// The second and later collectives of a group, which run together or not at all. The other fields describe the
    /// first one.
    pub(super) more: Vec<Description>,
}

impl PartialEq for Description {
    fn eq(&self, other: &Self) -> bool {
        let key = |it: &Self| {
            let Self { kind, dtype, op, root, on_device, bytes, is_last, factors, .. } = *it;
            (kind, dtype, op, root, on_device, bytes, is_last, factors)
        };
        key(self) == key(other)
            && (self.shape == other.shape && self.blocks == other.blocks && self.more == other.more)
            && (self.message == other.message || self.kind == Kind::Presence)
    }
}

impl Eq for Description {}

impl Description {
    /// The description of `request`, for a tensor with the dimensions `shape` (if the caller knows them).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Unsupported`] if the request of member `me` of `size` is invalid.
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
        // If members' blocks differ in size, they are compared when the operation runs.
        let same = matches!(call.kind, Kind::AllReduce | Kind::Adasum | Kind::Reduce | Kind::Broadcast);
        if same && shape.iter().product::<u64>() != call.elems as u64 {
            return Err(Error::Internal(format!("a tensor of {} elements came with the shape {shape:?}", call.elems)));
        }
        let shape = match call.kind {
            Kind::AllGather | Kind::AllGatherRows | Kind::AllToAllRows => shape.get(1..).unwrap_or_default().to_vec(),
            Kind::ReduceScatter => shape.to_vec(),
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
        // For operations on rows, this is the size of a row, which follows from the shape.
        let on_rows = matches!(call.kind, Kind::AllGatherRows | Kind::AllToAllRows);
        let root = if on_rows { 0 } else { call.root as u32 };
        let (kind, dtype, op) = (call.kind, call.dtype, call.op);
        let (message, factors, more) = Default::default();
        let is_last = false;
        Ok(Self { kind, dtype, op, root, on_device, shape, blocks, bytes, message, is_last, factors, more })
    }

    /// The description of a group of collectives that run together; at least one.
    ///
    /// # Errors
    /// As [`Description::of`], for any of them; [`Error::InvalidArgument`] for factors that do not apply to the
    /// operation.
    pub(super) fn of_all(
        tensors: &[(Request, Option<Vec<u64>>)],
        factors: Factors,
        me: usize,
        size: usize,
    ) -> Result<Self> {
        let describe = |(request, shape): &(Request, Option<Vec<u64>>)| {
            let description = Self::of(request, shape.as_deref(), me, size)?;
            factors.check(description.dtype, description.on_device)?;
            if description.on_device && description.kind == Kind::Adasum {
                return Err(Error::Unsupported("Adasum runs on tensors in CPU memory only".into()));
            }
            Ok(Self { factors, ..description })
        };
        let mut all = tensors.iter().map(describe).collect::<Result<Vec<_>>>()?.into_iter();
        let first = all.next().ok_or_else(|| Error::Internal("a group of no collectives".into()))?;
        if let Some(other) = all.as_slice().iter().find(|other| other.on_device != first.on_device) {
            return Err(Error::InvalidArgument(format!("tensors of a group must be on same device: {first}, {other}")));
        }
        Ok(Self { more: all.collect(), ..first })
    }

    /// Each collective of a group.
    pub(super) fn each(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(&self.more)
    }

    /// Bytes that are transferred in total.
    pub(super) fn all_bytes(&self) -> u64 {
        self.each().map(|description| description.bytes).sum()
    }

    /// Whether any of the tensors is in a device's memory.
    pub(super) fn is_on_device(request: &Request) -> bool {
        views(request).iter().any(|view| view.device() != Device::Cpu)
    }

    /// The description for a member that cannot take part.
    pub(super) fn poison(message: String) -> Self {
        let (shape, blocks, factors, more) = Default::default();
        let (kind, dtype, op) = (Kind::Poison, DType::UInt8, ReduceOp::Sum);
        let (on_device, is_last) = (false, false);
        Self { kind, dtype, op, root: 0, on_device, shape, blocks, bytes: 0, message, is_last, factors, more }
    }

    /// A key of operations that can be packed together; answers are sorted by it, so that they are adjacent.
    pub(super) fn class(&self) -> u64 {
        let Self { kind, dtype, op, root, on_device, .. } = self;
        let what = u64::from(*on_device) << 24 | (*kind as u64) << 16 | (*dtype as u64) << 8 | *op as u64;
        what << 32 | u64::from(*root)
    }

    /// Describes the first difference, in the words of Horovod's errors.
    pub(super) fn difference(&self, other: &Self) -> String {
        if self.kind == Kind::Poison || other.kind == Kind::Poison {
            return "a rank cannot take part".into();
        }
        let (ours, theirs) = (self.each().count(), other.each().count());
        if ours != theirs {
            return format!("Mismatched groups: One rank sent {ours} tensors, but another rank sent {theirs}");
        }
        let at = self.each().zip(other.each()).position(|(one, other)| one.differs_from(other)).unwrap_or(0);
        let (one, other) = (self.each().nth(at).unwrap_or(self), other.each().nth(at).unwrap_or(other));
        let difference = one.own_difference(other);
        if ours == 1 { difference } else { format!("tensor {}of{ours}: {difference}", at + 1) }
    }

    /// Compares two collectives without the rest of their groups.
    fn differs_from(&self, other: &Self) -> bool {
        let key = |it: &Self| {
            let Self { kind, dtype, op, root, on_device, shape, blocks, factors, .. } = it.clone();
            (kind, dtype, op, root, on_device, shape, blocks, factors)
        };
        key(self) != key(other)
    }

    fn own_difference(&self, other: &Self) -> String {
        let reduction = |kind: Kind| matches!(kind, Kind::AllReduce | Kind::Adasum);
        let (name, theirs) = (self.kind.capitals(), other.kind.capitals());
        if self.kind != other.kind && !(reduction(self.kind) && reduction(other.kind)) {
            return format!("Mismatched operations: One rank did an {name}, but another rank did an {theirs}");
        }
        if self.dtype != other.dtype {
            let (one, other) = (self.dtype, other.dtype);
            return format!("Mismatched data types: One rank had type {one}, but another rank had type {other}");
        }
        if self.kind != other.kind || self.op != other.op {
            let (one, other) = (self.reduction(), other.reduction());
            return format!(
                "Mismatched reduction operation: One rank specified {one}, but another rank specified {other}"
            );
        }
        if self.root != other.root {
            let (one, other) = (self.root, other.root);
            return format!(
                "Mismatched {name} root ranks: One rank specified root rank {one}, but another rank specified root rank {other}"
            );
        }
        if self.on_device != other.on_device {
            return format!(
                "Mismatched {name} CPU/GPU device selection: One rank uses a GPU, but another rank the CPU"
            );
        }
        if self.factors != other.factors {
            let (one, other) = (self.factors, other.factors);
            return format!(
                "Mismatched prescale and/or postscale factors: One rank has {one}, but another rank has {other}"
            );
        }
        let of = format!("Mismatched {name} tensor shapes: One rank sent a tensor");
        let (one, other) = (&self.shape, &other.shape);
        if !matches!(self.kind, Kind::AllGather | Kind::AllGatherRows | Kind::AllToAllRows) {
            return format!("{of} of shape {one:?}, but another rank sent a tensor of shape {other:?}");
        }
        let (ranks, others) = (one.len() + 1, other.len() + 1);
        match one.iter().zip(other).position(|(one, other)| one != other) {
            _ if ranks != others => {
                format!("{of} of rank {ranks}, but another rank sent a tensor of rank {others}")
            }
            Some(at) => {
                let (dimension, one, other) = (at + 1, one[at], other[at]);
                format!(
                    "{of} with dimension {dimension} equal to {one}, but another rank sent a tensor with dimension \
                     {dimension} equal to {other}"
                )
            }
            None => "different blocks".into(),
        }
    }

    /// The reduction's name.
    fn reduction(&self) -> String {
        if self.kind == Kind::Adasum { "adasum".into() } else { format!("{:?}", self.op).to_lowercase() }
    }
}

/// Number of collectives of a group that an error lists.
const MAX_LISTED: usize = 4;

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, dtype, root, shape, blocks, more, .. } = self;
        if !more.is_empty() {
            write!(f, "a group of {} [", more.len() + 1)?;
            for (at, one) in self.each().enumerate().take(MAX_LISTED) {
                let alone = Self { more: Vec::new(), ..one.clone() };
                write!(f, "{}{alone}", if at == 0 { "" } else { ", " })?;
            }
            return f.write_str(if more.len() < MAX_LISTED { "]" } else { ", ..]" });
        }
        let name = kind.name();
        let op = format!("{:?}", self.op).to_lowercase();
        match kind {
            Kind::Poison => return write!(f, "an error ({})", self.message),
            Kind::Barrier => f.write_str(name)?,
            Kind::Presence => return write!(f, "a step with {} gradients", blocks.len()),
            Kind::AllReduce => write!(f, "{name}({op}) of {dtype} {shape:?}")?,
            Kind::Adasum => write!(f, "{name} of {dtype} {shape:?}")?,
            Kind::Reduce => write!(f, "{name}({op}) of {dtype} {shape:?} to rank {root} of the group")?,
            Kind::Broadcast => write!(f, "{name} of {dtype} {shape:?} from rank {root} of the group")?,
            Kind::AllGather => write!(f, "{name} of {dtype}, blocks of {blocks:?} elements, rows of {shape:?}")?,
            Kind::ReduceScatter => {
                write!(f, "{name}({op}) of {dtype} {shape:?}, blocks of {blocks:?} elements")?;
            }
            Kind::AllGatherRows | Kind::AllToAllRows => write!(f, "{name} of {dtype}, rows of {shape:?}")?,
            Kind::Gather => write!(f, "{name} of {dtype} to rank {root} of the group")?,
            Kind::Scatter => write!(f, "{name} of {dtype} from rank {root} of the group")?,
            _ => write!(f, "{name} of {dtype}")?,
        }
        if !self.factors.are_one() {
            write!(f, ", {}", self.factors)?;
        }
        f.write_str(if self.on_device { " on a device" } else { "" })
    }
}
