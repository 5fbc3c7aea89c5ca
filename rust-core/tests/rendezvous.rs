//! The rendezvous over real sockets; ranks are threads. What strangers do must not matter to a job.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use smd_core::error::Code;
use smd_core::world::rendezvous::client::{Client, ClientOptions, RendezvousLocation};
use smd_core::world::rendezvous::frame::{MAX_PAYLOAD, Sealer};
use smd_core::world::rendezvous::frame_tag::TagOptions;
use smd_core::world::rendezvous::handshake::{ChallengeResponse, GREETING_BYTES, PROOF_BYTES};
use smd_core::world::rendezvous::message::{Join, Welcome};
use smd_core::world::rendezvous::{JobKey, Server, server};
use smd_core::world::{Monitor, Store};
use smd_core::{Error, Result};

const SECRET: &[u8] = b"the secret of this job";
const LIMIT: Duration = Duration::from_secs(20);

fn serve(size: usize) -> Server {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let key = JobKey::new(SECRET);
    let options = server::ServerOptions {
        key,
        size: Some(size),
        death_cause_timeout: Duration::ZERO,
        peer_timeout: Duration::from_secs(10),
    };
    Server::serve(listener, options).unwrap()
}

struct Rank {
    client: Arc<Client>,
    monitor: Arc<Monitor>,
    welcome: Welcome,
}

fn join_with(
    addresses: &[String],
    secret: &[u8],
    rank: usize,
    size: usize,
    limit: Duration,
    monitor: Arc<Monitor>,
) -> Result<Rank> {
    let options = ClientOptions {
        location: RendezvousLocation::At { addresses: addresses.to_vec(), key: JobKey::new(secret) },
        served_by_rank_0: true,
        deadline: Instant::now() + limit,
        peer_timeout: Duration::from_secs(10),
    };
    let join = Join {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        rank: rank as u32,
        size: size as u32,
        host: "here".to_owned(),
        hostname: "node".to_owned(),
        pid: std::process::id(),
        local: None,
    };
    let (client, welcome) = Client::join(&options, join, monitor.clone())?;
    Ok(Rank { client, monitor, welcome })
}

fn join(address: SocketAddr, rank: usize, size: usize) -> Result<Rank> {
    join_with(&[address.to_string()], SECRET, rank, size, LIMIT, Arc::new(Monitor::new(rank)))
}

fn join_all(address: SocketAddr, size: usize) -> Vec<Rank> {
    let joining: Vec<_> = (0..size).map(|rank| thread::spawn(move || join(address, rank, size))).collect();
    joining.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
}

/// Waits for `condition`, which other threads make true.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT, "{what} did not come true");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Completes the handshake with the secret, and sends nothing more.
fn shake_hands(address: SocketAddr) -> (TcpStream, Sealer) {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).unwrap();
    let key = JobKey::new(SECRET);
    let answer = ChallengeResponse::new(&greeting).unwrap().unwrap();
    stream.write_all(&answer.bytes(&key)).unwrap();
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof).unwrap();
    let keys = answer.verify(&key, &proof).unwrap();
    (stream, Sealer::new(keys.send, TagOptions::CONTROL))
}

/// Whether the other side has hung up.
fn is_hung_up(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    !matches!(stream.read(&mut [0; 4096]), Ok(1..))
}

/// The store works between two ranks: the job is alive.
fn assert_alive(ranks: &[Rank], round: usize) {
    let key = format!("alive/{round}");
    ranks[0].client.set(&key, &[round as u8]).unwrap();
    assert_eq!(ranks[1].client.get(&key, &[0], LIMIT).unwrap(), [round as u8]);
}

#[test]
fn ranks_meet_and_see_the_same_session() {
    let server = serve(4);
    let ranks = join_all(server.address(), 4);
    for rank in &ranks {
        assert_eq!(rank.welcome, ranks[0].welcome);
    }
    let local: Vec<u32> = ranks[0].welcome.places.iter().map(|place| place.local_rank).collect();
    assert_eq!(local, [0, 1, 2, 3]);
    assert_alive(&ranks, 0);
}

#[test]
fn joining_is_fast() {
    let server = serve(2);
    join_all(server.address(), 2).into_iter().for_each(|rank| rank.client.leave());
    let start = Instant::now();
    join_all(server.address(), 2);
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
}

