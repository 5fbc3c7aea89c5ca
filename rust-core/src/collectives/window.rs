//! Memory to which every member of a group contributes a part. Each member can access the parts of its host's members.
//! A reduction over [`super::Request::AllReduceWindow`] reads the peers' values in place and writes the result to its
//! destination.

use super::{Group, Request, algorithms};
use crate::buffer::{DType, Device, TensorView};
use crate::error::{Error, Result};
use crate::transport::shm::segment::SharedSegment;

use super::call::Call;

/// One allocation per member, of equal size, zeroed. It is freed with its last handle; a request that uses it holds
/// one.
#[derive(Debug)]
pub struct Window {
    /// The group that created it, and its number in that group.
    group: u64,
    number: u64,
    bytes: usize,
    me: usize,
    parts: Parts,
}

#[derive(Debug)]
enum Parts {
    /// Parts of the members of this host, by member.
    Visible(Vec<Option<SharedSegment>>),
    /// Without shared memory: this member's part only.
    Own(SharedSegment),
}

impl Window {
    /// Creates window `number`. Every member calls it with the same number and size.
    pub(crate) fn create(number: u64, bytes: usize, group: &Group<'_>) -> Result<Self> {
        let (me, size) = (group.members.me, group.members.size());
        // An empty mapping is not possible. Rounding up keeps every address valid.
        let room = bytes.max(1).next_multiple_of(4096);
        let made = SharedSegment::create("opensmd-window", room);
        if group.memory.is_none() && group.hosts.is_none() {
            return made.map(|segment| Self { group: group.id, number, bytes, me, parts: Parts::Own(segment) });
        }
        // All members learn of each other's success before any of them uses the window.
        let mut own = [0u64; 4];
        if let Ok(segment) = &made {
            let [pid, fd, bytes] = segment.address();
            own = [1, pid, fd, bytes];
        }
        let all = all_gather(own, group)?;
        let attached = agree_on(made, group, &all).and_then(|segment| {
            let mut own = Some(segment);
            let is_here = |rank| group.hosts.is_none_or(|hosts| hosts.map.host_of(rank) == hosts.map.host_of(me));
            let attach = |rank: usize| match own.take_if(|_| rank == me) {
                Some(segment) => Ok(Some(segment)),
                None if !is_here(rank) => Ok(None),
                None => SharedSegment::attach([all[rank][1], all[rank][2], all[rank][3]], room).map(Some),
            };
            (0..size).map(attach).collect::<Result<Vec<_>>>()
        });
        let all = all_gather([u64::from(attached.is_ok()), 0, 0, 0], group)?;
        let mut segments = agree_on(attached, group, &all)?;
        segments[me].iter_mut().for_each(SharedSegment::close_descriptor);
        Ok(Self { group: group.id, number, bytes, me, parts: Parts::Visible(segments) })
    }

    /// The id of the group that created the window.
    pub(crate) fn group(&self) -> u64 {
        self.group
    }

    /// The number of the window in its group.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// This member's part.
    pub fn local(&self) -> *mut u8 {
        match &self.parts {
            Parts::Visible(segments) => segments[self.me].as_ref().expect("the own part is there").start(),
            Parts::Own(segment) => segment.start(),
        }
    }

    /// Size of each part, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The part of member `rank`, if it is on this host.
    pub fn peer(&self, rank: usize) -> Option<*mut u8> {
        match &self.parts {
            Parts::Visible(segments) => segments.get(rank)?.as_ref().map(SharedSegment::start),
            Parts::Own(segment) => (rank == self.me).then(|| segment.start()),
        }
    }
}

/// Returns this member's outcome if every member (first word of `all`) has succeeded.
fn agree_on<T>(outcome: Result<T>, group: &Group<'_>, all: &[[u64; 4]]) -> Result<T> {
    match all.iter().position(|member| member[0] != 1) {
        None => outcome,
        Some(culprit) => {
            // All members know of the failure, and none continues.
            group.in_step.set(true);
            outcome?;
            let rank = group.members.ranks[culprit];
            Err(Error::Unsupported(format!("rank {rank} could not map the memory of a window: see its own error")))
        }
    }
}

fn all_gather(own: [u64; 4], group: &Group<'_>) -> Result<Vec<[u64; 4]>> {
    let size = group.members.size();
    let mut own = own;
    let mut all = vec![[0u64; 4]; size];
    // SAFETY: both arrays live until `run` has returned, which completes the operation.
    let request = unsafe {
        Request::AllGather {
            input: TensorView::new(own.as_mut_ptr().cast(), 4, DType::Int64, Device::Cpu, 0)?,
            outputs: all
                .iter_mut()
                .map(|member| TensorView::new(member.as_mut_ptr().cast(), 4, DType::Int64, Device::Cpu, 0))
                .collect::<Result<_>>()?,
        }
    };
    let call = Call::of(&request, group.members.me, size)?.expect("all_gather is a collective");
    algorithms::run(&request, &call, group)?;
    Ok(all)
}
