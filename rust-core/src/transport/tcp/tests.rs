//! Networks of ranks that are threads, over the loopback interface.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};

use super::inbound::{Hello, encode_hello};
use super::*;
use crate::transport::Members;
use crate::transport::mailbox::Header;
use crate::transport::ports::{FRAME_BYTES, PAYLOAD_BYTES, Port, Receiver};
use crate::world::Departure;
use crate::world::rendezvous::frame::Sealer;
use crate::world::rendezvous::frame_tag::{MacAlgorithm, TagCoverage, TagOptions};
use crate::world::rendezvous::handshake::{ANSWER_BYTES, ChallengeResponse, GREETING_BYTES, PROOF_BYTES, REFUSAL};

const SECRET: &[u8] = b"secret";
const SESSION: u64 = 7;
const GROUP: u64 = 5;
/// How long to watch for events that must not happen.
const LONG: Duration = Duration::from_secs(30);
/// Time limit for events that must happen.
const SHORT: Duration = Duration::from_millis(300);

struct Endpoint {
    network: Arc<Network>,
    monitor: Arc<Monitor>,
    address: SocketAddr,
}

fn ends(keys: &[&[u8]], peer_timeout: Duration) -> Vec<Endpoint> {
    ends_with_tags(TagOptions::CONTROL, keys, peer_timeout)
}

fn ends_with_tags(tags: TagOptions, keys: &[&[u8]], peer_timeout: Duration) -> Vec<Endpoint> {
    let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
    let listeners: Vec<_> = keys.iter().map(|_| listen(localhost, None).expect("there are ports")).collect();
    let book: Vec<SocketAddr> = listeners.iter().map(|(_, address)| address.address_for(localhost)).collect();
    let start = |(rank, ((listener, _), key)): (usize, ((TcpListener, TcpAddress), &&[u8]))| {
        let (monitor, address) = (Arc::new(Monitor::new(rank)), book[rank]);
        let (book, key) = (book.clone(), JobKey::new(key));
        let congestion_control = CongestionControl::System;
        let options = TcpOptions {
            rank,
            session: SESSION,
            key,
            book,
            monitor: monitor.clone(),
            tags,
            congestion_control,
            peer_timeout,
        };
        Endpoint { network: Network::start(listener, options).expect("it starts"), monitor, address }
    };
    listeners.into_iter().zip(keys).enumerate().map(start).collect()
}

/// The networks of `size` ranks with one secret.
pub(crate) fn networks(size: usize) -> Vec<Arc<Network>> {
    ends(&vec![SECRET; size], LONG).into_iter().map(|end| end.network).collect()
}

impl Endpoint {
    fn port(&self, rank: usize, size: usize) -> Port {
        let ranks: Arc<[usize]> = (0..size).collect();
        let carrier: Arc<dyn Carrier> = self.network.clone();
        Port::open(&carrier, GROUP, &Members { ranks: ranks.clone(), me: rank }, ranks, self.monitor.clone())
    }

    /// The reason why all waits have ended, if they have.
    fn closed(&self) -> String {
        wait_until(|| self.monitor.check(&[], "test").err().map(|error| error.to_string()))
    }
}

fn wait_until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(start.elapsed() < LONG, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn push(port: &Port, to: usize, number: u64, payload: &[u8]) -> bool {
    // SAFETY: the payload has that length.
    unsafe { port.push(to, [1, number, 0, 0, payload.len() as u64], payload.as_ptr()) }
}

/// The number and the payload of the next frame from `from`.
fn pop(port: &Port, from: usize) -> (u64, Vec<u8>) {
    let mut found = None;
    wait_until(|| {
        port.pop(from, &mut |header: Header, payload| {
            // SAFETY: a link gives as many bytes as the header says.
            let payload = unsafe { std::slice::from_raw_parts(payload, header[4] as usize) };
            found = Some((header[1], payload.to_vec()));
        });
        found.take()
    })
}

fn is_served(ends: &[Endpoint]) {
    let (a, b) = (ends[0].port(0, ends.len()), ends[1].port(1, ends.len()));
    assert!(push(&a, 1, 3, b"still there") && push(&b, 0, 4, b""));
    assert_eq!(pop(&b, 0), (3, b"still there".to_vec()));
    assert_eq!(pop(&a, 1), (4, Vec::new()));
}

#[test]
fn frames_of_every_size_arrive_in_order_and_the_last_ones_outlive_the_sender() {
    for algorithm in MacAlgorithm::ALL {
        for coverage in [TagCoverage::WholeFrame, TagCoverage::HeadOnly] {
            frames_of_every_size_arrive(TagOptions { algorithm, coverage });
        }
    }
}

fn frames_of_every_size_arrive(tags: TagOptions) {
    let ends = ends_with_tags(tags, &[SECRET; 2], LONG);
    let (a, b) = (ends[0].port(0, 2), ends[1].port(1, 2));
    let sizes = [0, 1, 4_000, PAYLOAD_BYTES, 5_000, 3_900, PAYLOAD_BYTES - 1, 100_000];
    let payload = |number: usize| vec![number as u8; sizes[number % sizes.len()]];
    let count = 20 * sizes.len();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..count {
                wait_until(|| push(&a, 1, number as u64, &payload(number)).then_some(()));
            }
            ends[0].network.flush(Instant::now() + LONG);
            ends[0].network.close();
        });
        for number in 0..count {
            assert_eq!(pop(&b, 0), (number as u64, payload(number)));
        }
    });
    assert!(push(&a, 1, 0, b"nobody gets this"), "frames of a network that has ended are dropped");
}

