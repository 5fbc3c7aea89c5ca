//! An incoming connection: the other process proves the job's secret, names its rank, and then sends frames. This
//! side is the handshake's server.

use std::io::{ErrorKind, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;

use crate::error::Result;
use crate::transport::ports::{DirectReceiveHandle, FRAME_BYTES, PREFIX_BYTES, Pool};
use crate::world::rendezvous::JobKey;
use crate::world::rendezvous::frame::{FrameError, HEAD_BYTES, HEADER_BYTES, Verifier};
use crate::world::rendezvous::frame_tag::{FrameTag, TagOptions};
use crate::world::rendezvous::handshake::{ANSWER_BYTES, Challenge, REFUSAL};
use crate::world::{fork, socket};

/// The longest frame with its header.
pub(super) const BUFFER_BYTES: usize = HEADER_BYTES + FRAME_BYTES;
/// Bytes to read while the length of the next frame is not known: enough for many small frames, or for the start of a
/// large one, whose remainder is then read directly to its final place.
const FIRST_BYTES: usize = 4 << 10;
/// Frames up to this length are copied out of the buffer, so that each does not occupy a buffer of full length.
const SMALL_BYTES: usize = FIRST_BYTES;
/// Payloads that are read in pieces are added to the tag in multiples of this size, while they are in the cache.
const TAGGED_BYTES: usize = 64 << 10;
/// Largest number of bytes to read from one connection before the others are served.
const READ_BATCH: usize = 1 << 20;

/// Identifies the sender of a connection: the session, its rank, and the rank to which it wants to send.
pub(super) type Hello = [u64; 3];
const HELLO_BYTES: usize = size_of::<Hello>();

/// The payload of a connection's first frame.
pub(super) fn encode_hello(words: Hello) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    bytes
}

/// A frame for a port.
pub(super) struct TcpFrame {
    pub(super) buffer: Vec<u8>,
    /// Offset after its header, and length.
    pub(super) start: usize,
    pub(super) bytes: usize,
}

/// Handles a frame of a connection, or the introduction of its rank. An error closes the connection; its text is a
/// predicate that follows "it".
pub(super) type Take<'a> = dyn FnMut(&mut Option<usize>, TcpFrame) -> Result<(), String> + 'a;

/// Finds the memory for a payload of a connection, given the sender's rank, the frame's prefix and the length behind
/// it.
pub(super) type BeginDirectReceive<'a> =
    dyn FnMut(Option<usize>, &[u8; PREFIX_BYTES], usize) -> Option<DirectReceiveHandle> + 'a;

/// How much to read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadExtent {
    /// About [`READ_BATCH`] bytes at most.
    Batch,
    /// No more after the end of a frame.
    Frame,
}

/// The result of reading.
pub(super) enum ReadOutcome {
    /// All available bytes were read, or some may be left.
    Pause,
    More,
    /// The other process closed the connection between two frames.
    End,
}

enum InboundStage {
    Unauthenticated { challenge: Challenge, answer: Vec<u8>, tags: TagOptions },
    Open(Reader),
}

/// An accepted connection: unauthenticated during the handshake, then the source of one rank's frames.
pub(super) struct InboundConnection {
    /// Declared first, so that it is dropped first.
    _guard: fork::Guard,
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    /// The rank, once it was introduced.
    pub(super) rank: Option<usize>,
    /// Whether the system has announced the end of the connection; received data may still be unread.
    pub(super) ends: bool,
    pub(super) came: Instant,
    stage: InboundStage,
}

impl InboundConnection {
    /// Starts the handshake of an accepted connection, whose frames will have `tags`.
    pub(super) fn new(mut stream: TcpStream, address: SocketAddr, tags: TagOptions) -> Result<Self> {
        let challenge = Challenge::new()?;
        // The send buffer of a new connection has space for the greeting. If not, the other side waits in vain and
        // closes.
        let _ = stream.write(&challenge.greeting());
        let stage = InboundStage::Unauthenticated { challenge, answer: Vec::with_capacity(ANSWER_BYTES), tags };
        Ok(Self {
            _guard: fork::Guard::new(&stream),
            stream,
            address,
            rank: None,
            ends: false,
            came: Instant::now(),
            stage,
        })
    }

