use super::super::hosts::{Cooldown, parse};
use super::*;

struct TestJob {
    driver: Driver,
    now: Instant,
}

impl TestJob {
    fn new(first: usize, least: usize, most: usize) -> Self {
        let timeout = Duration::from_secs(60);
        let limits =
            ElasticLimits { num_proc: first, min_num_proc: least, max_num_proc: most, reset_limit: None, timeout };
        Self { driver: Driver::new(limits, HostPool::new(None)), now: Instant::now() }
    }

    fn hosts(&mut self, text: &str) -> Vec<WorkerAction> {
        self.driver.discovered(parse(text, None).unwrap(), self.now);
        self.driver.take_actions()
    }

    fn enter(&mut self, ids: &[WorkerId]) -> Vec<WorkerAction> {
        ids.iter().for_each(|id| self.driver.worker_ready(*id, self.now));
        self.driver.take_actions()
    }

    fn fail(&mut self, id: WorkerId) -> Vec<WorkerAction> {
        self.driver.worker_ended(id, Some("killed".to_owned()), 0.0, self.now);
        self.driver.take_actions().into_iter().filter(|action| !matches!(action, WorkerAction::Log(_))).collect()
    }

    fn end(&mut self, id: WorkerId) -> Vec<WorkerAction> {
        self.driver.worker_ended(id, None, 0.0, self.now);
        self.driver.take_actions()
    }

    fn wait(&mut self, seconds: u64) -> Vec<WorkerAction> {
        self.now += Duration::from_secs(seconds);
        self.driver.tick(self.now);
        self.driver.take_actions()
    }

