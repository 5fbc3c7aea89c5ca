//! Simulates groups of up to thousands of ranks in one thread; a seed determines the order in which messages are
//! delivered.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::Gradients;
use super::description::Description;
use super::factors::Factors;
use super::machine::{Machine, NegotiationAction, Operand, SubmissionId};
use super::message::{NegotiationLimits, NegotiationMessage};
use super::stall::{StallTimeouts, Waits};
use super::tree::{FAN_IN, Tree};
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Kind;

const TIMEOUTS: StallTimeouts = StallTimeouts { warning: Duration::from_secs(60), limit: Duration::from_secs(300) };
const LIMITS: NegotiationLimits = NegotiationLimits { cache: 4096, fusion_bytes: 64 << 20 };

#[derive(Clone)]
struct SimulationRandom(u64);

impl SimulationRandom {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) ^ (self.0 >> 11)) as usize % limit
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        (1..list.len()).rev().for_each(|at| list.swap(at, self.below(at + 1)));
    }
}

/// An all-reduce whose shape identifies its name.
fn sum(shape: u64) -> Description {
    Description {
        kind: Kind::AllReduce,
        dtype: DType::Float32,
        op: ReduceOp::Sum,
        root: 0,
        on_device: false,
        shape: vec![shape],
        blocks: vec![],
        bytes: 4 * shape,
        message: String::new(),
        is_last: false,
        factors: Factors::default(),
        more: Vec::new(),
    }
}

/// The actions of a rank, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SimulationEvent {
    /// Shapes of the calls of one operation, and whether the rank itself submitted them.
    Ran(Vec<u64>),
    Failed(String, String),
    Joined(usize),
    EndedSteps(String),
}

#[derive(Clone, Copy, Default)]
struct Traffic {
    messages: usize,
    bytes: usize,
}

struct SimulatedRank {
    machine: Machine,
    tree: Tree,
    calls: HashMap<SubmissionId, (String, u64)>,
    events: Vec<SimulationEvent>,
    /// Calls that ran or failed.
    answered: usize,
    received: Traffic,
    sent: Traffic,
    warnings: Vec<String>,
}

struct SimulatedWorld {
    ranks: Vec<SimulatedRank>,
    /// Messages in flight by receiver and sender, in order for each pair.
    frames: Vec<BTreeMap<usize, VecDeque<Arc<[u8]>>>>,
    now: Duration,
    ticket: SubmissionId,
}

impl SimulatedWorld {
    fn new(size: usize, limits: NegotiationLimits, timeouts: StallTimeouts) -> Self {
        let global: Arc<[usize]> = (0..size).collect();
        let rank = |me| SimulatedRank {
            machine: Machine::new(Tree::new(me, size), global.clone(), limits, timeouts),
            tree: Tree::new(me, size),
            calls: HashMap::new(),
            events: Vec::new(),
            answered: 0,
            received: Traffic::default(),
            sent: Traffic::default(),
            warnings: Vec::new(),
        };
        let frames = (0..size).map(|_| BTreeMap::new()).collect();
        Self { ranks: (0..size).map(rank).collect(), frames, now: Duration::ZERO, ticket: 0 }
    }

    fn submit(&mut self, rank: usize, name: &str, description: Description, blocking: bool) {
        self.ticket += 1;
        let shape = description.shape.first().copied().unwrap_or(0);
        self.ranks[rank].calls.insert(self.ticket, (name.to_owned(), shape));
        self.ranks[rank].machine.submit(self.ticket, name, description, blocking, self.now).expect("it has not joined");
    }

    fn flush(&mut self, rank: usize) {
        let mut actions = Vec::new();
        self.ranks[rank].machine.flush(self.now, &mut actions);
        self.perform(rank, actions);
    }

    /// Delivers the next frame of one pair.
    fn deliver(&mut self, rank: usize, from: usize) {
        let queue = self.frames[rank].get_mut(&from).expect("a frame is under way");
        let frame = queue.pop_front().expect("a frame is under way");
        if queue.is_empty() {
            self.frames[rank].remove(&from);
        }
        let received = &mut self.ranks[rank].received;
        received.messages += 1;
        received.bytes += frame.len();
        let message: NegotiationMessage = postcard::from_bytes(&frame).expect("a message");
        let mut actions = Vec::new();
        self.ranks[rank].machine.receive(from, message, self.now, &mut actions).expect("a sensible message");
        self.perform(rank, actions);
    }