    /// Reads available bytes and passes their frames to `take`. An error ends the connection; its text is a predicate
    /// that follows "it".
    pub(super) fn read(
        &mut self,
        key: &JobKey,
        peer_timeout: Duration,
        extent: ReadExtent,
        spare: &Pool,
        take: &mut Take<'_>,
        begin_direct_receive: &mut BeginDirectReceive<'_>,
    ) -> Result<ReadOutcome, String> {
        if let InboundStage::Unauthenticated { challenge, answer, tags } = &mut self.stage {
            let mut piece = [0; ANSWER_BYTES];
            while answer.len() < ANSWER_BYTES {
                match self.stream.read(&mut piece[..ANSWER_BYTES - answer.len()]) {
                    Ok(0) => return Err("closed before it proved the job's secret".to_owned()),
                    Ok(count) => answer.extend_from_slice(&piece[..count]),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(ReadOutcome::Pause),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(format!("was lost: {error}")),
                }
            }
            let answer: &[u8; ANSWER_BYTES] = answer.as_slice().try_into().expect("it has that many bytes");
            let Some((proof, keys)) = challenge.verify(key, answer) else {
                let _ = self.stream.write(&REFUSAL);
                return Err("does not know the job's secret".to_owned());
            };
            socket::configure(&self.stream, peer_timeout).map_err(|error| error.text())?;
            self.stream.write_all(&proof).map_err(|error| format!("was lost: {error}"))?;
            self.stage = InboundStage::Open(Reader::new(Verifier::new(keys.receive, *tags, FRAME_BYTES)));
        }
        let InboundStage::Open(reader) = &mut self.stage else { return Ok(ReadOutcome::Pause) };
        let mut read = 0;
        while read < READ_BATCH {
            let (outcome, room) = reader.read(&mut self.stream, spare);
            match outcome {
                Ok(0) if reader.is_between_frames() => return Ok(ReadOutcome::End),
                Ok(0) => return Err("ended in the middle of a frame".to_owned()),
                Ok(count) => {
                    read += count;
                    let frames = reader.frames;
                    while let Some(frame) = reader.next().map_err(|error| format!("broke the protocol: {error}"))? {
                        take(&mut self.rank, frame)?;
                    }
                    reader.begin_direct_receive(|prefix, bytes| begin_direct_receive(self.rank, prefix, bytes));
                    // The system had no more, and tells when more comes. It does not tell of the end again.
                    if count < room && !self.ends {
                        return Ok(ReadOutcome::Pause);
                    }
                    if extent == ReadExtent::Frame && reader.frames > frames {
                        return Ok(ReadOutcome::More);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(ReadOutcome::Pause),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(format!("was lost: {error}")),
            }
        }
        Ok(ReadOutcome::More)
    }
}

/// Parses the sender from the payload of its first frame.
pub(super) fn parse_hello(frame: &TcpFrame) -> Option<Hello> {
    let bytes = frame.buffer.get(frame.start..frame.start + frame.bytes)?;
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>();
    (bytes.len() == HELLO_BYTES).then(|| words.try_into().ok()).flatten()
}

/// Splits received bytes into frames.
struct Reader {
    verifier: Verifier,
    /// Contains `start..filled`; as long as the longest frame, or empty before the first read.
    buffer: Vec<u8>,
    start: usize,
    filled: usize,
    /// Length of the frame at `start` with its header, once it is known.
    expected: Option<usize>,
    /// Whether memory for this frame's payload was sought.
    sought: bool,
    /// Number of complete frames so far.
    frames: u64,
    direct: Option<Box<DirectFrame>>,
}

/// A frame whose body is read to its final place.
struct DirectFrame {
    header: [u8; HEADER_BYTES],
    receive: DirectReceiveHandle,
    tag: FrameTag,
    /// Bytes of the body: all, those that were read, and those that were added to the tag.
    bytes: usize,
    filled: usize,
    tagged: usize,
}

impl DirectFrame {
    /// Reads the body, and what follows it to `ahead`; returns the number of bytes of both.
    fn read(&mut self, source: &mut impl Read, ahead: &mut [u8]) -> std::io::Result<usize> {
        let Self { receive, tag, bytes, filled, tagged, .. } = self;
        let mut outcome = Err(ErrorKind::WouldBlock.into());
        receive.fill(|memory| {
            outcome = source.read_vectored(&mut [IoSliceMut::new(&mut memory[*filled..]), IoSliceMut::new(ahead)]);
            *filled += outcome.as_ref().map_or(0, |count| *count).min(*bytes - *filled);
            let until = if *filled == *bytes { *bytes } else { *filled / TAGGED_BYTES * TAGGED_BYTES };
            if until > *tagged {
                tag.update(&memory[*tagged..until]);
                *tagged = until;
            }
        });
        outcome
    }
}

impl Reader {
    fn new(verifier: Verifier) -> Self {
        Self {
            verifier,
            buffer: Vec::new(),
            start: 0,
            filled: 0,
            expected: None,
            sought: false,
            frames: 0,
            direct: None,
        }
    }

    fn is_between_frames(&self) -> bool {
        self.start == self.filled && self.direct.is_none()
    }

    /// Continues an incomplete frame in the memory that `find` returns for its prefix and the length behind it.
    fn begin_direct_receive(&mut self, find: impl FnOnce(&[u8; PREFIX_BYTES], usize) -> Option<DirectReceiveHandle>) {
        const BODY: usize = HEADER_BYTES + HEAD_BYTES;
        let bytes = &self.buffer[self.start..self.filled];
        let Some(whole) = self.expected.filter(|whole| *whole > SMALL_BYTES && !self.sought) else { return };
        let (Some((header, rest)), true) = (bytes.split_first_chunk(), bytes.len() >= BODY) else { return };
        let Some((head, mut begun)) = rest.split_first_chunk() else { return };
        self.sought = true;
        let bytes = whole - BODY;
        let Some(receive) = find(head, bytes) else { return };
        let tag = self.verifier.begin_tag(header, head);
        let mut direct = DirectFrame { header: *header, receive, tag, bytes, filled: 0, tagged: 0 };
        // An incomplete frame is shorter than its memory, and reading from memory does not fail.
        let _ = direct.read(&mut begun, &mut []);
        self.direct = Some(Box::new(direct));
        (self.start, self.filled, self.expected, self.sought) = (0, 0, None, false);
    }

    /// Reads once; also returns how much room there was.
    fn read(&mut self, source: &mut impl Read, spare: &Pool) -> (std::io::Result<usize>, usize) {
        let Some(direct) = &mut self.direct else {
            let room = self.room(spare);
            let bytes = room.len();
            return (source.read(room).inspect(|count| self.filled += count), bytes);
        };
        // Also the start of the next frame: otherwise a read that ends with this one leaves open whether the system has
        // more.
        let missing = direct.bytes - direct.filled;
        let outcome = direct.read(source, &mut self.buffer[..FIRST_BYTES]);
        self.filled = outcome.as_ref().map_or(0, |count| count.saturating_sub(missing));
        (outcome, missing + FIRST_BYTES)
    }

    /// The space to read into: the remainder of a frame whose length is known, and no more, so that the buffer can be
    /// passed on with the frame.
    fn room(&mut self, spare: &Pool) -> &mut [u8] {
        if self.buffer.is_empty() {
            self.buffer = spare.take();
            self.buffer.resize(BUFFER_BYTES, 0);
        }
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.filled, 0);
            self.filled -= self.start;
            self.start = 0;
        }
        let end = self.expected.unwrap_or(0).max(FIRST_BYTES);
        &mut self.buffer[self.filled..end]
    }