#[test]
fn a_process_without_the_secret_is_rejected_and_reports_it() {
    let ends = ends(&[SECRET, SECRET, b"guess"], SHORT);
    assert!(push(&ends[2].port(2, 3), 0, 0, b"let me in"));
    let text = ends[2].closed();
    assert!(text.contains("rank 0 at 127.0.0.1:") && text.contains("does not accept this job's secret"), "{text}");
    is_served(&ends[..2]);
}

#[test]
fn a_caller_receives_instead_of_the_thread_and_the_thread_again_after_it() {
    let ends = ends(&[SECRET; 2], LONG);
    let (a, b) = (ends[0].port(0, 2), ends[1].port(1, 2));
    is_delivered(&a, &b, 1);
    let receiver = Receiver::begin(&*ends[1].network);
    assert!(push(&a, 1, 2, &[2; 50_000]));
    let mut found = None;
    wait_until(|| {
        receiver.receive();
        b.pop(0, &mut |header, _| found = Some(header[1])).then_some(())
    });
    assert_eq!(found, Some(2));
    assert!(push(&a, 1, 3, &[3; 50_000]));
    assert_eq!(pop(&b, 0).0, 3, "the caller does not look");
    assert!(push(&a, 1, 4, b"before the caller stops"));
    drop(receiver);
    assert_eq!(pop(&b, 0).0, 4);
    is_delivered(&a, &b, 5);
}

#[test]
fn the_thread_handles_handshakes_and_timers_while_a_caller_receives() {
    // The first frame opens a connection, and its rank is introduced there; a broken connection has a timer.
    let ends = ends(&[SECRET; 2], SHORT);
    let receivers: Vec<Receiver<'_>> = ends.iter().map(|end| Receiver::begin(&*end.network)).collect();
    let (a, b) = (ends[0].port(0, 2), ends[1].port(1, 2));
    assert!(push(&a, 1, 1, b"hello"));
    let mut found = None;
    let receive = || {
        for receiver in &receivers {
            receiver.receive();
        }
    };
    wait_until(|| {
        receive();
        b.pop(0, &mut |header, _| found = Some(header[1])).then_some(())
    });
    assert_eq!(found, Some(1));
    ends[1].network.close();
    let text = wait_until(|| {
        receive();
        ends[0].monitor.check(&[], "test").err().map(|error| error.to_string())
    });
    assert!(text.contains("the connection to rank 1 at 127.0.0.1:"), "{text}");
}

fn is_delivered(from: &Port, to: &Port, number: u64) {
    assert!(push(from, 1, number, b"frame"));
    assert_eq!(pop(to, 0).0, number);
}

/// A connection to `end` whose other side a test simulates, with the keys for its frames.
fn call(end: &Endpoint, words: Option<Hello>) -> (TcpStream, Sealer) {
    let key = JobKey::new(SECRET).scoped(PROTOCOL);
    let mut stream = TcpStream::connect(end.address).unwrap();
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).unwrap();
    let answer = ChallengeResponse::new(&greeting).unwrap().unwrap();
    stream.write_all(&answer.bytes(&key)).unwrap();
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof).unwrap();
    let mut sealer = Sealer::new(answer.verify(&key, &proof).expect("it knows the secret").send, TagOptions::CONTROL);
    if let Some(words) = words {
        let mut frame = Vec::new();
        sealer.seal(&encode_hello(words), &mut frame);
        stream.write_all(&frame).unwrap();
    }
    (stream, sealer)
}

/// The other side ends the connection.
fn is_ended(mut stream: TcpStream) {
    stream.set_read_timeout(Some(LONG)).unwrap();
    assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)), "nothing is ever said");
}