    fn perform(&mut self, me: usize, actions: Vec<NegotiationAction>) {
        for action in actions {
            let rank = &mut self.ranks[me];
            let (to, message): (Vec<usize>, NegotiationMessage) = match action {
                NegotiationAction::Up(up) => (rank.tree.parent.into_iter().collect(), NegotiationMessage::Up(up)),
                NegotiationAction::Down(down) => {
                    (rank.tree.children.iter().map(|child| child.start).collect(), NegotiationMessage::Down(down))
                }
                NegotiationAction::Run(parts) => {
                    let shape = |part: &Operand| match part {
                        Operand::Own(ticket) => rank.calls[ticket].1,
                        Operand::Neutral(description) => description.shape.first().copied().unwrap_or(0),
                    };
                    rank.answered += parts.iter().filter(|part| matches!(part, Operand::Own(_))).count();
                    rank.events.push(SimulationEvent::Ran(parts.iter().map(shape).collect()));
                    continue;
                }
                NegotiationAction::Fail(ticket, error) => {
                    rank.answered += 1;
                    rank.events.push(SimulationEvent::Failed(rank.calls[&ticket].0.clone(), error.to_string()));
                    continue;
                }
                NegotiationAction::EndSteps(end) => {
                    rank.events.push(SimulationEvent::EndedSteps(end.detail));
                    continue;
                }
                NegotiationAction::Joined(last) => {
                    rank.events.push(SimulationEvent::Joined(last));
                    continue;
                }
                NegotiationAction::Warn(text) | NegotiationAction::Blame(text) => {
                    rank.warnings.push(text);
                    continue;
                }
                NegotiationAction::Tried(_) => continue,
            };
            let frame: Arc<[u8]> = postcard::to_stdvec(&message).expect("it can be written").into();
            for to in to {
                let sent = &mut self.ranks[me].sent;
                sent.messages += 1;
                sent.bytes += frame.len();
                self.frames[to].entry(me).or_default().push_back(frame.clone());
            }
        }
    }

    /// Delivers all messages in a random order, until none is in flight.
    fn settle(&mut self, random: &mut SimulationRandom) {
        loop {
            let pairs: Vec<(usize, usize)> = (self.frames.iter().enumerate())
                .flat_map(|(to, queues)| queues.keys().map(move |from| (to, *from)))
                .collect();
            let Some(&(to, from)) = (!pairs.is_empty()).then(|| &pairs[random.below(pairs.len())]) else { return };
            self.deliver(to, from);
            if random.below(3) > 0 || self.frames[to].is_empty() {
                self.flush(to);
            }
        }
    }

    /// Delivers as threads do, until no message is in flight: each rank processes all its messages, and then sends
    /// the messages that follow from them.
    fn settle_in_rounds(&mut self) {
        while self.frames.iter().any(|queues| !queues.is_empty()) {
            for rank in 0..self.ranks.len() {
                let senders: Vec<(usize, usize)> =
                    self.frames[rank].iter().map(|(from, queue)| (*from, queue.len())).collect();
                for (from, count) in senders {
                    (0..count).for_each(|_| self.deliver(rank, from));
                }
                self.flush(rank);
            }
        }
    }

    /// Advances the time; every rank checks its waits twenty times a second.
    fn pass(&mut self, time: Duration, random: &mut SimulationRandom, idle: impl Fn(usize) -> bool) {
        self.pass_with(time, random, |rank| Waits { idle: idle(rank), ..Waits::default() });
    }