    fn next(&mut self) -> Result<Option<TcpFrame>, FrameError> {
        if let Some(direct) = self.direct.take_if(|direct| direct.filled == direct.bytes) {
            let DirectFrame { header, receive, tag, .. } = *direct;
            self.verifier.verify_tag(&header, tag)?;
            receive.complete();
            self.frames += 1;
        }
        let bytes = &self.buffer[self.start..self.filled];
        if self.expected.is_none() {
            self.expected = self.verifier.announced(bytes)?.map(|payload| HEADER_BYTES + payload);
        }
        let Some(whole) = self.expected.filter(|whole| bytes.len() >= *whole) else { return Ok(None) };
        let Some((header, payload)) = bytes[..whole].split_first_chunk() else { return Ok(None) };
        self.verifier.verify(header, payload)?;
        self.frames += 1;
        (self.expected, self.sought) = (None, false);
        if whole <= SMALL_BYTES {
            let frame = TcpFrame { buffer: payload.to_vec(), start: 0, bytes: payload.len() };
            self.start += whole;
            return Ok(Some(frame));
        }
        // `room` ensures that no other frame follows it in the buffer.
        let frame = TcpFrame {
            buffer: std::mem::take(&mut self.buffer),
            start: self.start + HEADER_BYTES,
            bytes: whole - HEADER_BYTES,
        };
        (self.start, self.filled) = (0, 0);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use proptest::prelude::*;

    use super::*;
    use crate::transport::mailbox::Header;
    use crate::transport::ports::MailboxProgress;
    use crate::world::rendezvous::frame::Sealer;
    use crate::world::rendezvous::frame_tag::{MacAlgorithm, TagCoverage};

    const ALL_TAGS: [TagOptions; 6] = {
        use MacAlgorithm::{Aegis128X2, Aegis128X4, Blake3};
        use TagCoverage::{HeadOnly, WholeFrame};
        [
            TagOptions { algorithm: Blake3, coverage: WholeFrame },
            TagOptions { algorithm: Blake3, coverage: HeadOnly },
            TagOptions { algorithm: Aegis128X2, coverage: WholeFrame },
            TagOptions { algorithm: Aegis128X2, coverage: HeadOnly },
            TagOptions { algorithm: Aegis128X4, coverage: WholeFrame },
            TagOptions { algorithm: Aegis128X4, coverage: HeadOnly },
        ]
    };

    /// The memory of one receive, and whether it has ended with a whole payload.
    struct OneReceive {
        memory: Mutex<Vec<u8>>,
        is_whole: Mutex<Option<bool>>,
    }

    impl MailboxProgress for OneReceive {
        fn arrived(&self) {}

        fn begin_direct_receive(&self, _from: usize, _header: Header) -> Option<u64> {
            Some(0)
        }

        fn fill(&self, _from: usize, _ticket: u64, read: &mut dyn FnMut(*mut u8)) {
            read(self.memory.lock().as_mut_ptr());
        }

        fn end_direct_receive(&self, _from: usize, _ticket: u64, is_whole: bool) {
            *self.is_whole.lock() = Some(is_whole);
        }

        fn end_transfer(&self, _message: u64, _bytes: usize) {}
    }

    /// Passes a frame to a reader in pieces, which reads its body to the memory of a receive. Returns the body.
    fn read_directly(frame: &[u8], piece: usize, tags: TagOptions) -> Result<Vec<u8>, FrameError> {
        let verifier = Verifier::new([7; 32], tags, FRAME_BYTES);
        let (mut reader, spare) = (Reader::new(verifier), Pool::new(BUFFER_BYTES));
        let body = frame.len() - HEADER_BYTES - HEAD_BYTES;
        let receive = Arc::new(OneReceive { memory: Mutex::new(vec![0; body]), is_whole: Mutex::default() });
        let mut rest = frame;
        let mut outcome = Ok(());
        while !rest.is_empty() && outcome.is_ok() {
            let (count, _) = reader.read(&mut &rest[..piece.min(rest.len())], &spare);
            let count = count.expect("memory can be read");
            rest = &rest[count..];
            outcome = reader.next().map(|frame| assert!(frame.is_none(), "it was read elsewhere"));
            reader.begin_direct_receive(|_, bytes| Some(DirectReceiveHandle::of_mailbox(receive.clone(), bytes)));
        }
        assert_eq!(*receive.is_whole.lock(), Some(outcome.is_ok()), "only a whole and authentic payload counts");
        outcome.map(|()| std::mem::take(&mut *receive.memory.lock()))
    }

    #[test]
    fn a_body_in_the_memory_of_its_receive_is_whole_and_authentic_or_refused() {
        let bodies = [SMALL_BYTES, TAGGED_BYTES - 1, TAGGED_BYTES, TAGGED_BYTES + 1, 3 * TAGGED_BYTES - 5];
        for (tags, bytes) in ALL_TAGS.into_iter().flat_map(|tags| bodies.map(|bytes| (tags, bytes))) {
            let body: Vec<u8> = (0..bytes).map(|at| (at * 7) as u8).collect();
            let mut frame = Vec::new();
            Sealer::new([7; 32], tags).seal(&[&[3; HEAD_BYTES][..], &body].concat(), &mut frame);
            for piece in [1000, 5000, TAGGED_BYTES, 200_000] {
                assert!(read_directly(&frame, piece, tags) == Ok(body.clone()), "{tags:?} {bytes} {piece}");
                for at in [0, bytes / 2, bytes - 1] {
                    let mut changed = frame.clone();
                    changed[HEADER_BYTES + HEAD_BYTES + at] ^= 1;
                    let outcome = read_directly(&changed, piece, tags).map(|_| ());
                    let expected = match tags.coverage {
                        TagCoverage::WholeFrame => Err(FrameError::NotAuthentic { sequence: 0 }),
                        TagCoverage::HeadOnly => Ok(()),
                    };
                    assert_eq!(outcome, expected, "{tags:?} {bytes} {piece} {at}");
                }
            }
        }
    }

    /// Returns the frames of a reader that gets `bytes` in pieces of these sizes, repeated. Receives wait for every other
    /// large frame.
    fn read(bytes: &[u8], pieces: &[usize], tags: TagOptions) -> Result<Vec<Vec<u8>>, FrameError> {
        let verifier = Verifier::new([7; 32], tags, FRAME_BYTES);
        let (mut reader, spare) = (Reader::new(verifier), Pool::new(BUFFER_BYTES));
        let (mut found, mut rest, mut pieces) = (Vec::new(), bytes, pieces.iter().cycle());
        let mut direct: Option<(Vec<u8>, Arc<OneReceive>)> = None;
        let mut is_wanted = false;
        while !rest.is_empty() {
            let piece = rest.len().min(*pieces.next().expect("there are pieces"));
            let (count, room) = reader.read(&mut &rest[..piece], &spare);
            assert!(room > 0, "an empty read looks like the end");
            rest = &rest[count.expect("memory can be read")..];
            loop {
                let frame = reader.next()?;
                if let Some((head, receive)) = direct.take_if(|(_, receive)| *receive.is_whole.lock() == Some(true)) {
                    found.push([head, std::mem::take(&mut receive.memory.lock())].concat());
                }
                let Some(frame) = frame else { break };
                found.push(frame.buffer[frame.start..frame.start + frame.bytes].to_vec());
                spare.put(frame.buffer);
            }
            reader.begin_direct_receive(|head, bytes| {
                is_wanted = !is_wanted;
                let memory = Mutex::new(vec![0; bytes]);
                let receive = is_wanted.then(|| Arc::new(OneReceive { memory, is_whole: Mutex::default() }))?;
                direct = Some((head.to_vec(), receive.clone()));
                Some(DirectReceiveHandle::of_mailbox(receive, bytes))
            });
        }
        Ok(found)
    }

    fn length() -> impl Strategy<Value = usize> {
        let edge = SMALL_BYTES - HEADER_BYTES;
        prop_oneof![0..200usize, edge - 3..edge + 3, 2 * edge - 3..2 * edge + 50, FRAME_BYTES - 2..=FRAME_BYTES]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn frames_come_out_as_they_went_in(
            lengths in prop::collection::vec(length(), 0..8), pieces in prop::collection::vec(1usize..9000, 1..4),
            tags in prop::sample::select(&ALL_TAGS[..]),
        ) {
            let mut sealer = Sealer::new([7; 32], tags);
            let payloads: Vec<Vec<u8>> = lengths.iter().enumerate().map(|(at, bytes)| vec![at as u8; *bytes]).collect();
            let mut bytes = Vec::new();
            payloads.iter().for_each(|payload| sealer.seal(payload, &mut bytes));
            prop_assert!(read(&bytes, &pieces, tags).unwrap() == payloads);
        }

        #[test]
        fn any_bytes_are_refused_or_wait_for_more(
            bytes in prop::collection::vec(any::<u8>(), 0..400), pieces in prop::collection::vec(1usize..100, 1..4),
            tags in prop::sample::select(&ALL_TAGS[..]),
        ) {
            prop_assert!(read(&bytes, &pieces, tags).map_or(true, |found| found.is_empty()));
        }
    }
}
