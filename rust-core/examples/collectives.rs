//! One rank of the comparison in `benches/collectives`: times collectives over ordinary memory.
//!
//! Arguments: `COLLECTIVE:BYTES:REPEATS:CALLS ..`. For each, the ranks call a barrier, make that many calls in a row,
//! and do so that many times; rank 0 prints `COLLECTIVE BYTES SECONDS ..`: the time of one call on the slowest rank,
//! for each repeat. `all_gather` is `BYTES` from each rank. `window` is an all-reduce of values that lie in a window.
//! `memory` is not a collective: each rank adds one to every value, which reads and writes each byte once.

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
        "all_reduce" => Some(Request::AllReduce { input: values, output: values, op: ReduceOp::Sum }),
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
        "memory" => None,
        other => panic!("`{other}` of rank {me} is not a collective"),
    };
    let mut times = Vec::new();
    // The first repeat warms up: caches, page tables, and the memory that ranks share.
    for repeat in 0..=repeats {
        world.run(&Request::Barrier)?;
        let start = Instant::now();
        for _ in 0..calls {
            match &request {
                Some(request) => world.run(request)?,
                None => std::hint::black_box(&mut data).iter_mut().for_each(|value| *value += 1.0),
            }
        }
        let time: Duration = start.elapsed();
        if repeat > 0 {
            times.push(time.as_secs_f64() / calls as f64);
        }
    }
    Ok(times)
}
