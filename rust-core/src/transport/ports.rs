//! Ports: through them, groups pass frames for other hosts to a carrier (MPI or TCP), and receive frames from it.
//!
//! ```text
//!   port of a group --send--> carrier .. network .. carrier --take--> inbox of a port --> mailbox
//!   (any thread)                        (carrier's thread, or a caller that receives)
//! ```
//!
//! The carrier's thread and a caller that receives also make progress for mailboxes ([`MailboxProgress`]), so that
//! messages move while all other threads of the process compute.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::Members;
use super::mailbox::{self, Header};
use super::zero_copy::ZeroCopyTransfer;
use crate::error::Error;
use crate::world::{Departure, Monitor};

/// Prefix of a frame on the wire: key of the group, receiver and sender in the group, header of the frame.
const PREFIX_WORDS: usize = 8;
pub(super) const PREFIX_BYTES: usize = PREFIX_WORDS * 8;
/// Payload of a frame: large enough that a frame's fixed cost is small compared to its transfer time at 100 Gbit/s.
pub(crate) const PAYLOAD_BYTES: usize = 256 << 10;
/// The longest frame, with its prefix.
pub(super) const FRAME_BYTES: usize = PREFIX_BYTES + PAYLOAD_BYTES;

/// Number of buffers that are kept for reuse.
const SPARE_BUFFERS: usize = 64;

/// Key of a port: group and member.
pub(super) type PortKey = (u64, usize);

/// Moves frames between the processes of a job, for all groups of this process.
pub(crate) trait Carrier: Send + Sync {
    /// The carrier's name in messages.
    fn name(&self) -> &'static str;
    /// The inboxes for arriving frames.
    fn ports(&self) -> &Ports;
    /// Takes the frame of `prefix` and `payload` for process `to`; never waits. Returns false, without taking it, if
    /// there is no space; the port `from` is then notified ([`MailboxProgress`]) when there is.
    fn send(&self, from: PortKey, to: usize, prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> bool;
    /// A caller begins or ends to wait for frames that the carrier's thread receives, usually asleep.
    fn await_thread(&self, waits: bool);
    /// A caller begins or stops to wait for frames and to receive them by [`Carrier::receive`], so that the carrier's
    /// thread need not be woken for them. Returns false if this carrier only receives by its thread.
    fn receives(&self, _begins: bool) -> bool {
        false
    }
    /// Receives what has arrived, for all groups of the process, unless another thread does. Waits for nothing. Returns
    /// whether there was anything.
    fn receive(&self) -> bool {
        false
    }
    /// Whether it moves long messages without copies ([`super::zero_copy`]).
    fn is_zero_copy(&self) -> bool {
        false
    }
    /// Starts to receive a message without copies; never waits. Returns the key for its sender, or none if the carrier
    /// cannot do it now.
    ///
    /// # Safety
    /// The memory stays valid, and no other code accesses it, until the port is notified
    /// ([`MailboxProgress::end_transfer`]) or [`Carrier::has_transfers`] is false.
    unsafe fn start_receive(&self, _transfer: ZeroCopyTransfer) -> Option<u64> {
        None
    }
    /// Starts to send a message without copies to the receiver that has sent `key`; never waits. Returns false if no
    /// receiver can have sent this key.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until the port is notified ([`MailboxProgress::end_transfer`]) or
    /// [`Carrier::has_transfers`] is false.
    unsafe fn start_send(&self, _transfer: ZeroCopyTransfer, _key: u64) -> bool {
        false
    }
    /// Makes progress with transfers for a caller that cancels one; may sleep briefly. `gives_up`: ends the use of the
    /// carrier. Returns false if transfers access no memory any more, because the carrier is not used any more.
    fn has_transfers(&self, _gives_up: bool) -> bool {
        false
    }
    /// Waits until the network has accepted all queued frames, while it works and at most until the deadline.
    fn flush(&self, deadline: Instant);
    /// Whether the death of any process of the job stops all communication, whatever processes frames are for.
    fn needs_all_members(&self) -> bool;
}

/// Makes progress for a group for which frames have arrived, or whose queue has space again.
pub(crate) trait MailboxProgress: Send + Sync {
    fn arrived(&self);
    /// Starts to receive the payload of a frame that is arriving from member `from`, after all earlier ones. Returns a
    /// ticket, or none if no receive waits for it.
    fn begin_direct_receive(&self, from: usize, header: Header) -> Option<u64>;
    /// Passes the memory for the payload to `read`, which must not block.
    fn fill(&self, from: usize, ticket: u64, read: &mut dyn FnMut(*mut u8));
    /// The payload is complete and authentic, or it will never be.
    fn end_direct_receive(&self, from: usize, ticket: u64, is_whole: bool);
    /// The transfer of this message has ended; a receive with so many bytes.
    fn end_transfer(&self, message: u64, bytes: usize);
}

/// A payload that is being read to the memory of its receive.
pub(super) struct DirectReceiveHandle {
    mailbox: Arc<dyn MailboxProgress>,
    from: usize,
    ticket: u64,
    bytes: usize,
    is_whole: bool,
}

impl DirectReceiveHandle {
    /// Passes the payload's memory to `read`.
    pub(super) fn fill(&mut self, mut read: impl FnMut(&mut [u8])) {
        let bytes = self.bytes;
        self.mailbox.fill(self.from, self.ticket, &mut |place| {
            // SAFETY: a mailbox gives memory of this length, which no other code uses during the call.
            read(unsafe { std::slice::from_raw_parts_mut(place, bytes) });
        });
    }