    fn pass_with(&mut self, time: Duration, random: &mut SimulationRandom, waits: impl Fn(usize) -> Waits) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(50);
            for rank in 0..self.ranks.len() {
                let mut actions = Vec::new();
                self.ranks[rank].machine.tick(self.now, waits(rank), &mut actions);
                self.perform(rank, actions);
            }
            self.settle(random);
        }
    }

    fn reset_traffic(&mut self) {
        for rank in &mut self.ranks {
            (rank.received, rank.sent) = Default::default();
        }
    }

    /// The largest number of messages that any rank sent or received.
    fn most(&self) -> Traffic {
        let both = self.ranks.iter().flat_map(|rank| [rank.received, rank.sent]);
        both.fold(Traffic::default(), |most, one| Traffic {
            messages: most.messages.max(one.messages),
            bytes: most.bytes.max(one.bytes),
        })
    }

    fn texts(&self, rank: usize) -> Vec<String> {
        let text = |event: &SimulationEvent| match event {
            SimulationEvent::Failed(name, text) => Some(format!("{name}: {text}")),
            _ => None,
        };
        self.ranks[rank].events.iter().filter_map(text).collect()
    }

    fn ended_steps(&self, rank: usize) -> Vec<&str> {
        let ended = self.ranks[rank].events.iter().filter_map(|event| match event {
            SimulationEvent::EndedSteps(text) => Some(text.as_str()),
            _ => None,
        });
        ended.collect()
    }
}

/// 4,096 ranks submit the same names in different orders, three times; the bounds do not depend on the number of
/// ranks.
#[test]
fn traffic_of_a_rank_does_not_grow_with_the_group() {
    const NAMES: usize = 40;
    for size in [2, 9, 64, 4096] {
        let mut world = SimulatedWorld::new(size, LIMITS, TIMEOUTS);
        let mut random = SimulationRandom(size as u64);
        let names: Vec<String> = (0..NAMES).map(|name| format!("layer.{name}.weight")).collect();
        for step in 0..3 {
            world.reset_traffic();
            let chunks = if step == 2 { 4 } else { 1 };
            let mut orders: Vec<Vec<usize>> = (0..size).map(|_| (0..NAMES).collect()).collect();
            orders.iter_mut().for_each(|order| random.shuffle(order));
            for chunk in 0..chunks {
                for (rank, order) in orders.iter().enumerate() {
                    for &name in &order[chunk * NAMES / chunks..(chunk + 1) * NAMES / chunks] {
                        world.submit(rank, &names[name], sum(name as u64 + 1), false);
                    }
                    world.flush(rank);
                }
                world.settle_in_rounds();
            }
            assert!(world.ranks.iter().all(|rank| rank.answered == NAMES * (step + 1)), "{size} {step}");
            let first = &world.ranks[0].events;
            assert!(world.ranks.iter().all(|rank| rank.events == *first), "{size} {step}");
            let most = world.most();
            let children = FAN_IN.min(size - 1);
            match step {
                // Descriptions: each rank sends its own once, and forwards as many as there are.
                0 => assert!(most.messages <= children + 1 && most.bytes <= (children + 1) * NAMES * 64, "{size}"),
                // One bit for each name, and one message up and one down for each neighbour.
                1 => {
                    let bytes = (children + 1) * (NAMES / 8 + 24);
                    assert!(most.messages <= children + 1 && most.bytes <= bytes, "{size} {}", most.bytes);
                    let last = world.ranks[0].events.last();
                    assert!(matches!(last, Some(SimulationEvent::Ran(shapes)) if shapes.len() == NAMES), "{last:?}");
                }
                // In four parts; in a large group, no name is ready on all ranks before the last part.
                _ => assert!(most.messages <= 4 * (children + 1) * 4, "{size} {}", most.messages),
            }
        }
    }
}

