//! Rounds of gradients on devices, over the fake driver and NCCL of `fake_device/`: a vote holds the reductions. Ranks
//! are threads.

#[path = "fake_device/mod.rs"]
mod fake_device;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fake_device::{Fake, LIMIT, eventually, has_fake_device};
use smd_core::buffer::{DType, Device, TensorView};
use smd_core::collectives::Communicator;
use smd_core::negotiation::{Negotiator, NegotiatorOptions};
use smd_core::reducer::ballot::{Ballot, Readiness, VoteResult};
use smd_core::reducer::{DeviceBucket, ParamSpec, Reducer, ReducerOptions};
use smd_core::transport::mock::{MockOptions, MockTransport};
use smd_core::world::{LocalStore, Monitor};

/// Lengths of gradients that are reduced in place, each in a bucket of its own. They arrive from the last to the first.
const ELEMS: [usize; 3] = [3 << 18, 2 << 18, 1 << 18];
/// The calls of the first member in a planned round.
const PLANNED: [usize; 3] = [1 << 18, 2 << 18, 3 << 18];

/// One of two members.
struct Member {
    rank: usize,
    reducer: Arc<Reducer>,
    negotiator: Arc<Negotiator>,
    group: Arc<Communicator>,
    computation: usize,
    communication: usize,
}

impl Member {
    /// Creates both members.
    fn pair(fake: &Fake) -> Vec<Self> {
        let store = Arc::new(LocalStore::default());
        let net = MockTransport::net(2, MockOptions { seed: 1, max_delay: Duration::ZERO });
        let make = |rank: usize| {
            let monitor = Arc::new(Monitor::new(rank));
            let communicator = |id| {
                let made = Communicator::new(id, net[rank].clone(), monitor.clone(), LIMIT);
                made.set_store(store.clone());
                made
            };
            let (first, group, own) = (communicator(3), communicator(4), communicator(5));
            let options = NegotiatorOptions {
                cache_capacity: 100,
                fusion_bytes: 1 << 20,
                stall_warning: LIMIT,
                stall_limit: LIMIT,
                tuning: None,
                core: None,
                local_rank: rank,
            };
            let connect = Box::new(move || Ok(first));
            let negotiator = Negotiator::start(3, group.clone(), monitor.clone(), options, connect, None).unwrap();
            own.connect_device(rank as u16).unwrap();
            let params = (ELEMS.iter().enumerate())
                .map(|(index, elems)| ParamSpec::dense(format!("p{index}"), [*elems as u64], DType::Float32));
            let options = ReducerOptions { on_device: true, bucket_bytes: vec![1 << 20], ..ReducerOptions::default() };
            let reducer = Reducer::new(own, params.collect(), options).unwrap();
            reducer.follow_order(vec![2, 1, 0]).unwrap();
            let (computation, communication) = (fake.stream(), fake.stream());
            Self { rank, reducer, negotiator, group, computation, communication }
        };
        thread::scope(|scope| {
            let make = &make;
            let members: Vec<_> = (0..2).map(|rank| scope.spawn(move || make(rank))).collect();
            members.into_iter().map(|member| member.join().unwrap()).collect()
        })
    }

    fn begin(&self) -> Ballot {
        self.reducer.begin_by_vote(&self.negotiator, &self.group, "round", "plan").unwrap()
    }

    fn vote_by_name(&self) -> Ballot {
        let none = |_| ();
        Ballot::cast(&self.negotiator, &self.group, "round", "plan", Readiness::ByName, none, none).unwrap()
    }

    fn mark_ready(&self, param: usize) -> std::ops::Range<usize> {
        // SAFETY: the reducer does not look at gradients on devices.
        unsafe { self.reducer.mark_ready(param, 64 as *mut u8, true) }.unwrap()
    }

    fn launch(&self, buckets: std::ops::Range<usize>) {
        for index in buckets {
            let param = self.reducer.plan().buckets()[index].slots[0].param;
            let device = Device::Cuda(self.rank as u16);
            // SAFETY: the fake NCCL looks at no memory.
            let view = unsafe { TensorView::new(64 as *mut u8, ELEMS[param], DType::Float32, device, 0) }.unwrap();
            let (pieces, flat, wire) = (&[][..], None, None);
            let bucket = DeviceBucket { pieces, flat, wire, in_place: &[view], stream: self.computation };
            // SAFETY: as above; the streams are never freed.
            unsafe { self.reducer.launch(index, &bucket, self.communication) }.unwrap();
        }
    }

    fn backward(&self) {
        (0..ELEMS.len()).rev().for_each(|param| self.launch(self.mark_ready(param)));
    }