    #[cfg(test)]
    pub(super) fn of_mailbox(mailbox: Arc<dyn MailboxProgress>, bytes: usize) -> Self {
        Self { mailbox, from: 0, ticket: 0, bytes, is_whole: false }
    }

    /// Ends the receive of a payload that is complete and authentic.
    pub(super) fn complete(mut self) {
        self.is_whole = true;
    }
}

impl Drop for DirectReceiveHandle {
    fn drop(&mut self) {
        self.mailbox.end_direct_receive(self.from, self.ticket, self.is_whole);
    }
}

/// The words of a frame's prefix: group, receiver, sender, and the header.
fn words(prefix: &[u8; PREFIX_BYTES]) -> [u64; PREFIX_WORDS] {
    let mut words = [0u64; PREFIX_WORDS];
    for (word, chunk) in words.iter_mut().zip(prefix.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*chunk);
    }
    words
}

/// The length of the frame that begins with `prefix`, as its sender states it.
pub(super) fn frame_bytes(prefix: &[u8; PREFIX_BYTES]) -> Option<usize> {
    let [_, _, _, ref header @ ..] = words(prefix);
    usize::try_from(header[4]).ok()?.checked_add(PREFIX_BYTES)
}

/// Buffers for reuse, with their old contents.
pub(super) struct Pool {
    spare: Mutex<Vec<Vec<u8>>>,
    /// Shorter buffers are not kept.
    min_bytes: usize,
}

impl Pool {
    pub(super) fn new(min_bytes: usize) -> Self {
        Self { spare: Mutex::default(), min_bytes }
    }

    pub(super) fn take(&self) -> Vec<u8> {
        self.spare.lock().pop().unwrap_or_default()
    }

    pub(super) fn put(&self, buffer: Vec<u8>) {
        let mut spare = self.spare.lock();
        if spare.len() < SPARE_BUFFERS && buffer.len() >= self.min_bytes {
            spare.push(buffer);
        }
    }
}

struct Frame {
    header: Header,
    buffer: Vec<u8>,
    /// Offset of the payload in the buffer.
    payload: usize,
}

/// Frames that have arrived for a member.
struct Inbox {
    /// By sender.
    frames: Mutex<Vec<VecDeque<Frame>>>,
    /// Their number, so that looking for frames where there are none takes no lock. The thread that adds a frame
    /// notifies the mailbox afterwards, so a frame that an early read misses is found soon.
    count: AtomicUsize,
}

impl Inbox {
    fn new(members: usize) -> Self {
        Self { frames: Mutex::new((0..members).map(|_| VecDeque::new()).collect()), count: AtomicUsize::new(0) }
    }