#[test]
fn a_departure_reaches_all_in_time() {
    let server = serve(3);
    let mut ranks = join_all(server.address(), 3);
    let left = ranks.pop().unwrap();
    left.client.leave();
    left.client.leave();
    let start = Instant::now();
    let error = ranks[0].client.get("never", &[0, 1, 2], LIMIT).unwrap_err();
    assert_eq!(error.to_string(), "rank 2 left the job while rank 0 was in waiting for `never`");
    assert!(start.elapsed() < Duration::from_secs(1));
    ranks[1].client.fail("ValueError: bad loss");
    eventually("the failure", || ranks[0].monitor.departure(1).is_some());
    let error = ranks[0].client.get("never", &[0, 1, 2], LIMIT).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1 failed (ValueError: bad loss) while rank 0 was in waiting for `never`",
        "a failure explains more than a leave"
    );
}

#[test]
fn a_wait_without_the_departed_rank_continues() {
    let server = serve(3);
    let ranks = join_all(server.address(), 3);
    ranks[2].client.leave();
    eventually("the leave", || ranks[0].monitor.departure(2).is_some());
    let client = ranks[1].client.clone();
    let setter = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        client.set("late", b"value").unwrap();
    });
    assert_eq!(ranks[0].client.get("late", &[1], LIMIT).unwrap(), b"value");
    setter.join().unwrap();
}

#[test]
fn a_value_written_before_its_writer_left_is_found() {
    let server = serve(2);
    let ranks = join_all(server.address(), 2);
    ranks[1].client.set("last words", b"farewell").unwrap();
    ranks[1].client.leave();
    eventually("the leave", || ranks[0].monitor.departure(1).is_some());
    assert_eq!(ranks[0].client.get("last words", &[1], LIMIT).unwrap(), b"farewell");
}

#[test]
fn sessions_follow_each_other() {
    let server = serve(2);
    let mut seen = Vec::new();
    for round in 0..5 {
        let ranks = join_all(server.address(), 2);
        assert!(!seen.contains(&ranks[0].welcome.session));
        seen.push(ranks[0].welcome.session);
        // The store of the last session is gone.
        let error = ranks[0].client.get("round", &[1], Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.code(), Code::Timeout);
        ranks[0].client.set("round", &[round]).unwrap();
        ranks.iter().for_each(|rank| rank.client.leave());
    }
}

#[test]
fn a_death_ends_the_start_of_the_others() {
    let server = Arc::new(serve(3));
    let address = server.address();
    let waiting: Vec<_> = (0..2).map(|rank| thread::spawn(move || join(address, rank, 3).map(drop))).collect();
    thread::sleep(Duration::from_millis(50));
    server.report_death(2, "killed by signal 9");
    for (rank, thread) in waiting.into_iter().enumerate() {
        let error = thread.join().unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("rank 2 died (killed by signal 9) while rank {rank} was in init()"));
    }
}

#[test]
fn a_timed_out_wait_names_the_missing_ranks() {
    let server = serve(3);
    let address = [server.address().to_string()];
    let limit = Duration::from_millis(200);
    let outcome = join_with(&address, SECRET, 1, 3, limit, Arc::new(Monitor::new(1)));
    match outcome.map(drop).unwrap_err() {
        Error::Timeout { missing, .. } => assert_eq!(missing, [0, 2]),
        other => panic!("{other}"),
    }
}

#[test]
fn an_interruption_ends_the_wait_for_the_others() {
    let server = serve(2);
    let address = [server.address().to_string()];
    let monitor = Arc::new(Monitor::new(0));
    let waiting = thread::spawn({
        let monitor = monitor.clone();
        move || join_with(&address, SECRET, 0, 2, LIMIT, monitor).map(drop)
    });
    thread::sleep(Duration::from_millis(50));
    monitor.set_interrupted(true);
    assert_eq!(waiting.join().unwrap().unwrap_err().code(), Code::Interrupted);
}

#[test]
fn the_end_of_the_rendezvous_is_reported_as_the_end_of_rank_0() {
    let server = serve(2);
    let ranks = join_all(server.address(), 2);
    drop(server);
    let error = ranks[1].client.get("never", &[0, 1], LIMIT).unwrap_err();
    assert_eq!(error.code(), Code::PeerFailed);
    assert!(error.to_string().starts_with("rank 0 died (its process, which served the rendezvous"), "{error}");
    // Without the rendezvous, no process knows whether the other ranks live. A wait for them alone fails with the same
    // cause.
    let error = ranks[1].client.get("never", &[1], LIMIT).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 died (its process, which served the rendezvous"), "{error}");
}

#[test]
fn a_wrong_secret_is_refused_without_effect_on_the_job() {
    let server = serve(2);
    let address = [server.address().to_string()];
    let stranger =
        thread::spawn(move || join_with(&address, b"a guess", 1, 2, LIMIT, Arc::new(Monitor::new(1))).map(drop));
    thread::sleep(Duration::from_millis(20));
    let ranks = join_all(server.address(), 2);
    let error = stranger.join().unwrap().unwrap_err();
    assert_eq!(error.code(), Code::Rendezvous);
    assert!(error.to_string().contains("does not accept this process's secret (`SMD_SECRET`)"), "{error}");
    assert_alive(&ranks, 0);
}

#[test]
fn the_right_rendezvous_is_found_among_wrong_ones() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let other_job = Server::start((Ipv4Addr::LOCALHOST, 0).into(), b"another secret", 1).unwrap();
    let server = serve(1);
    let addresses = [nobody, other_job.address(), silent.local_addr().unwrap(), server.address()];
    let rank = join_with(&addresses.map(|a| a.to_string()), SECRET, 0, 1, LIMIT, Arc::new(Monitor::new(0))).unwrap();
    rank.client.leave();
}