    fn failed(&self) -> &str {
        match self.driver.outcome() {
            Some(JobOutcome::Failed(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

fn start(worker: WorkerId, host: &str, slot: usize, rank: usize, size: usize) -> WorkerAction {
    WorkerAction::Start { worker, place: WorkerSlot { host: host.to_owned(), slot }, rank, size }
}

fn assign_ranks(workers: &[WorkerId]) -> WorkerAction {
    WorkerAction::AssignRanks { workers: workers.to_vec() }
}

#[test]
fn a_job_waits_for_its_slots_and_ends_when_all_have() {
    let mut job = TestJob::new(3, 2, 4);
    assert_eq!(job.hosts("a:2"), []);
    assert_eq!(job.hosts("a:2\nb:1"), [start(0, "a", 0, 0, 3), start(1, "a", 1, 1, 3), start(2, "b", 0, 2, 3)]);
    assert_eq!(job.enter(&[2, 0]), []);
    assert_eq!(job.enter(&[1]), [assign_ranks(&[0, 1, 2])]);
    assert_eq!(job.end(1), []);
    assert_eq!(job.end(0), []);
    assert_eq!(job.driver.outcome(), None);
    assert_eq!(job.end(2), []);
    assert_eq!(job.driver.outcome(), Some(&JobOutcome::Done));
}

#[test]
fn new_places_are_told_and_taken_when_all_have_come() {
    let mut job = TestJob::new(1, 1, 3);
    job.hosts("b:1");
    assert_eq!(job.enter(&[0]), [assign_ranks(&[0])]);
    assert_eq!(
        job.hosts("a:3\nb:1"),
        [start(1, "a", 0, 1, 3), start(2, "a", 1, 2, 3), WorkerAction::Notify { kinds: 2 }]
    );
    assert_eq!(job.hosts("a:3\nb:1"), [], "the same change is reported once");
    assert_eq!(job.wait(6), [WorkerAction::Notify { kinds: 2 }], "or again after a while");
    assert_eq!(job.enter(&[1, 0]), []);
    assert_eq!(job.enter(&[2]), [assign_ranks(&[0, 1, 2])], "the old one stays rank 0");
    assert_eq!(job.hosts("a:2"), [WorkerAction::Notify { kinds: 1 }]);
    assert_eq!(job.enter(&[0, 1, 2]), [WorkerAction::Remove { worker: 0 }, assign_ranks(&[1, 2])]);
}

#[test]
fn a_failure_takes_its_host_along() {
    let mut job = TestJob::new(3, 1, 9);
    job.hosts("a:2\nb:1");
    job.enter(&[0, 1, 2]);
    assert_eq!(job.fail(1), [WorkerAction::Stop { worker: 0 }]);
    assert_eq!(job.enter(&[2]), [], "the other one on that host may still be in the session");
    assert_eq!(job.fail(0), [assign_ranks(&[2])]);
    assert_eq!(job.fail(2), []);
    assert_eq!(job.failed(), "workers have failed on all hosts; first: killed");
}

#[test]
fn nobody_left_with_the_state_is_the_end() {
    let mut job = TestJob::new(1, 1, 9);
    job.hosts("a:1");
    job.enter(&[0]);
    job.hosts("a:1\nb:1");
    job.enter(&[1]);
    assert_eq!(job.fail(0), [WorkerAction::Stop { worker: 1 }]);
    job.end(1);
    assert!(job.failed().contains("unable to broadcast state"), "{}", job.failed());
}

#[test]
fn too_few_survivors_wait_for_others_or_end() {
    let mut job = TestJob::new(2, 2, 2);
    job.hosts("a:1\nb:1");
    job.enter(&[0, 1]);
    job.fail(1);
    let waits = "1 of at least 2 slots are left: the job waits for more".to_owned();
    assert_eq!(job.enter(&[0]), [WorkerAction::Log(waits)]);
    assert_eq!(job.hosts("a:1\nb:1\nc:1"), [start(2, "c", 0, 1, 2)]);
    assert_eq!(job.enter(&[2]), [assign_ranks(&[0, 2])]);
    job.fail(2);
    job.enter(&[0]);
    assert_eq!(job.wait(61), [WorkerAction::Stop { worker: 0 }]);
    job.end(0);
    assert!(job.failed().contains("minimum number of slots to become available"), "{}", job.failed());
}

#[test]
fn a_worker_that_does_not_enter_the_next_session_is_stopped() {
    let mut job = TestJob::new(2, 1, 2);
    job.hosts("a:1\nb:1");
    job.enter(&[0, 1]);
    job.enter(&[0]);
    job.wait(0);
    assert!(job.wait(61).contains(&WorkerAction::Stop { worker: 1 }));
    job.end(1);
    assert_eq!(job.enter(&[2]), [assign_ranks(&[0, 2])]);
}

#[test]
fn a_job_of_which_no_worker_comes_ends() {
    let mut job = TestJob::new(3, 1, 3);
    job.hosts("a:2\nb:1");
    assert_eq!(job.wait(59), []);
    assert_eq!(job.driver.tick(job.now), Some(job.now + Duration::from_secs(1)));
    let actions = job.wait(1);
    let failure = "workers on `a`, `b` did not call `init()` within the elastic timeout of 60s";
    assert_eq!(actions[0], WorkerAction::Log(format!("{failure}; these hosts are not used any more")));
    assert_eq!(actions[1..], [0, 1, 2].map(|worker| WorkerAction::Stop { worker }));
    (0..3).for_each(|id| drop(job.end(id)));
    assert_eq!(job.failed(), format!("workers have failed on all hosts; first: {failure}"));
}

#[test]
fn hosts_that_return_do_not_keep_a_job_of_which_no_worker_comes() {
    let mut job = TestJob::new(1, 1, 1);
    let seconds = Duration::from_secs;
    job.driver.hosts = HostPool::new(Some(Cooldown { low: seconds(1), high: seconds(2) }));
    job.hosts("a:1");
    job.wait(60);
    job.end(0);
    assert!(job.failed().starts_with("all workers have failed; first: workers on `a` did not"), "{}", job.failed());
}

#[test]
fn a_younger_host_replaces_one_whose_worker_does_not_come() {
    let mut job = TestJob::new(1, 1, 2);
    job.hosts("a:1");
    job.wait(50);
    assert_eq!(job.hosts("a:1\nb:1"), [start(1, "b", 0, 1, 2)]);
    assert_eq!(job.wait(10)[1..], [WorkerAction::Stop { worker: 0 }]);
    job.fail(0);
    assert_eq!(job.enter(&[1]), [assign_ranks(&[1])]);
}

#[test]
fn a_worker_that_comes_late_gives_the_others_the_whole_limit() {
    let mut job = TestJob::new(2, 1, 2);
    job.hosts("a:1\nb:1");
    job.wait(59);
    assert_eq!(job.enter(&[0]), []);
    assert_eq!(job.wait(59), []);
    assert_eq!(job.enter(&[1]), [assign_ranks(&[0, 1])]);
    // A running session has no limit, whatever its members do.
    job.enter(&[0]);
    job.driver.withdrawn(0, job.now);
    assert!(!job.wait(600).iter().any(|action| matches!(action, WorkerAction::Stop { .. })));
}

#[test]
fn a_worker_that_does_not_ask_again_is_stopped() {
    let mut job = TestJob::new(2, 2, 2);
    job.hosts("a:1\nb:1");
    job.wait(50);
    job.enter(&[0]);
    job.driver.withdrawn(0, job.now);
    let actions = job.wait(10);
    assert_eq!(actions[1..], [WorkerAction::Stop { worker: 1 }], "worker 0 has been silent for 10 seconds only");
    job.fail(1);
    assert!(job.wait(50).contains(&WorkerAction::Stop { worker: 0 }));
    job.fail(0);
    assert!(job.failed().starts_with("workers have failed on all hosts; first: workers on `b`"), "{}", job.failed());
}

#[test]
fn rank_0_has_the_state_whatever_became_of_the_hosts() {
    // The host was missing for a moment, so another host is the oldest now.
    let mut job = TestJob::new(1, 1, 9);
    job.hosts("a:1");
    job.enter(&[0]);
    job.hosts("b:1");
    job.hosts("a:1\nb:1");
    assert_eq!(job.enter(&[1, 0]), [assign_ranks(&[0, 1])]);

    // The worker at the first place was replaced; its neighbour has the state, and so has one on another host.
    let mut job = TestJob::new(3, 1, 9);
    job.hosts("a:2\nb:1");
    job.enter(&[0, 1, 2]);
    job.enter(&[1, 2]);
    assert!(job.wait(61).contains(&WorkerAction::Stop { worker: 0 }));
    job.end(0);
    assert_eq!(job.enter(&[3]), [assign_ranks(&[1, 3, 2])]);

    // As before, but no other worker on that host has it.
    let mut job = TestJob::new(2, 1, 9);
    job.hosts("a:1\nb:1");
    job.enter(&[0, 1]);
    job.enter(&[1]);
    assert!(job.wait(61).contains(&WorkerAction::Stop { worker: 0 }));
    job.end(0);
    assert_eq!(job.enter(&[2]), [assign_ranks(&[1, 2])]);
}

#[test]
fn no_session_begins_without_a_place_for_the_state() {
    let mut job = TestJob::new(1, 1, 9);
    job.hosts("a:1");
    job.enter(&[0]);
    assert_eq!(job.hosts("b:1"), [start(1, "b", 0, 0, 1), WorkerAction::Notify { kinds: 3 }]);
    assert_eq!(job.enter(&[1, 0]), [WorkerAction::Stop { worker: 0 }, WorkerAction::Stop { worker: 1 }]);
    job.end(0);
    job.end(1);
    assert!(job.failed().contains("unable to broadcast state"), "{}", job.failed());
}

#[test]
fn new_workers_wait_as_long_as_a_session_goes_well() {
    let mut job = TestJob::new(1, 1, 9);
    job.hosts("a:1");
    job.enter(&[0]);
    job.hosts("a:2");
    assert_eq!(job.enter(&[1]), []);
    for _ in 0..9 {
        assert_eq!(job.wait(61), [WorkerAction::Notify { kinds: 2 }]);
    }
    assert_eq!(job.enter(&[0]), [assign_ranks(&[0, 1])]);
}

#[test]
fn resets_have_a_limit() {
    let mut job = TestJob::new(2, 1, 2);
    job.driver.limits.reset_limit = Some(1);
    job.hosts("a:1\nb:1\nc:1");
    job.enter(&[0, 1]);
    job.fail(1);
    job.enter(&[0]);
    assert_eq!(job.enter(&[2]), [assign_ranks(&[0, 2])]);
    job.fail(2);
    assert_eq!(job.enter(&[0]), [WorkerAction::Stop { worker: 0 }]);
    job.end(0);
    assert_eq!(job.failed(), "number of resets during elastic job exceeded limit: 1");
}

#[test]
fn a_success_ends_those_that_have_not_begun() {
    let mut job = TestJob::new(1, 1, 2);
    job.hosts("a:1");
    job.enter(&[0]);
    job.hosts("a:2");
    assert_eq!(job.end(0), [WorkerAction::Stop { worker: 1 }]);
    assert_eq!(job.driver.outcome(), None);
    job.fail(1);
    assert_eq!(job.driver.outcome(), Some(&JobOutcome::Done));
}

/// For random orders of events: a session has each live worker once, in the order of places; rank 0 has been in the
/// previous session if there was one; and the job ends.
#[test]
fn every_order_of_events_keeps_the_invariants() {
    for seed in 0..400u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = move |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let mut job = TestJob::new(2, 1 + draw(2) as usize, 4);
        let mut live: Vec<WorkerId> = Vec::new();
        let mut stopped: Vec<WorkerId> = Vec::new();
        let mut session: Vec<WorkerId> = Vec::new();
        for step in 0..2000 {
            for action in job.driver.take_actions() {
                match action {
                    WorkerAction::Start { worker, .. } => live.push(worker),
                    WorkerAction::Stop { worker } | WorkerAction::Remove { worker } => stopped.push(worker),
                    WorkerAction::AssignRanks { workers } => {
                        assert!(workers.iter().all(|worker| live.contains(worker) && !stopped.contains(worker)));
                        assert!(
                            session.is_empty() || session.contains(&workers[0]),
                            "seed {seed}: rank 0 has no state"
                        );
                        session = workers;
                    }
                    WorkerAction::Notify { .. } | WorkerAction::Log(_) => {}
                }
            }
            if job.driver.outcome().is_some() {
                break;
            }
            assert!(step < 1999, "seed {seed}: the job does not end: {:?}", job.driver);
            job.now += Duration::from_millis(draw(3000));
            let now = job.now;
            let pick = |draw: u64, from: &[WorkerId]| from.get(draw as usize % from.len().max(1)).copied();
            match draw(8) {
                0 => {
                    let found = format!("a:{}\nb:{}\nc:1", draw(3), draw(3));
                    job.driver.discovered(parse(&found, None).unwrap(), now);
                }
                1..=4 => pick(draw(64), &live).into_iter().for_each(|id| job.driver.worker_ready(id, now)),
                5 if step > 100 => {
                    if let Some(id) = pick(draw(64), &live) {
                        live.retain(|other| *other != id);
                        job.driver.worker_ended(id, draw(2).eq(&0).then(|| "killed".to_owned()), 0.5, now);
                    }
                }
                6 => {
                    if let Some(id) = pick(draw(64), &stopped) {
                        live.retain(|other| *other != id);
                        stopped.retain(|other| *other != id);
                        job.driver.worker_ended(id, None, 0.5, now);
                    }
                }
                _ => _ = job.driver.tick(now),
            }
        }
    }
}

#[test]
fn a_host_that_the_user_bans_loses_its_workers() {
    let mut job = TestJob::new(2, 1, 2);
    job.hosts("a:1\nb:1");
    assert_eq!(job.enter(&[0, 1]), [assign_ranks(&[0, 1])]);
    job.driver.ban("b", 0.0, job.now);
    assert_eq!(job.driver.take_actions()[0], WorkerAction::Stop { worker: 1 });
    assert_eq!(job.driver.hosts().usable(), [("a".to_owned(), 1)]);
    assert!(job.driver.hosts().is_banned("b", job.now));
}
