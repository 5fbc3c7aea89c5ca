//! One rank of the comparison in `benches/collectives`: times collectives over ordinary memory.
//!
//! Arguments: `COLLECTIVE:BYTES:REPEATS:CALLS ..`. For each, the ranks call a barrier, make that many calls in a row,
//! and do so that many times; rank 0 prints `COLLECTIVE BYTES SECONDS ..`: the time of one call on the slowest rank,
//! for each repeat. `all_gather` is `BYTES` from each rank. `window` is an all-reduce of values that lie in a window.
//! `all_reduce_after_work` is an all-reduce before which the ranks meet in a barrier and then work on their own memory for
//! 2 ms, as between the gradients of a training step; only the all-reduce is timed.
//!
//! Two are not collectives. `memory`: each rank adds one to every value, which reads and writes each byte once. `line`,
//! with one rank: a cache line goes from one thread to another and back.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smd_core::Result;
use smd_core::buffer::{DType, Device, ReduceOp, TensorView};
use smd_core::collectives::{Communicator, Request};
use smd_core::session;

fn main() {
    if let Err(error) = run() {
        eprintln!("{}", error.report());
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let session = session::init(session::InitOptions::default())?;
    let world = session.world();
    for argument in std::env::args().skip(1) {
        let fields: Vec<&str> = argument.split(':').collect();
        let [name, bytes, repeats, calls] = fields[..] else { panic!("`{argument}`: expected four fields") };
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let mut times = measure(&world, name, number(bytes), number(repeats), number(calls))?;
        let slowest = view(&mut times);
        world.run(&Request::AllReduce { input: slowest, output: slowest, op: ReduceOp::Max })?;
        if session.rank() == 0 {
            let times: Vec<String> = times.iter().map(|time| format!("{time:.9}")).collect();
            println!("{name} {bytes} {}", times.join(" "));
        }
    }
    session::shutdown();
    Ok(())
}

trait Value {
    const DTYPE: DType;
}
impl Value for f32 {
    const DTYPE: DType = DType::Float32;
}
impl Value for f64 {
    const DTYPE: DType = DType::Float64;
}

fn view<T: Value>(data: &mut [T]) -> TensorView {
    // SAFETY: every caller keeps the slice until the operation that gets the view has returned.
    unsafe { TensorView::new(data.as_mut_ptr().cast(), data.len(), T::DTYPE, Device::Cpu, 0) }.expect("aligned")
}

fn measure(world: &Communicator, name: &str, bytes: usize, repeats: usize, calls: usize) -> Result<Vec<f64>> {
    let elems = bytes / 4;
    let (me, size) = (world.members().me, world.members().size());
    let mut data = vec![1.0f32; elems];
    let mut others = vec![1.0f32; if name == "all_gather" { elems * size } else { 0 }];
    let values = view(&mut data);
    let request = match name {
        "all_reduce" | "all_reduce_after_work" => {
            Some(Request::AllReduce { input: values, output: values, op: ReduceOp::Sum })
        }
        "broadcast" => Some(Request::Broadcast { data: values, root: 0 }),
        "all_gather" => {
            let outputs = others.chunks_mut(elems.max(1)).map(view).collect();
            Some(Request::AllGather { input: values, outputs })
        }
        "window" => {
            let window = world.window(bytes)?;
            // SAFETY: the own part has that many bytes, and no operation runs yet.
            unsafe { std::slice::from_raw_parts_mut(window.local().cast::<f32>(), elems) }.fill(1.0);
            let (offset_bytes, dtype, op) = (0, DType::Float32, ReduceOp::Average);
            Some(Request::AllReduceWindow { window, offset_bytes, elems, dtype, op })
        }
        "barrier" => Some(Request::Barrier),
        "memory" | "line" => None,
        other => panic!("`{other}` of rank {me} is not a collective"),
    };
    let mut private = vec![1.0f32; if name == "all_reduce_after_work" { PRIVATE_ELEMS } else { 0 }];
    let mut times = Vec::new();
    // The first repeat warms up: caches, page tables, the memory that ranks share, and choices by measurement, for which it
    // makes more calls.
    let warm_up = calls.max((WARM_UP_BYTES / bytes.max(1)).min(WARM_UP_CALLS));
    for repeat in 0..=repeats {
        let calls = if repeat == 0 { warm_up } else { calls };
        world.run(&Request::Barrier)?;
        let start = Instant::now();
        let time: Duration = match &request {
            Some(request) if name == "all_reduce_after_work" => {
                let mut time = Duration::ZERO;
                for _ in 0..calls {
                    world.run(&Request::Barrier)?;
                    work(&mut private);
                    let called = Instant::now();
                    world.run(request)?;
                    time += called.elapsed();
                }
                time
            }
            Some(request) => {
                for _ in 0..calls {
                    world.run(request)?;
                }
                start.elapsed()
            }
            None if name == "line" => {
                pass_line(calls);
                start.elapsed()
            }
            None => {
                for _ in 0..calls {
                    std::hint::black_box(&mut data).iter_mut().for_each(|value| *value += 1.0);
                }
                start.elapsed()
            }
        };
        if repeat > 0 {
            times.push(time.as_secs_f64() / calls as f64);
        }
    }
    Ok(times)
}

const WARM_UP_BYTES: usize = 4 << 30;
const WARM_UP_CALLS: usize = 200;
const WORK: Duration = Duration::from_millis(2);
/// 4 MiB: more than a core's second-level cache.
const PRIVATE_ELEMS: usize = 1 << 20;

/// Changes private memory for the time of [`WORK`].
fn work(private: &mut [f32]) {
    let start = Instant::now();
    while start.elapsed() < WORK {
        for part in std::hint::black_box(&mut *private).chunks_mut(4096) {
            part.iter_mut().for_each(|value| *value += 1.0);
            if start.elapsed() >= WORK {
                break;
            }
        }
    }
}

/// Passes a cache line from one thread to another and back, `count` times.
fn pass_line(count: usize) {
    let turn = AtomicUsize::new(0);
    let pass = |parity| {
        for number in (parity..2 * count).step_by(2) {
            while turn.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
            turn.store(number + 1, Ordering::Release);
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(|| pass(1));
        pass(0);
    });
}