#[test]
fn half_open_connections_and_noise_harm_nobody() {
    let server = serve(2);
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
    let noise: Vec<_> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            stream.write_all(&[0x5a; 1000]).unwrap();
            stream
        })
        .collect();
    let http = {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream
    };
    let ranks = join_all(server.address(), 2);
    assert_alive(&ranks, 0);
    for mut stream in noise {
        while !is_hung_up(&mut stream) {}
    }
    // The silent ones have until the deadline of the handshake; then they are hung up on.
    for mut stream in silent.into_iter().chain([http]) {
        while !is_hung_up(&mut stream) {}
    }
    assert_alive(&ranks, 1);
}

#[test]
fn a_flood_of_connections_does_not_stop_a_job() {
    let server = serve(2);
    let address = server.address();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flood: Vec<_> = (0..2)
        .map(|_| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut held = std::collections::VecDeque::new();
                let mut made = 0;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    if let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(50)) {
                        made += 1;
                        held.push_back(stream);
                    }
                    if held.len() > 400 {
                        held.pop_front();
                    }
                }
                made
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    let ranks = join_all(address, 2);
    let joined = start.elapsed();
    for round in 0..50 {
        assert_alive(&ranks, round);
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let made: usize = flood.into_iter().map(|thread| thread.join().unwrap()).sum();
    println!("joined in {joined:?} under a flood of {made} connections");
    assert!(joined < Duration::from_secs(10), "{joined:?}");
}

#[test]
fn a_member_that_breaks_the_protocol_is_out_and_the_others_hear_of_it() {
    for bad in ["malformed", "oversized", "replayed", "no join"] {
        let server = serve(2);
        let (mut stream, mut sealer) = shake_hands(server.address());
        let mut bytes = Vec::new();
        match bad {
            "malformed" => sealer.seal(&[0xff; 40], &mut bytes),
            "oversized" => bytes.extend_from_slice(&(MAX_PAYLOAD as u32 + 1).to_le_bytes()),
            "replayed" => {
                let join = Join {
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    rank: 1,
                    size: 2,
                    host: "here".to_owned(),
                    hostname: "node".to_owned(),
                    pid: 1,
                    local: None,
                };
                use smd_core::world::rendezvous::message::{ToServer, encode};
                sealer.seal(&encode(&ToServer::Join(join)), &mut bytes);
                bytes.extend_from_within(..);
            }
            _ => {
                use smd_core::world::rendezvous::message::{ToServer, encode};
                sealer.seal(&encode(&ToServer::Depart), &mut bytes);
            }
        }
        stream.write_all(&bytes).unwrap();
        while !is_hung_up(&mut stream) {}
        if bad == "replayed" {
            let error = join(server.address(), 0, 2).map(drop).unwrap_err();
            assert!(error.to_string().contains("frame 0 arrived instead of frame 1"), "{error}");
        }
        // A new pair can still meet: the server is unharmed. Rank 1 comes first, back from the dead.
        let address = server.address();
        let back = thread::spawn(move || join(address, 1, 2).unwrap());
        thread::sleep(Duration::from_millis(50));
        let ranks = [join(address, 0, 2).unwrap(), back.join().unwrap()];
        assert_alive(&ranks, 0);
    }
}

#[test]
fn a_worker_gives_up_a_launcher_that_does_not_answer() {
    let nobody = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().to_string();
    let options = ClientOptions {
        location: RendezvousLocation::At { addresses: vec![nobody.clone()], key: JobKey::new(SECRET) },
        served_by_rank_0: false,
        deadline: Instant::now() + Duration::from_millis(20),
        peer_timeout: Duration::from_secs(10),
    };
    let error = Client::reach_launcher(&options, Arc::new(Monitor::new(0))).map(drop).unwrap_err();
    // Not a timeout, after which a worker would try again.
    assert_eq!(error.code(), Code::Rendezvous);
    assert!(error.text().contains(&nobody) && error.text().contains("launcher"), "{error}");
}