/// A rank never submits a name: in a large group, the reports of it are small, too.
#[test]
fn reports_of_a_large_group_are_small_and_name_the_missing() {
    let mut world = SimulatedWorld::new(400, LIMITS, TIMEOUTS);
    let mut random = SimulationRandom(5);
    for rank in (0..400).filter(|rank| *rank != 77 && *rank != 300) {
        (0..20).for_each(|name| world.submit(rank, &format!("w{name:02}"), sum(1), false));
        world.flush(rank);
    }
    world.settle_in_rounds();
    world.reset_traffic();
    world.pass(Duration::from_secs(2), &mut random, |_| false);
    world.now += TIMEOUTS.warning;
    world.pass(Duration::from_millis(500), &mut random, |_| false);
    assert_eq!(world.ranks[0].warnings.len(), 1);
    let text = &world.ranks[0].warnings[0];
    let names = "[w00, w01, w02, w03, w04, w05 ...]";
    assert!(text.ends_with(&format!("call them.\nMissing ranks:\n77: {names}\n300: {names}")), "{text}");
    assert!(world.most().messages <= 60 * (FAN_IN + 1), "{}", world.most().messages);
    world.now += TIMEOUTS.limit;
    world.pass(Duration::from_millis(500), &mut random, |_| false);
    for rank in (0..400).filter(|rank| *rank != 77 && *rank != 300) {
        let texts = world.texts(rank);
        assert_eq!(texts.len(), 20);
        assert!(texts[3].starts_with("w03: `w03` timed out after 36"), "{}", texts[3]);
        assert!(texts[3].contains("rank(s) [77, 300]"), "{}", texts[3]);
    }
    // The late ranks submit the name, and wait for a new call of the others.
    for rank in [77, 300] {
        world.submit(rank, "w03", sum(1), false);
        world.flush(rank);
    }
    for rank in (0..400).filter(|rank| *rank != 77 && *rank != 300) {
        world.submit(rank, "w03", sum(1), false);
        world.flush(rank);
    }
    world.settle(&mut random);
    assert!(world.ranks.iter().all(|rank| rank.events.last() == Some(&SimulationEvent::Ran(vec![1]))));
}

#[test]
fn ranks_that_wait_for_different_names_hear_of_it_within_two_seconds() {
    for size in [2, 3, 12] {
        let mut world = SimulatedWorld::new(size, LIMITS, TIMEOUTS);
        let mut random = SimulationRandom(1);
        for rank in 0..size {
            world.submit(rank, if rank == 1 { "b" } else { "a" }, sum(1), true);
            world.flush(rank);
        }
        world.pass(Duration::from_millis(1600), &mut random, |_| false);
        for rank in 0..size {
            let [text] = &world.texts(rank)[..] else { panic!("{:?}", world.ranks[rank].events) };
            assert!(text.contains("no name is called by all: rank"), "{text}");
            assert!(text.contains("rank 1 waits for `b`"), "{text}");
            assert!(text.contains("for `a`"), "{text}");
        }
        // Everything works afterwards.
        for rank in 0..size {
            world.submit(rank, "a", sum(1), true);
            world.flush(rank);
        }
        world.settle(&mut random);
        assert!(world.ranks.iter().all(|rank| rank.events.last() == Some(&SimulationEvent::Ran(vec![1]))));
    }
}

#[test]
fn a_slow_rank_is_no_false_alarm() {
    let mut world = SimulatedWorld::new(3, LIMITS, TIMEOUTS);
    let mut random = SimulationRandom(2);
    // Rank 1 computes while it waits for another name, as a graph may.
    world.submit(0, "a", sum(1), true);
    world.submit(1, "b", sum(2), false);
    world.submit(2, "a", sum(1), true);
    (0..3).for_each(|rank| world.flush(rank));
    world.pass(Duration::from_secs(20), &mut random, |rank| rank != 1);
    assert!(world.ranks.iter().all(|rank| rank.events.is_empty()));
    world.submit(1, "a", sum(1), false);
    world.flush(1);
    world.settle(&mut random);
    assert!(world.ranks.iter().all(|rank| rank.events == [SimulationEvent::Ran(vec![1])]));
    for rank in [0, 2] {
        world.submit(rank, "b", sum(2), false);
        world.flush(rank);
    }
    world.settle(&mut random);
    assert!(world.ranks.iter().all(|rank| rank.answered == 2));
    // As above, but rank 1 has nothing more to compute.
    world.submit(0, "a", sum(1), true);
    world.submit(1, "b", sum(2), false);
    world.submit(2, "a", sum(1), false);
    (0..3).for_each(|rank| world.flush(rank));
    world.pass(Duration::from_millis(1600), &mut random, |_| true);
    assert!(world.texts(2)[0].contains("ranks 0, 2 wait for `a`, rank 1 waits for `b`"), "{:?}", world.texts(2));
}

#[test]
fn a_collective_without_a_name_is_no_way_out() {
    let mut world = SimulatedWorld::new(2, LIMITS, TIMEOUTS);
    let mut random = SimulationRandom(6);
    world.submit(0, "a", sum(1), true);
    world.flush(0);
    world.pass_with(Duration::from_millis(1600), &mut random, |rank| Waits {
        idle: true,
        elsewhere: rank == 1,
        ..Waits::default()
    });
    let text = &world.texts(0)[0];
    assert!(text.contains("rank 0 waits for `a`, rank 1 waits in a collective without a name"), "{text}");
}