#[test]
fn unauthenticated_connections_cost_nothing() {
    let ends = ends(&[SECRET; 2], LONG);
    let mut web = TcpStream::connect(ends[0].address).unwrap();
    web.write_all(&[b'G'; ANSWER_BYTES]).unwrap();
    let mut greeting_and_refusal = [0; GREETING_BYTES + REFUSAL.len()];
    web.read_exact(&mut greeting_and_refusal).unwrap();
    assert!(greeting_and_refusal.ends_with(&REFUSAL));
    is_ended(web);
    drop(TcpStream::connect(ends[0].address).unwrap());

    // Processes that know the secret, but belong to another session, state an invalid rank, or state none.
    for words in [[SESSION + 1, 1, 0], [SESSION, 1, 1], [SESSION, 0, 0], [SESSION, 2, 0], [SESSION, u64::MAX, 0]] {
        is_ended(call(&ends[0], Some(words)).0);
    }
    let (mut stream, mut sealer) = call(&ends[0], None);
    let mut frame = Vec::new();
    sealer.seal(b"a frame of a group", &mut frame);
    stream.write_all(&frame).unwrap();
    is_ended(stream);
    is_served(&ends);
    assert!(ends[0].monitor.check(&[], "test").is_ok());
}

#[test]
fn an_invalid_connection_is_closed_within_the_timeout() {
    // A frame that is too long, one that was changed, and an incomplete one.
    let changes: [fn(&mut Vec<u8>); 3] = [
        |frame| frame[..4].copy_from_slice(&(FRAME_BYTES as u32 + 1).to_le_bytes()),
        |frame| *frame.last_mut().unwrap() ^= 1,
        |frame| frame.truncate(frame.len() - 1),
    ];
    for change in changes {
        let ends = ends(&[SECRET; 2], SHORT);
        let (mut stream, mut sealer) = call(&ends[0], Some([SESSION, 1, 0]));
        let mut frame = Vec::new();
        sealer.seal(&[0; 10_000], &mut frame);
        change(&mut frame);
        stream.write_all(&frame).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        is_ended(stream);
        let text = ends[0].closed();
        assert!(text.contains("the connection to rank 1 at 127.0.0.1:"), "{text}");
    }
}

#[test]
fn frames_that_are_replayed_or_swapped_end_the_connection() {
    let (first, second) = (vec![1; 10_000], vec![2; 10_000]);
    for order in [[0, 0], [1, 0]] {
        let ends = ends(&[SECRET; 2], SHORT);
        let (mut stream, mut sealer) = call(&ends[0], Some([SESSION, 1, 0]));
        let frames = [&first, &second].map(|payload| {
            let mut frame = Vec::new();
            sealer.seal(payload, &mut frame);
            frame
        });
        // The connection may end before all is written.
        let _ = order.iter().try_for_each(|at| stream.write_all(&frames[*at]));
        is_ended(stream);
        let text = ends[0].closed();
        assert!(text.contains("instead of frame"), "{text}");
    }
}

#[test]
fn a_rank_has_one_connection_at_a_time() {
    let ends = ends(&[SECRET; 2], LONG);
    let first = call(&ends[0], Some([SESSION, 1, 0]));
    is_ended(call(&ends[0], Some([SESSION, 1, 0])).0);
    drop(first);
    assert!(ends[0].monitor.check(&[], "test").is_ok());
}

#[test]
fn a_lost_connection_is_no_news_once_its_rank_has_departed() {
    let ends = ends(&[SECRET; 2], SHORT);
    let (a, b) = (ends[0].port(0, 2), ends[1].port(1, 2));
    assert!(push(&a, 1, 1, b"hello"));
    assert_eq!(pop(&b, 0).0, 1);
    ends[0].monitor.report(1, Departure::Left);
    ends[1].network.close();
    wait_until(|| ends[0].network.shared.send_queues[1].lock().is_lost().then_some(()));
    assert!(push(&a, 1, 2, b"nobody is there"));
    std::thread::sleep(3 * SHORT);
    assert!(ends[0].monitor.check(&[], "test").is_ok());
}

#[test]
fn a_listener_of_the_rendezvous_host_is_reached_where_the_rendezvous_is() {
    let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
    let (listener, chosen) = listen(IpAddr::from([10, 0, 0, 9]), Some(localhost)).unwrap();
    assert_eq!(listener.local_addr().unwrap().ip(), localhost);
    assert_eq!(chosen.address_for(IpAddr::from([10, 0, 0, 1])), listener.local_addr().unwrap());
    let (_, here) = listen(localhost, None).unwrap();
    let seen = here.address_for("10.1.2.3".parse().unwrap());
    assert_eq!(seen, SocketAddr::new("10.1.2.3".parse().unwrap(), here.port));
    let mapped = here.address_for("::ffff:10.1.2.3".parse().unwrap());
    assert_eq!(mapped, seen);
    let there = TcpAddress { host: Some("10.9.9.9".parse().unwrap()), port: 4 };
    assert_eq!(there.address_for("10.1.2.3".parse().unwrap()), "10.9.9.9:4".parse().unwrap());
}