    fn put(&self, from: usize, frame: Frame) {
        self.frames.lock()[from].push_back(frame);
        self.count.fetch_add(1, Ordering::Release);
    }

    fn take(&self, from: usize) -> Option<Frame> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let frame = self.frames.lock()[from].pop_front()?;
        self.count.fetch_sub(1, Ordering::Relaxed);
        Some(frame)
    }
}

struct OpenPort {
    inbox: Arc<Inbox>,
    /// Process number of each member.
    processes: Arc<[usize]>,
    mailbox_progress: Option<Weak<dyn MailboxProgress>>,
    monitor: Arc<Monitor>,
}

#[derive(Default)]
struct PortTable {
    open: HashMap<PortKey, OpenPort>,
    /// Frames for ports that are not open yet, with the process and the member that sent them.
    early: HashMap<PortKey, Vec<(usize, usize, Frame)>>,
    /// Ports that were closed; their late frames are dropped.
    closed: HashSet<PortKey>,
}

/// The ports of a process.
pub(crate) struct Ports {
    table: Mutex<PortTable>,
    /// Receive buffers, long enough for any frame.
    pub(super) buffers: Pool,
    /// Processes that have sent a key to a port that was closed, with the key. Their transfers wait for a message (ZCP-2).
    unanswered: Mutex<Vec<(usize, u64)>>,
}

/// Whether the process of `rank` has died or failed.
pub(super) fn departed(monitor: &Monitor, rank: usize) -> bool {
    !matches!(monitor.departure(rank), None | Some(Departure::Left))
}

impl OpenPort {
    /// Whether a frame comes from the process of its stated sender (TRA-2); other frames are dropped.
    fn deliver(&self, source: usize, from: usize, frame: Frame) {
        if self.processes.get(from) == Some(&source) {
            self.inbox.put(from, frame);
        }
    }
}

impl Ports {
    /// For a carrier with buffers of this length.
    pub(super) fn new(buffer_bytes: usize) -> Self {
        Self { table: Mutex::default(), buffers: Pool::new(buffer_bytes), unanswered: Mutex::default() }
    }

    /// From now on, notifies `mailbox_progress` of frames for the port of member `me` in the group with `key`.
    pub(crate) fn attach(&self, key: u64, me: usize, mailbox_progress: Weak<dyn MailboxProgress>) {
        if let Some(open) = self.table.lock().open.get_mut(&(key, me)) {
            open.mailbox_progress = Some(mailbox_progress);
        }
    }

    /// Puts the frame in `buffer` into its inbox: `bytes` bytes from `start` on, from process `source`. Returns its
    /// port.
    pub(super) fn take(&self, source: usize, buffer: Vec<u8>, start: usize, bytes: usize) -> Option<PortKey> {
        // A header that states more bytes than arrived would expose an earlier frame's data in the buffer.
        let came = buffer.get(start..start + bytes)?;
        let (prefix, payload) = came.split_first_chunk::<PREFIX_BYTES>()?;
        let [group, to, from, ref header @ ..] = words(prefix);
        let header: Header = *header;
        if header[4] > payload.len() as u64 {
            return None;
        }
        let key = (group, to as usize);
        let frame = Frame { header, buffer, payload: start + PREFIX_BYTES };
        let mut table = self.table.lock();
        match table.open.get(&key) {
            Some(open) => open.deliver(source, from as usize, frame),
            None if table.closed.contains(&key) => {
                self.note_unanswered(source, &frame.header);
                return None;
            }
            None => table.early.entry(key).or_default().push((source, from as usize, frame)),
        }
        Some(key)
    }

    /// If a frame for a closed port contains a key, records that the carrier must answer it (ZCP-2).
    fn note_unanswered(&self, source: usize, header: &Header) {
        if let Some(key) = mailbox::key_of(header) {
            self.unanswered.lock().push((source, key));
        }
    }

    pub(super) fn has_unanswered(&self) -> bool {
        !self.unanswered.lock().is_empty()
    }

    /// Takes the keys that the carrier is to answer with empty messages.
    pub(super) fn take_unanswered(&self) -> Vec<(usize, u64)> {
        std::mem::take(&mut self.unanswered.lock())
    }