#[test]
fn steps_of_different_gradients_are_told_to_all_and_those_of_the_same_are_waited_for() {
    let mut random = SimulationRandom(7);
    let waits = |what: [&'static str; 3]| {
        move |rank: usize| Waits { idle: true, steps: vec![what[rank].to_owned()], ..Waits::default() }
    };
    let mut world = SimulatedWorld::new(3, LIMITS, TIMEOUTS);
    world.pass_with(Duration::from_secs(3), &mut random, waits(["a", "a", "a"]));
    assert!((0..3).all(|rank| world.ended_steps(rank).is_empty()));
    world.pass_with(Duration::from_millis(1600), &mut random, waits(["a", "b", "a"]));
    for rank in 0..3 {
        let text = world.ended_steps(rank).join(", ");
        assert!(text.contains("ranks 0, 2 wait for a, rank 1 waits for b"), "{text}");
    }
    // A rank that computes may still come.
    let mut world = SimulatedWorld::new(3, LIMITS, TIMEOUTS);
    let busy = |rank: usize| Waits { idle: rank != 1, ..waits(["a", "b", "a"])(rank) };
    world.pass_with(Duration::from_secs(3), &mut random, busy);
    assert!((0..3).all(|rank| world.ended_steps(rank).is_empty()));
}

#[test]
fn a_disagreement_is_reported_to_all_ranks() {
    let mut random = SimulationRandom(3);
    let differences: [(Description, &str); 5] = [
        (
            sum(5),
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [4], but another rank sent a tensor of shape [5]: ranks 0, 1, 3 ask for all_reduce(sum) of float32 [4], rank 2 asks for all_reduce(sum) of float32 [5]",
        ),
        (
            Description { dtype: DType::Int32, ..sum(4) },
            "Mismatched data types: One rank had type float32, but another rank had type int32: ",
        ),
        (
            Description { op: ReduceOp::Max, ..sum(4) },
            "Mismatched reduction operation: One rank specified sum, but another rank specified max: ",
        ),
        (
            Description { kind: Kind::Broadcast, ..sum(4) },
            "Mismatched operations: One rank did an ALLREDUCE, but another rank did an BROADCAST: ",
        ),
        (
            Description::poison("bad shape".into()),
            "a rank cannot take part: ranks 0, 1, 3 ask for all_reduce(sum) of float32 [4], rank 2 asks for an error (bad shape)",
        ),
    ];
    for (other, expected) in differences {
        for (warm, order) in [(false, [0, 1, 2, 3]), (true, [0, 1, 2, 3]), (true, [2, 1, 3, 0])] {
            let mut world = SimulatedWorld::new(4, LIMITS, TIMEOUTS);
            if warm {
                (0..4).for_each(|rank| {
                    world.submit(rank, "a", sum(4), false);
                    world.flush(rank);
                });
                world.settle(&mut random);
            }
            for rank in order {
                world.submit(rank, "a", if rank == 2 { other.clone() } else { sum(4) }, false);
                world.submit(rank, "b", sum(9), false);
                world.flush(rank);
                if order[0] == 2 {
                    // The other ranks get the failure before they submit their own call.
                    world.settle(&mut random);
                }
            }
            world.settle(&mut random);
            for rank in 0..4 {
                let [text] = &world.texts(rank)[..] else { panic!("{:?}", world.ranks[rank].events) };
                assert!(text.starts_with("a: `a`: ranks disagree: ") && text.contains(expected), "{text}");
                assert!(world.ranks[rank].events.contains(&SimulationEvent::Ran(vec![9])));
            }
        }
    }
}

