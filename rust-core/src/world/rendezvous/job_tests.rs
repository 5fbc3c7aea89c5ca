//! Orders of events, without sockets.

use super::*;

const NO_DEATH_CAUSE_TIMEOUT: Duration = Duration::ZERO;

fn join(rank: u32, size: u32) -> ToServer {
    ToServer::Join(Join {
        version: crate::VERSION.to_owned(),
        rank,
        size,
        host: "boot/pid/net".to_owned(),
        hostname: "node".to_owned(),
        pid: 100 + rank,
        local: None,
    })
}

/// A job whose ranks have all joined, on connections with the ranks' numbers.
fn running(size: u32, death_cause_timeout: Duration) -> Job {
    let mut job = Job::new(size as usize, death_cause_timeout, 1);
    for rank in 0..size {
        assert_eq!(job.receive(u64::from(rank), join(rank, size)), Ok(Disposition::Keep));
    }
    let welcomes = job.take_outbox();
    assert_eq!(welcomes.len(), size as usize);
    assert!(welcomes.iter().all(|(_, message)| matches!(message, ToClient::Welcome(_))));
    job
}

/// The notices in the messages, as short texts: receiver, rank, departure.
fn take_sent(job: &mut Job) -> Vec<String> {
    job.take_outbox()
        .into_iter()
        .map(|(to, message)| match message {
            ToClient::Notice { rank, departure } => format!("{to}: rank {rank} {departure}"),
            other => format!("{to}: {other:?}"),
        })
        .collect()
}

#[test]
fn a_lost_connection_is_a_death_that_all_others_hear_of() {
    let mut job = running(3, NO_DEATH_CAUSE_TIMEOUT);
    job.disconnected(1, "ended without `shutdown()`", Instant::now());
    let death = "rank 1 died (process 101 on host node ended without `shutdown()`)";
    assert_eq!(take_sent(&mut job), [format!("0: {death}"), format!("2: {death}")]);
    assert_eq!(job.connected(), 2);
}

#[test]
fn a_silent_host_takes_all_of_its_ranks_along() {
    let mut job = Job::new(4, NO_DEATH_CAUSE_TIMEOUT, 1);
    for rank in 0..4 {
        let ToServer::Join(mut join) = join(rank, 4) else { unreachable!() };
        join.host = format!("host {}", rank / 2);
        join.hostname = format!("node-{}", rank / 2);
        job.receive(u64::from(rank), ToServer::Join(join)).unwrap();
    }
    job.take_outbox();
    job.host_lost(3, Duration::from_secs(10));
    let death = "died (no sign of host node-1, where ranks [2, 3] ran, for 10s)";
    let events: Vec<String> = take_sent(&mut job).into_iter().filter(|text| text.starts_with(['0', '1'])).collect();
    let expected = |to: usize| [2, 3].map(|rank| format!("{to}: rank {rank} {death}"));
    assert_eq!(
        events,
        [expected(0)[0].clone(), expected(1)[0].clone(), expected(0)[1].clone(), expected(1)[1].clone()]
    );
    job.host_lost(2, Duration::from_secs(10));
    assert!(take_sent(&mut job).is_empty());
}

#[test]
fn the_launcher_knows_better_why() {
    let now = Instant::now();
    let death_cause_timeout = Duration::from_millis(200);
    for report_first in [false, true] {
        let mut job = running(2, death_cause_timeout);
        if report_first {
            job.report_death(1, "killed by signal 9");
        }
        job.disconnected(1, "was lost", now);
        assert_eq!(job.next_tick(), Some(now + death_cause_timeout));
        if !report_first {
            assert!(take_sent(&mut job).is_empty());
            job.report_death(1, "killed by signal 9");
            assert_eq!(job.next_tick(), None);
        }
        job.tick(now + death_cause_timeout);
        assert_eq!(take_sent(&mut job), ["0: rank 1 died (killed by signal 9)"]);
    }
}

#[test]
fn patience_ends() {
    let now = Instant::now();
    let mut job = running(2, Duration::from_millis(200));
    job.disconnected(1, "was lost", now);
    job.tick(now + Duration::from_millis(199));
    assert!(take_sent(&mut job).is_empty());
    job.tick(now + Duration::from_millis(200));
    assert_eq!(take_sent(&mut job), ["0: rank 1 died (process 101 on host node was lost)"]);
}

#[test]
fn an_announced_departure_is_no_death() {
    let mut job = running(2, NO_DEATH_CAUSE_TIMEOUT);
    assert_eq!(job.receive(1, ToServer::Depart), Ok(Disposition::Close));
    job.disconnected(1, "ended", Instant::now());
    job.report_death(1, "exited with code 0");
    assert_eq!(take_sent(&mut job), ["0: rank 1 left the job"]);
}

#[test]
fn the_first_word_about_a_rank_stands() {
    let mut job = running(2, NO_DEATH_CAUSE_TIMEOUT);
    job.receive(1, ToServer::Fail { message: "ValueError: bad loss".to_owned() }).unwrap();
    assert_eq!(take_sent(&mut job), ["0: rank 1 failed (ValueError: bad loss)"]);
    job.receive(1, ToServer::Depart).unwrap();
    job.report_death(1, "exited with code 1");
    assert!(take_sent(&mut job).is_empty());
}

