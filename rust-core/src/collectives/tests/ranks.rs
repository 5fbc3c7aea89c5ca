//! Groups whose members are threads, over every transport, and what they compute with.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::{Communicator, reference};
use crate::transport::hosts::HostsGroup;
use crate::transport::mock::{MockOptions, MockTransport};
use crate::transport::mpi::{Engine, MessageOptions, loopback};
use crate::transport::ports::Carrier;
use crate::transport::{HostsTransport, Members, ShmTransport, Transport, tcp};
use crate::world::{LocalStore, Monitor};

pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// Makes the transports of a group of this size.
pub(super) type MakeTransports = fn(usize) -> Vec<Arc<dyn Transport>>;

pub(super) fn shm(size: usize) -> Vec<Arc<dyn Transport>> {
    let store = LocalStore::default();
    let ranks: Arc<[usize]> = (0..size).collect();
    std::thread::scope(|scope| {
        let join = |me| {
            let (store, ranks) = (&store, ranks.clone());
            let join = move || ShmTransport::join("test", Members { ranks, me }, store, &Monitor::new(me), TIMEOUT);
            scope.spawn(move || join().expect("joining works") as Arc<dyn Transport>)
        };
        let threads: Vec<_> = (0..size).map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

pub(super) fn mock(size: usize) -> Vec<Arc<dyn Transport>> {
    let options = MockOptions { seed: size as u64, max_delay: Duration::from_micros(30) };
    MockTransport::net(size, options).into_iter().map(|end| end as Arc<dyn Transport>).collect()
}

/// Members on several simulated hosts, all of them threads: `host` is the host of each member; `carriers` move frames
/// between members of different hosts, with a number for each member's process.
pub(super) fn on_hosts(host: fn(usize) -> usize, carriers: Vec<(Arc<dyn Carrier>, usize)>) -> Vec<Arc<dyn Transport>> {
    let store = LocalStore::default();
    let size = carriers.len();
    let ranks: Arc<[usize]> = (0..size).collect();
    let processes: Arc<[usize]> = carriers.iter().map(|(_, process)| *process).collect();
    let hosts: Vec<usize> = (0..size).map(host).collect();
    let key = getrandom::u64().expect("random numbers");
    std::thread::scope(|scope| {
        let join = |(me, (carrier, _))| {
            let (store, hosts, members) = (&store, &hosts, Members { ranks: ranks.clone(), me });
            let processes = processes.clone();
            scope.spawn(move || {
                let monitor = Arc::new(Monitor::new(me));
                let plan =
                    HostsGroup { name: "test", members, hosts, key, carrier, processes, size, monitor: &monitor };
                HostsTransport::join(plan, store, TIMEOUT).expect("joining works") as Arc<dyn Transport>
            })
        };
        let threads: Vec<_> = carriers.into_iter().enumerate().map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Hosts that communicate through one engine, whose wire leads back to it.
pub(super) fn over_mpi(size: usize, options: MessageOptions, host: fn(usize) -> usize) -> Vec<Arc<dyn Transport>> {
    let engine = Engine::start(Box::new(loopback::Loopback::default())).expect("a thread can be started");
    engine.measure(None, &Monitor::new(0), Instant::now() + TIMEOUT).expect("there is nothing to measure");
    engine.set_options(options);
    on_hosts(host, vec![(engine, 0); size])
}

/// Hosts that communicate over TCP, each member through a port of its own.
pub(super) fn over_tcp(size: usize, host: fn(usize) -> usize) -> Vec<Arc<dyn Transport>> {
    let networks = tcp::networks(size).into_iter().enumerate();
    on_hosts(host, networks.map(|(rank, network)| (network as Arc<dyn Carrier>, rank)).collect())
}

/// Two members on each host; the last of an odd number is alone.
pub(super) fn pairs(size: usize) -> Vec<Arc<dyn Transport>> {
    over_mpi(size, MessageOptions { bytes: usize::MAX, zero_copy: true }, |member| member / 2)
}

/// Members assigned to two hosts in turn, so that adjacent ranks are on different hosts.
pub(super) fn alternating(size: usize) -> Vec<Arc<dyn Transport>> {
    over_mpi(size, MessageOptions { bytes: 3_000, zero_copy: false }, |member| member % 2)
}

/// Each member on a host of its own.
pub(super) fn alone(size: usize) -> Vec<Arc<dyn Transport>> {
    over_mpi(size, MessageOptions { bytes: 20_000, zero_copy: true }, |member| member)
}

pub(super) fn tcp_pairs(size: usize) -> Vec<Arc<dyn Transport>> {
    over_tcp(size, |member| member / 2)
}

pub(super) fn tcp_alternating(size: usize) -> Vec<Arc<dyn Transport>> {
    over_tcp(size, |member| member % 2)
}

pub(super) fn tcp_alone(size: usize) -> Vec<Arc<dyn Transport>> {
    over_tcp(size, |member| member)
}

pub(super) struct TestGroup {
    pub(super) communicators: Vec<Arc<Communicator>>,
    pub(super) monitors: Vec<Arc<Monitor>>,
}

pub(super) fn job(make: MakeTransports, size: usize, timeout: Duration) -> TestGroup {
    let monitors: Vec<_> = (0..size).map(|rank| Arc::new(Monitor::new(rank))).collect();
    let new = |(transport, monitor): (_, &Arc<Monitor>)| Communicator::new(3, transport, monitor.clone(), timeout);
    TestGroup { communicators: make(size).into_iter().zip(&monitors).map(new).collect(), monitors }
}

/// Runs `rank` as every member, each on a thread, and returns what they return.
pub(super) fn on_all<T: Send>(job: &TestGroup, rank: impl Fn(usize, &Arc<Communicator>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let spawn = |(me, communicator)| scope.spawn(move || rank(me, communicator));
        let threads: Vec<_> = job.communicators.iter().enumerate().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Small deterministic random numbers, the same on all ranks.
#[derive(Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) ^ (self.0 >> 11)
    }
    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Memory aligned for every dtype.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) words: Vec<u128>,
    pub(super) elems: usize,
    pub(super) dtype: DType,
}

impl Memory {
    pub(super) fn zeros(dtype: DType, elems: usize) -> Self {
        Self { words: vec![0; (elems * dtype.size()).div_ceil(16)], elems, dtype }
    }

    /// Values that differ between ranks and positions; floats are finite.
    pub(super) fn random(dtype: DType, elems: usize, seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e3779b97f4a7c15) + 1);
        let mut memory = Self::zeros(dtype, elems);
        for at in 0..elems {
            let value = (random.next() % 4001) as f64 / 1000.0 - 2.0;
            let bytes: Vec<u8> = match dtype {
                DType::Float16 => half::f16::from_f64(value).to_bits().to_ne_bytes().into(),
                DType::BFloat16 => half::bf16::from_f64(value).to_bits().to_ne_bytes().into(),
                DType::Float32 => (value as f32).to_ne_bytes().into(),
                DType::Float64 => value.to_ne_bytes().into(),
                DType::Complex64 => [value as f32, 1.0 - value as f32].map(f32::to_ne_bytes).concat(),
                DType::Complex128 => [value, 1.0 - value].map(f64::to_ne_bytes).concat(),
                DType::Bool => vec![u8::from(random.next().is_multiple_of(3))],
                _ => random.next().to_ne_bytes()[..dtype.size()].to_vec(),
            };
            let size = dtype.size();
            memory.bytes_mut()[at * size..][..size].copy_from_slice(&bytes);
        }
        memory
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the words hold at least that many bytes.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.elems * self.dtype.size()) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the words hold at least that many bytes.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.elems * self.dtype.size()) }
    }

    pub(super) fn view(&mut self) -> TensorView {
        // SAFETY: the tests keep the memory until the operation is over.
        unsafe { TensorView::new(self.words.as_mut_ptr().cast(), self.elems, self.dtype, Device::Cpu, 0).unwrap() }
    }
}

pub(super) fn fold(dtype: DType, op: ReduceOp, inputs: &[Memory]) -> Vec<u8> {
    reference::fold(dtype, op, &inputs.iter().map(Memory::bytes).collect::<Vec<_>>())
}

pub(super) fn views(memories: &mut [Memory]) -> Vec<TensorView> {
    memories.iter_mut().map(Memory::view).collect()
}
