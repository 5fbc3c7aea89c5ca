//! The exchange by which members find out whether all of them can access each other's memory (PEER-6).

use std::sync::Once;

use super::{HEADER_BYTES, chunks, half_bytes};
use crate::device::{Context, DeviceBuffer, HostMapped, IpcHandle, PeerMemory};
use crate::error::{Error, Result};
use crate::metrics::{self, Fallback};
use crate::world::host;

/// A store in which each member writes one value for a key and reads those of the others.
pub trait MemberStore {
    /// Writes this member's value.
    fn write(&self, what: &str, value: &[u8]) -> Result<()>;
    /// Returns the value of a member, waiting until it is written.
    fn read(&self, what: &str, member: usize) -> Result<Vec<u8>>;
}

/// Serializes a value for [`read`].
pub fn write<T: serde::Serialize>(store: &dyn MemberStore, what: &str, value: &T) -> Result<()> {
    let bytes = postcard::to_stdvec(value)
        .map_err(|error| Error::Internal(format!("`{what}` cannot be serialized: {error}")))?;
    store.write(what, &bytes)
}

/// Parses the value that a member wrote.
pub fn read<T: serde::de::DeserializeOwned>(store: &dyn MemberStore, what: &str, member: usize) -> Result<T> {
    postcard::from_bytes(&store.read(what, member)?)
        .map_err(|error| Error::Internal(format!("`{what}` of member {member} cannot be read: {error}")))
}

/// A member's device and memory, as the other members need them.
#[derive(serde::Serialize, serde::Deserialize)]
struct Offer {
    host: String,
    process: u32,
    pci: String,
    bytes: u64,
    handle: IpcHandle,
}

/// Memory that all members have mapped.
pub(super) struct MappedMemory {
    pub(super) arena: DeviceBuffer,
    pub(super) control: HostMapped,
    /// The arenas of the other members, in their order.
    pub(super) mapped: Vec<PeerMemory>,
    /// Largest message of the group: the smallest limit that a member offered.
    pub(super) bytes: usize,
}

/// Shares an arena for messages of `peer_bytes` with the other members, if all of them can and `ready` says that this
/// one can. Otherwise returns `None` on all members, with the reason in the log.
pub(super) fn share(
    context: &'static Context,
    me: usize,
    size: usize,
    peer_bytes: usize,
    store: &dyn MemberStore,
    ready: impl FnOnce() -> Result<()>,
) -> Result<Option<MappedMemory>> {
    // Every member publishes a value in both rounds, so that none waits for a member that gave up.
    let own = ready().and_then(|()| offer(context, peer_bytes, size));
    write(store, "offer", &own.as_ref().map(|(_, _, offer)| offer).map_err(Error::text))?;
    let offers: Vec<Result<Offer, String>> = (0..size).map(|rank| read(store, "offer", rank)).collect::<Result<_>>()?;
    let is_on_several_hosts = {
        let mut hosts = offers.iter().flatten().map(|offer| &offer.host);
        let first = hosts.next();
        hosts.any(|host| Some(host) != first)
    };
    let shared = own.map_err(|error| error.text()).and_then(|(arena, control, _)| {
        let offers: Vec<&Offer> =
            offers.iter().map(|offer| offer.as_ref().map_err(String::clone)).collect::<Result<_, _>>()?;
        let mapped = map(context, me, &offers)?;
        let bytes = offers.iter().map(|offer| offer.bytes as usize).min().unwrap_or(0);
        Ok(MappedMemory { arena, control, mapped, bytes })
    });
    write(store, "mapped", &shared.as_ref().map(drop).map_err(String::clone))?;
    for rank in 0..size {
        if let Err(why) = read::<Result<(), String>>(store, "mapped", rank)? {
            report(me, &format!("member {rank}: {why}"), !is_on_several_hosts && peer_bytes > 0);
            return Ok(None);
        }
    }
    shared.map(Some).map_err(Error::Internal)
}

/// Logs why messages of all sizes go through NCCL. Between hosts, and where a setting says so, they always do; elsewhere
/// it is a fallback, of which member 0 warns.
fn report(me: usize, why: &str, is_fallback: bool) {
    static WARNED: Once = Once::new();
    let text = format!("messages between GPUs go through NCCL, which takes longer for small ones: {why}");
    if is_fallback {
        metrics::note_fallback(Fallback::NcclWithoutPeers);
    }
    if is_fallback && me == 0 {
        WARNED.call_once(|| tracing::warn!("{text}"));
    } else {
        tracing::info!("{text}");
    }
}

fn offer(context: &'static Context, peer_bytes: usize, size: usize) -> Result<(DeviceBuffer, HostMapped, Offer)> {
    let arena =
        DeviceBuffer::zeroed(context, HEADER_BYTES + 2 * half_bytes(peer_bytes, size) + chunks::slots_bytes(size))?;
    let control = HostMapped::zeroed(context, 3)?;
    let offer = Offer {
        host: host::identity(),
        process: std::process::id(),
        pci: context.properties().pci.clone(),
        bytes: peer_bytes as u64,
        handle: arena.export()?,
    };
    Ok((arena, control, offer))
}

/// Maps the arenas of all other members, in their order, if they can be accessed.
fn map(context: &'static Context, me: usize, offers: &[&Offer]) -> Result<Vec<PeerMemory>, String> {
    let own = offers[me];
    let mut mapped = Vec::new();
    for (rank, peer) in offers.iter().enumerate().filter(|(rank, _)| *rank != me) {
        if peer.host != own.host {
            return Err(format!("member {rank} is on another host"));
        }
        if peer.process == own.process {
            return Err(format!("member {rank} is in the same process"));
        }
        if !context.reaches(&peer.pci).map_err(|error| error.text())? {
            return Err(format!("the device at {} does not reach the one at {} of member {rank}", own.pci, peer.pci));
        }
        mapped.push(PeerMemory::open(context, &peer.handle).map_err(|error| error.text())?);
    }
    Ok(mapped)
}