#[test]
fn only_reductions_can_do_without_ranks_that_joined() {
    let mut world = SimulatedWorld::new(3, LIMITS, TIMEOUTS);
    let mut random = SimulationRandom(4);
    let broadcast = Description { kind: Kind::Broadcast, ..sum(2) };
    for round in 0..2 {
        world.ranks[1].machine.join(true, world.now).unwrap();
        world.flush(1);
        for rank in [0, 2] {
            world.submit(rank, "a", sum(1), true);
            world.submit(rank, "b", broadcast.clone(), true);
            world.flush(rank);
        }
        world.settle(&mut random);
        assert!(world.ranks[1].events.contains(&SimulationEvent::Ran(vec![1])));
        let text = &world.texts(0)[round];
        assert!(text.contains("Broadcast is not supported with Join"), "{text}");
        for rank in [2, 0] {
            world.ranks[rank].machine.join(true, world.now).unwrap();
            world.flush(rank);
            world.settle(&mut random);
        }
        for rank in 0..3 {
            assert_eq!(world.ranks[rank].events.last(), Some(&SimulationEvent::Joined(0)), "{rank}");
        }
        // In the second round, the broadcast is in the cache.
        for rank in 0..3 {
            world.submit(rank, "b", broadcast.clone(), true);
            world.flush(rank);
        }
        world.settle(&mut random);
    }
}

#[test]
fn steps_with_other_gradients_end_on_all_ranks() {
    let step = |names: &str, is_last| Description::presence(&Gradients { names, numbers: &[], is_last });
    for (size, is_last) in [(3, false), (3, true), (12, true)] {
        let (mut random, mut world) = (SimulationRandom(8), SimulatedWorld::new(size, LIMITS, TIMEOUTS));
        for round in 0..4 {
            // The same twice, the second time by cache position; a rank that has joined makes no difference.
            let lacks = |rank: usize| round == 2 && rank == 1;
            world.ranks[2].machine.join(true, world.now).unwrap();
            world.flush(2);
            let others = (0..size).filter(|rank| *rank != 2);
            for rank in others.clone() {
                world.submit(rank, "w", sum(1), false);
                if !lacks(rank) {
                    world.submit(rank, "v", sum(2), false);
                }
                world.submit(rank, "step", step(if lacks(rank) { "w" } else { "w\nv" }, is_last), true);
                world.flush(rank);
            }
            world.settle(&mut random);
            for rank in others.clone() {
                let texts = world.texts(rank);
                let count = match (round < 2, is_last, rank) {
                    (true, ..) => 0,
                    (_, true, 1) | (_, false, _) => 1,
                    _ => 2,
                };
                assert_eq!(texts.len(), count, "round {round}, rank {rank}: {texts:?}");
                let with = if size == 3 { "rank 0 has".to_owned() } else { format!("ranks 0, 3-{} have", size - 1) };
                let detail = format!("ranks disagree: rank 1 has no gradient of `v`, {with} one");
                assert!(texts.iter().all(|text| text.ends_with(&detail)), "{texts:?}");
            }
            if round == 2 && !is_last {
                // The gradient of this rank waits.
                world.submit(1, "v", sum(2), false);
                world.flush(1);
            }
            for rank in others {
                world.ranks[rank].machine.join(true, world.now).unwrap();
                world.flush(rank);
            }
            world.settle(&mut random);
            assert!(world.ranks.iter().all(|rank| matches!(rank.events.last(), Some(SimulationEvent::Joined(_)))));
        }
    }
}