    fn finish(&self, fake: &Fake) {
        self.reducer.finish().unwrap();
        // SAFETY: the stream is of this device.
        unsafe { self.reducer.follow(self.computation) }.unwrap();
        fake.synchronize(self.computation);
        self.reducer.await_device().unwrap();
    }

    /// A round in which this member's result comes before its first gradient.
    fn late_round(&self, fake: &Fake) {
        assert_eq!(self.begin().result().unwrap(), VoteResult::Planned);
        self.backward();
        self.finish(fake);
    }
}

#[test]
fn a_vote_holds_reductions_until_its_result() {
    if !has_fake_device("a_vote_holds_reductions_until_its_result") {
        return;
    }
    let fake = Fake::new();
    let members = Member::pair(&fake);
    let [early, late] = &members[..] else { panic!("two members") };
    let mut expected = Vec::new();
    for round in 0..4 {
        let ballot = early.begin();
        early.backward();
        thread::sleep(Duration::from_millis(20));
        assert_eq!(fake.lengths(), expected, "the vote of round {round} is open");
        if round % 2 == 1 {
            // The plan is declined; held reductions are dropped, and so is one that comes after the result.
            assert_eq!(late.vote_by_name().result().unwrap(), VoteResult::ByName);
            assert_eq!(ballot.result().unwrap(), VoteResult::ByName);
            early.reducer.abandon("never told: it goes by name", false);
            let ballot = early.begin();
            let before = early.mark_ready(2);
            assert!(!before.is_empty());
            late.vote_by_name();
            assert_eq!(ballot.result().unwrap(), VoteResult::ByName);
            early.launch(before);
            assert!(early.mark_ready(1).is_empty(), "nothing is packed after the result");
            early.reducer.abandon("never told: it goes by name", false);
            early.reducer.await_device().unwrap();
        } else {
            thread::scope(|scope| {
                scope.spawn(|| late.late_round(&fake));
                assert_eq!(ballot.result().unwrap(), VoteResult::Planned);
                early.finish(&fake);
            });
            expected.extend(PLANNED);
        }
        assert_eq!(fake.lengths(), expected, "after round {round}");
    }
    members.iter().for_each(|member| member.reducer.communicator().close("the end"));
    eventually("freeing all communicators", || fake.live_communicators() == 0);
}

#[test]
fn a_result_that_comes_between_buckets_keeps_their_order() {
    if !has_fake_device("a_result_that_comes_between_buckets_keeps_their_order") {
        return;
    }
    let fake = Fake::new();
    let members = Member::pair(&fake);
    let mut expected = Vec::new();
    for round in 0..200_u64 {
        // Both vote at almost the same time, so results come before, between and after the buckets.
        thread::scope(|scope| {
            for member in &members {
                let fake = &fake;
                scope.spawn(move || {
                    let ballot = member.begin();
                    for param in (0..ELEMS.len()).rev() {
                        thread::sleep(Duration::from_micros(round * 3 % 100 * (1 + member.rank as u64)));
                        member.launch(member.mark_ready(param));
                    }
                    assert_eq!(ballot.result().unwrap(), VoteResult::Planned);
                    member.finish(fake);
                });
            }
        });
        expected.extend(PLANNED);
    }
    assert_eq!(fake.lengths(), expected);
}

#[test]
fn a_member_that_leaves_a_round_with_an_open_vote_is_named() {
    if !has_fake_device("a_member_that_leaves_a_round_with_an_open_vote_is_named") {
        return;
    }
    let fake = Fake::new();
    let members = Member::pair(&fake);
    let [leaving, other] = &members[..] else { panic!("two members") };
    thread::scope(|scope| {
        for member in &members {
            scope.spawn(|| member.late_round(&fake));
        }
    });
    let ballot = leaving.begin();
    leaving.backward();
    let start = Instant::now();
    leaving.reducer.abandon("its round of gradients ended with an exception", false);
    assert!(start.elapsed() < Duration::from_secs(5), "held reductions are not waited for");
    // The other one carries out the round.
    assert_eq!(other.begin().result().unwrap(), VoteResult::Planned);
    assert_eq!(ballot.result().unwrap(), VoteResult::Planned);
    other.backward();
    let error = other.reducer.finish().err().or_else(|| other.reducer.await_device().err()).expect("it failed");
    assert!(error.to_string().contains("rank 0"), "{error}");
    assert!(error.to_string().contains("ended with an exception"), "{error}");
    assert_eq!(fake.lengths(), PLANNED, "what was held is never carried out");
}