    /// Finds the memory for the payload of `bytes` bytes that follows `prefix`, from process `source`, if a receive
    /// waits for it.
    pub(super) fn begin_direct_receive(
        &self,
        source: usize,
        prefix: &[u8; PREFIX_BYTES],
        bytes: usize,
    ) -> Option<DirectReceiveHandle> {
        let [group, to, from, ref header @ ..] = words(prefix);
        let (header, from): (Header, usize) = (*header, from as usize);
        let mailbox = {
            let table = self.table.lock();
            let open = table.open.get(&(group, to as usize))?;
            let is_valid = header[4] == bytes as u64 && open.processes.get(from) == Some(&source);
            open.mailbox_progress.as_ref().filter(|_| is_valid)?.upgrade()?
        };
        let ticket = mailbox.begin_direct_receive(from, header)?;
        Some(DirectReceiveHandle { mailbox, from, ticket, bytes, is_whole: false })
    }

    /// Notifies a port of the end of a transfer.
    pub(super) fn end_transfer(&self, key: PortKey, message: u64, bytes: usize) {
        let mailbox = self.table.lock().open.get(&key).and_then(|open| open.mailbox_progress.as_ref()?.upgrade());
        if let Some(mailbox) = mailbox {
            mailbox.end_transfer(message, bytes);
        }
    }

    /// Notifies these ports that frames have arrived, or that there is space for theirs.
    pub(super) fn progress(&self, keys: impl IntoIterator<Item = PortKey>) {
        for key in keys {
            let mailbox_progress = self.table.lock().open.get(&key).and_then(|open| open.mailbox_progress.clone());
            if let Some(mailbox_progress) = mailbox_progress.and_then(|mailbox_progress| mailbox_progress.upgrade()) {
                mailbox_progress.arrived();
            }
        }
    }

    /// Runs the body of the carrier's thread. If it panics, no frame can arrive any more, so every wait of groups
    /// with a port ends with the panic's text.
    pub(super) fn serve(&self, name: &str, work: impl FnOnce()) {
        if let Some(error) = Error::of_thread(name, work) {
            self.monitors().iter().for_each(|monitor| monitor.close(&error.text()));
        }
    }

    /// The monitors of the groups that have a port.
    pub(super) fn monitors(&self) -> Vec<Arc<Monitor>> {
        self.table.lock().open.values().map(|open| open.monitor.clone()).collect()
    }

    /// Whether a process of a group with a port has died or failed.
    pub(super) fn somebody_departed(&self) -> bool {
        let table = self.table.lock();
        table.open.values().any(|open| {
            open.monitor.generation() != 0 && open.processes.iter().any(|rank| departed(&open.monitor, *rank))
        })
    }
}

/// A group's connection to other hosts.
pub(super) struct Port {
    carrier: Arc<dyn Carrier>,
    key: PortKey,
    inbox: Arc<Inbox>,
    processes: Arc<[usize]>,
    monitor: Arc<Monitor>,
}

impl Port {
    /// Opens the port of this process in the group with `key`, as member `members.me`; `processes` are the process
    /// numbers of the members.
    pub(super) fn open(
        carrier: &Arc<dyn Carrier>,
        key: u64,
        members: &Members,
        processes: Arc<[usize]>,
        monitor: Arc<Monitor>,
    ) -> Self {
        let inbox = Arc::new(Inbox::new(processes.len()));
        let key = (key, members.me);
        let mut table = carrier.ports().table.lock();
        let open = OpenPort {
            inbox: inbox.clone(),
            processes: processes.clone(),
            mailbox_progress: None,
            monitor: monitor.clone(),
        };
        for (source, from, frame) in table.early.remove(&key).unwrap_or_default() {
            open.deliver(source, from, frame);
        }
        table.open.insert(key, open);
        drop(table);
        Self { carrier: carrier.clone(), key, inbox, processes, monitor }
    }