#[test]
fn a_death_while_others_wait_to_start_ends_their_wait() {
    let mut job = Job::new(3, NO_DEATH_CAUSE_TIMEOUT, 1);
    job.receive(0, join(0, 3)).unwrap();
    job.receive(1, join(1, 3)).unwrap();
    job.disconnected(1, "was lost", Instant::now());
    assert_eq!(take_sent(&mut job), ["0: rank 1 died (process 101 on host node was lost)"]);
    // No rank can join the failed session; later ranks are told at once.
    job.receive(2, join(2, 3)).unwrap();
    assert_eq!(take_sent(&mut job), ["2: rank 1 died (process 101 on host node was lost)"]);
}

#[test]
fn a_process_that_never_came_can_die_too() {
    let mut job = Job::new(2, Duration::from_millis(200), 1);
    job.receive(0, join(0, 2)).unwrap();
    job.report_death(1, "killed by signal 11");
    assert_eq!(take_sent(&mut job), ["0: rank 1 died (killed by signal 11)"]);
}

#[test]
fn late_ranks_get_the_first_death_first() {
    let mut job = running(4, NO_DEATH_CAUSE_TIMEOUT);
    job.report_death(2, "killed by signal 9");
    job.report_death(0, "exit code 1");
    job.receive(3, ToServer::Depart).unwrap();
    job.take_outbox();
    job.receive(13, join(3, 4)).unwrap();
    assert_eq!(take_sent(&mut job), ["13: rank 2 died (killed by signal 9)", "13: rank 0 died (exit code 1)"]);
}

#[test]
fn sessions_follow_each_other() {
    let mut job = running(2, NO_DEATH_CAUSE_TIMEOUT);
    let first = *job.sessions.keys().next().unwrap();
    // Rank 1 rejoins before rank 0 has left.
    job.receive(1, ToServer::Depart).unwrap();
    job.receive(11, join(1, 2)).unwrap();
    job.receive(0, ToServer::Depart).unwrap();
    job.take_outbox();
    job.receive(10, join(0, 2)).unwrap();
    let welcomes = job.take_outbox();
    let [(11 | 10, ToClient::Welcome(welcome)), (11 | 10, ToClient::Welcome(_))] = &welcomes[..] else {
        panic!("{welcomes:?}")
    };
    assert_ne!(welcome.session, first);
    assert_eq!(job.sessions.len(), 1);
}

#[test]
fn a_rejected_rank_gets_the_reason() {
    let refusal = |job: &mut Job, connection, message| {
        assert_eq!(job.receive(connection, message), Ok(Disposition::Close));
        take_sent(job)
    };
    let mut job = Job::new(2, NO_DEATH_CAUSE_TIMEOUT, 1);
    job.receive(0, join(0, 2)).unwrap();
    assert_eq!(
        refusal(&mut job, 5, join(0, 2)),
        [
            r#"5: Refused { reason: "rank 0 (process 100 on host node) came after process 100 on host node as the same rank" }"#
        ]
    );
    let reason = "rank 1 (process 101 on host node) expects 4 processes, but the job has 2";
    assert_eq!(
        refusal(&mut job, 6, join(1, 4)),
        [format!("0: rank 1 failed ({reason})"), format!("6: Refused {{ reason: {reason:?} }}")]
    );
    let mut other = join(1, 2);
    if let ToServer::Join(join) = &mut other {
        join.version = "0.0.0".to_owned();
    }
    assert!(refusal(&mut job, 7, other)[0].contains("version 0.0.0"));
}

#[test]
fn the_protocol_is_kept() {
    let mut job = Job::new(2, NO_DEATH_CAUSE_TIMEOUT, 1);
    assert!(job.receive(0, ToServer::Depart).is_err());
    job.receive(0, join(0, 2)).unwrap();
    assert!(job.receive(0, join(0, 2)).is_err());
    let long = ToServer::Set { key: "k".to_owned(), value: vec![0; MAX_VALUE + 1] };
    assert!(job.receive(0, long).is_err());
}

#[test]
fn the_store_answers_now_or_later() {
    let set = |value: u8| ToServer::Set { key: "a/b".to_owned(), value: vec![value] };
    let get = |ticket| ToServer::Get { ticket, key: "a/b".to_owned() };
    let mut job = running(2, NO_DEATH_CAUSE_TIMEOUT);
    job.receive(0, get(7)).unwrap();
    job.receive(0, get(8)).unwrap();
    job.receive(0, ToServer::Forget { ticket: 8 }).unwrap();
    assert_eq!(take_sent(&mut job), ["0: NotYet { ticket: 7 }", "0: NotYet { ticket: 8 }"]);
    job.receive(1, set(1)).unwrap();
    assert_eq!(take_sent(&mut job), ["0: Value { ticket: 7, value: [1] }"]);
    job.receive(1, set(2)).unwrap();
    job.receive(0, get(9)).unwrap();
    assert_eq!(take_sent(&mut job), ["0: Value { ticket: 9, value: [2] }"]);
    job.receive(0, ToServer::RemovePrefix { prefix: "a/".to_owned() }).unwrap();
    job.receive(0, get(10)).unwrap();
    assert_eq!(take_sent(&mut job), ["0: NotYet { ticket: 10 }"]);
}

