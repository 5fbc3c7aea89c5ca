//! Input that a rank or an unauthenticated client may send to the rendezvous: frames, messages, and messages in any order.
//!
//! The first byte selects how the rest is interpreted. A panic is a finding, and so is a job that counts more connections
//! than there are.

#![no_main]

use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use smd_core::world::rendezvous::JobKey;
use smd_core::world::rendezvous::frame::{Opener, Sealer};
use smd_core::world::rendezvous::frame_tag::TagOptions;
use smd_core::world::rendezvous::handshake::{ANSWER_BYTES, Challenge, ChallengeResponse, GREETING_BYTES};
use smd_core::world::rendezvous::job::{Job, Disposition};
use smd_core::world::rendezvous::message::{ToClient, ToServer, decode, encode};

const KEY: [u8; 32] = [7; 32];
const SIZE: usize = 3;

fuzz_target!(|input: &[u8]| {
    let Some((kind, bytes)) = input.split_first() else { return };
    match kind % 4 {
        0 => messages(bytes),
        1 => frames(bytes),
        2 => handshake(bytes),
        _ => session(bytes),
    }
});

/// Decodes the bytes to an error or to a message; a message must be equal after it is encoded and decoded again.
fn messages(bytes: &[u8]) {
    if let Ok(message) = decode::<ToServer>(bytes) {
        assert_eq!(decode::<ToServer>(&encode(&message)), Ok(message));
    }
    if let Ok(message) = decode::<ToClient>(bytes) {
        assert_eq!(decode::<ToClient>(&encode(&message)), Ok(message));
    }
}

/// Frames without the key are rejected. Sealed frames are opened, whatever the sizes of the pieces in which they arrive.
fn frames(bytes: &[u8]) {
    let mut opener = Opener::new(KEY);
    let mut sealed = Vec::new();
    let mut sealer = Sealer::new(KEY, TagOptions::CONTROL);
    for piece in bytes.chunks(29) {
        opener.feed(piece);
        if !matches!(opener.next(), Ok(None)) {
            break; // rejected, because the tag cannot be forged
        }
        sealer.seal(piece, &mut sealed);
    }
    let mut opener = Opener::new(KEY);
    let mut opened = Vec::new();
    for piece in sealed.chunks(1 + bytes.len() % 97) {
        opener.feed(piece);
        while let Some(payload) = opener.next().expect("the frame was sealed with the key") {
            opened.extend_from_slice(payload);
        }
    }
    assert!(bytes.starts_with(&opened));
}

fn handshake(bytes: &[u8]) {
    let key = JobKey::new(b"secret");
    if let Some(answer) = bytes.first_chunk::<ANSWER_BYTES>() {
        assert!(Challenge::new().expect("random bytes").verify(&key, answer).is_none());
    }
    if let Some(greeting) = bytes.first_chunk::<GREETING_BYTES>() {
        if let Ok(Some(answer)) = ChallengeResponse::new(greeting) {
            assert!(answer.verify(&key, &[0; 32]).is_none());
        }
    }
}

/// Members that send arbitrary messages in arbitrary order: a sequence of `event, connection, length, payload`.
fn session(mut bytes: &[u8]) {
    let mut job = Job::new(SIZE, Duration::from_millis(10), 1);
    let mut now = Instant::now();
    let mut alive = std::collections::BTreeSet::new();
    while let Some((&[event, connection, length], rest)) = bytes.split_first_chunk() {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(length)));
        bytes = rest;
        let connection = u64::from(connection % 16);
        match event % 8 {
            0 => {
                job.disconnected(connection, "was lost", now);
                alive.remove(&connection);
            }
            1 => job.report_death(usize::from(length) % (2 * SIZE), "killed"),
            2 => {
                now += Duration::from_millis(u64::from(length));
                job.tick(now);
            }
            _ => {
                let Ok(mut message) = decode::<ToServer>(payload) else { continue };
                if let ToServer::Join(join) = &mut message {
                    // Made valid, because random requests to join would almost always be rejected.
                    join.size = SIZE as u32;
                    join.rank %= SIZE as u32 + 1;
                    join.version = smd_core::VERSION.to_owned();
                    if !alive.insert(connection) {
                        continue; // a connection joins once; the server drops the second try
                    }
                }
                match job.receive(connection, message) {
                    Ok(Disposition::Keep) => {}
                    Ok(Disposition::Close) => drop(alive.remove(&connection)),
                    Err(why) => {
                        job.disconnected(connection, &why, now);
                        alive.remove(&connection);
                    }
                }
            }
        }
        for (to, message) in job.take_outbox() {
            assert!(to < 16);
            assert_eq!(decode::<ToClient>(&encode(&message)), Ok(message));
        }
        assert!(job.connected() <= alive.len());
    }
}