    /// As [`push`](super::mailbox::Link::push) of a link.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool {
        let process = self.processes[to];
        // No frame reaches that process any more (MPI-3); the message's wait ends with the departure.
        if self.monitor.generation() != 0 && departed(&self.monitor, process) {
            return true;
        }
        let length = header[4] as usize;
        assert!(length <= PAYLOAD_BYTES, "a frame holds {PAYLOAD_BYTES} bytes");
        let [a, b, c, d, e] = header;
        let mut prefix = [0; PREFIX_BYTES];
        let words = [self.key.0, to as u64, self.key.1 as u64, a, b, c, d, e];
        for (place, word) in prefix.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        let payload = match length {
            0 => &[],
            // SAFETY: the caller promises `length` readable bytes.
            _ => unsafe { std::slice::from_raw_parts(payload, length) },
        };
        self.carrier.send(self.key, process, &prefix, payload)
    }

    /// As [`pop`](super::mailbox::Link::pop) of a link.
    pub(super) fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
        let Some(frame) = self.inbox.take(from) else { return false };
        take(frame.header, frame.buffer[frame.payload..].as_ptr());
        self.carrier.ports().buffers.put(frame.buffer);
        true
    }

    /// As [`Link::start_receive`](super::mailbox::Link::start_receive).
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn start_receive(&self, from: usize, message: u64, data: *mut u8, bytes: usize) -> Option<u64> {
        let transfer = ZeroCopyTransfer { port: self.key, message, process: self.processes[from], data, bytes };
        // SAFETY: the caller's promise.
        unsafe { self.carrier.start_receive(transfer) }
    }

    /// As [`Link::start_send`](super::mailbox::Link::start_send).
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn start_send(&self, to: usize, key: u64, message: u64, data: *const u8, bytes: usize) -> bool {
        let transfer =
            ZeroCopyTransfer { port: self.key, message, process: self.processes[to], data: data.cast_mut(), bytes };
        // SAFETY: the caller's promise.
        unsafe { self.carrier.start_send(transfer, key) }
    }

    pub(super) fn carrier(&self) -> &dyn Carrier {
        &*self.carrier
    }

    /// While the guard lives, a caller waits for frames.
    pub(super) fn await_thread(&self) -> AwaitsThread<'_> {
        AwaitsThread::begin(&*self.carrier)
    }
}

/// While it lives, a caller waits for frames, awake: it receives what arrives from other hosts instead of the carrier's
/// thread, or that thread polls for it.
pub struct Receiver<'a> {
    carrier: &'a dyn Carrier,
    /// The carrier only receives by its thread.
    by_thread: Option<AwaitsThread<'a>>,
}

impl<'a> Receiver<'a> {
    pub(super) fn begin(carrier: &'a dyn Carrier) -> Self {
        let by_thread = (!carrier.receives(true)).then(|| AwaitsThread::begin(carrier));
        Self { carrier, by_thread }
    }

    /// Whether the carrier's thread receives for the caller.
    pub(super) fn is_by_thread(&self) -> bool {
        self.by_thread.is_some()
    }

    /// Receives what has arrived, without waiting; returns whether there was anything.
    pub fn receive(&self) -> bool {
        self.by_thread.is_none() && self.carrier.receive()
    }
}

impl Drop for Receiver<'_> {
    fn drop(&mut self) {
        if self.by_thread.is_none() {
            self.carrier.receives(false);
        }
    }
}

/// While it lives, a caller waits for frames that the carrier's thread receives.
pub(super) struct AwaitsThread<'a>(&'a dyn Carrier);

impl<'a> AwaitsThread<'a> {
    fn begin(carrier: &'a dyn Carrier) -> Self {
        carrier.await_thread(true);
        Self(carrier)
    }
}

impl Drop for AwaitsThread<'_> {
    fn drop(&mut self) {
        self.0.await_thread(false);
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut table = self.carrier.ports().table.lock();
        table.closed.insert(self.key);
        let open = table.open.remove(&self.key);
        drop(table);
        drop(open);
        for (from, process) in self.processes.iter().enumerate() {
            while let Some(frame) = self.inbox.take(from) {
                self.carrier.ports().note_unanswered(*process, &frame.header);
            }
        }
    }
}