#[test]
fn ranks_that_joined_take_part_on_devices_if_all_of_them_have_one() {
    let mut random = SimulationRandom(6);
    let on_device = Description { on_device: true, ..sum(3) };
    for size in [3, 12] {
        let mut world = SimulatedWorld::new(size, LIMITS, TIMEOUTS);
        // Twice with descriptions, and then by cache position.
        for (round, without) in [None, Some(size - 1), Some(1), None].into_iter().enumerate() {
            let failures = world.texts(0).len();
            for rank in [1, size - 1] {
                world.ranks[rank].machine.join(Some(rank) != without, world.now).unwrap();
                world.flush(rank);
            }
            let others: Vec<usize> = (0..size - 1).filter(|rank| *rank != 1).collect();
            for rank in others.clone() {
                world.submit(rank, "a", on_device.clone(), true);
                world.submit(rank, "b", sum(5), true);
                world.flush(rank);
            }
            world.settle(&mut random);
            let ran = |rank: usize| {
                world.ranks[rank].events.iter().filter(|event| **event == SimulationEvent::Ran(vec![3])).count()
            };
            let count = [1, 1, 1, 2][round];
            assert!((0..size).all(|rank| ran(rank) == count), "{round}: {:?}", world.ranks[0].events);
            for rank in others.clone() {
                let texts = world.texts(rank);
                assert_eq!(texts.len(), failures + usize::from(without.is_some()), "{texts:?}");
                if let (Some(text), Some(without)) = (texts.last(), without) {
                    let expected = format!("rank {without} has called `join()` and has no CUDA device");
                    assert!(text.contains(&expected), "{text}");
                }
            }
            for rank in others {
                world.ranks[rank].machine.join(true, world.now).unwrap();
                world.flush(rank);
            }
            world.settle(&mut random);
            assert!(world.ranks.iter().all(|rank| matches!(rank.events.last(), Some(SimulationEvent::Joined(_)))));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Random interleavings of calls and messages, with names that are submitted several times, caches that are too
    /// small, and ranks that join: every call is answered once, in the same order on all ranks.
    #[test]
    fn every_interleaving_ends(
        size in 1..14usize,
        seed in any::<u64>(),
        cache in 0..5u32,
        fusion_bytes in prop_oneof![Just(0u64), Just(40), Just(1 << 20)],
        names in 1..7usize,
        times in 1..5usize,
        joins in any::<bool>(),
        odd in any::<bool>(),
    ) {
        let mut random = SimulationRandom(seed);
        let mut world = SimulatedWorld::new(size, NegotiationLimits { cache, fusion_bytes }, TIMEOUTS);
        // Each rank submits each name equally often, in its own order; ranks that join submit fewer.
        let scripts: Vec<Vec<usize>> = (0..size).map(|rank| {
            let times = if joins && rank % 3 == 1 { times / 2 } else { times };
            let mut script: Vec<usize> = (0..names * times).map(|at| at % names).collect();
            random.shuffle(&mut script);
            script
        }).collect();
        let calls: Vec<usize> = scripts.iter().map(Vec::len).collect();
        let mut scripts: Vec<VecDeque<usize>> = scripts.into_iter().map(VecDeque::from).collect();
        let mut joined = vec![!joins; size];
        let mut odd_calls = 0;
        loop {
            let pairs: Vec<(usize, usize)> = (world.frames.iter().enumerate())
                .flat_map(|(to, queues)| queues.keys().map(move |from| (to, *from)))
                .collect();
            let choice = random.below(pairs.len() + size);
            if let Some(&(to, from)) = pairs.get(choice) {
                world.deliver(to, from);
                if random.below(2) == 0 {
                    world.flush(to);
                }
                continue;
            }
            let rank = choice - pairs.len();
            match scripts[rank].pop_front() {
                Some(name) => {
                    // One rank asks for something else the first time.
                    let differs = odd && rank == size - 1 && name == 0 && odd_calls == 0;
                    odd_calls += usize::from(differs);
                    let description = if differs { Description { op: ReduceOp::Max, ..sum(1) } } else { sum(name as u64 + 1) };
                    world.submit(rank, &format!("n{name}"), description, false);
                }
                None if !joined[rank] => {
                    joined[rank] = true;
                    world.ranks[rank].machine.join(true, world.now).unwrap();
                }
                None => {}
            }
            if random.below(2) == 0 {
                world.flush(rank);
            }
            if pairs.is_empty() && scripts.iter().all(VecDeque::is_empty) && joined.iter().all(|joined| *joined) {
                (0..size).for_each(|rank| world.flush(rank));
                if world.frames.iter().all(BTreeMap::is_empty) {
                    break;
                }
            }
        }
        for (rank, calls) in world.ranks.iter().zip(calls) {
            prop_assert_eq!(rank.answered, calls, "rank {}", rank.tree.me);
            prop_assert!(!rank.machine.is_waiting());
        }
        let ran = |rank: usize| -> Vec<&SimulationEvent> {
            world.ranks[rank].events.iter().filter(|event| !matches!(event, SimulationEvent::Failed(..))).collect()
        };
        for rank in 1..size {
            prop_assert_eq!(ran(rank), ran(0));
        }
        if !joins {
            for rank in 1..size {
                prop_assert_eq!(world.texts(rank), world.texts(0));
            }
        }
    }
}