#[test]
fn a_store_does_not_grow_without_limit() {
    let mut job = running(1, NO_DEATH_CAUSE_TIMEOUT);
    let set = |key: usize| ToServer::Set { key: key.to_string(), value: vec![0; MAX_VALUE] };
    let refused = (0..).find_map(|key| job.receive(0, set(key)).err()).unwrap();
    assert!(refused.contains("268435456 bytes"), "{refused}");
    // A rejected value takes no space, so a smaller one fits.
    job.receive(0, ToServer::Set { key: "small".to_owned(), value: vec![0; MAX_VALUE / 2] }).unwrap();
}

#[test]
fn keys_that_all_members_release_are_removed() {
    let mut job = running(3, NO_DEATH_CAUSE_TIMEOUT);
    let set = |key: &str| ToServer::Set { key: key.to_owned(), value: vec![1] };
    for key in ["cuda/1/device/0", "cuda/1/id/0", "cuda/2/id/0"] {
        job.receive(0, set(key)).unwrap();
    }
    let release = || ToServer::Release { prefix: "cuda/1/".to_owned(), members: 2 };
    let send = |job: &mut Job, from: u64, message: Option<ToServer>| {
        if let Some(message) = message {
            job.receive(from, message).unwrap();
        }
        job.take_outbox();
        for key in ["cuda/1/device/0", "cuda/2/id/0"] {
            job.receive(2, ToServer::Get { ticket: 1, key: key.to_owned() }).unwrap();
        }
        let there = job.take_outbox().iter().filter(|(_, it)| matches!(it, ToClient::Value { .. })).count();
        job.receive(2, ToServer::Forget { ticket: 1 }).unwrap();
        there
    };
    assert_eq!(send(&mut job, 0, Some(release())), 2);
    assert_eq!(send(&mut job, 0, Some(release())), 2, "a member counts once");
    assert_eq!(send(&mut job, 1, Some(release())), 1);
    // The next group of that name starts with an empty count.
    job.receive(0, set("cuda/1/device/0")).unwrap();
    assert_eq!(send(&mut job, 0, Some(release())), 2);
}

#[test]
fn missing_ranks_are_listed() {
    let mut job = Job::new(3, NO_DEATH_CAUSE_TIMEOUT, 1);
    job.receive(1, join(1, 3)).unwrap();
    job.receive(1, ToServer::QueryMissing).unwrap();
    assert_eq!(take_sent(&mut job), ["1: Missing { ranks: [0, 2] }"]);
}

#[test]
fn places_on_hosts() {
    let at = |host: &str, local: Option<(u32, u32)>| Join {
        version: String::new(),
        rank: 0,
        size: 4,
        host: host.to_owned(),
        hostname: format!("name of {host}"),
        pid: 1,
        local,
    };
    let joins = [at("b", None), at("a", Some((5, 6))), at("b", Some((0, 2))), at("a", Some((4, 6)))];
    let (names, found) = places(&joins.iter().collect::<Vec<_>>());
    assert_eq!(names, ["name of b", "name of a"]);
    let place = |host, local_rank, local_size| RankLocation { host, local_rank, local_size, pid: 1 };
    // Some ranks of host b have no local rank, so they are counted; all ranks of host a have one.
    assert_eq!(found, [place(0, 0, 2), place(1, 5, 6), place(0, 1, 2), place(1, 4, 6)]);
}

#[test]
fn workers_on_a_silent_host_are_reported_to_the_launcher() {
    let mut job = Job::elastic(NO_DEATH_CAUSE_TIMEOUT, 1);
    let workers = ["worker-0", "worker-1"].map(str::to_owned);
    for (connection, worker) in (0..).zip(&workers) {
        job.receive(connection, ToServer::Enter { worker: worker.clone() }).unwrap();
    }
    job.take_events();
    let silence = Duration::from_secs(10);
    let lost =
        |worker: &String| JobEvent::Lost { worker: worker.clone(), detail: "no sign of its host for 10s".into() };
    job.assign_ranks(&workers);
    job.host_lost(1, silence);
    assert_eq!(job.take_events(), [lost(&workers[1])], "a worker that has a rank");
    job.receive(2, ToServer::Enter { worker: "worker-2".to_owned() }).unwrap();
    job.take_events();
    job.host_lost(2, silence);
    let withdrew = JobEvent::Withdrew("worker-2".to_owned());
    assert_eq!(job.take_events(), [lost(&"worker-2".to_owned()), withdrew], "one that waits for a rank");
    job.receive(3, ToServer::Enter { worker: "worker-0".to_owned() }).unwrap();
    job.take_events();
    job.host_lost(0, silence);
    assert_eq!(job.take_events(), [], "one that has entered again");
}
