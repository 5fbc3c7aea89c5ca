//! Trains a small network to tell two spirals apart, data-parallel, without Python:
//!
//! ```text
//! smdrun -n 2 --no-python rust-tch
//! ```
//!
//! `tch` computes, the core's reducer averages the gradients. Every process takes its share of the points; the losses are
//! those of one process that takes all of them.

mod parallel;

use std::process::ExitCode;

use smd_core::session::{self, InitOptions, Session};
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use parallel::{Parallel, Result};

const POINTS: i64 = 512;
const STEPS: usize = 600;
const PRINT_EVERY: usize = 100;

fn main() -> ExitCode {
    // Processes share the cores.
    tch::set_num_threads(1);
    let session = match session::init(InitOptions::default()) {
        Ok(session) => session,
        Err(error) => return fail(&error),
    };
    let outcome = train(&session);
    if let Err(error) = &outcome {
        // The other ranks stop waiting, with an error that names this rank.
        session.report_failure(&error.to_string());
    }
    session::finish();
    outcome.map_or_else(|error| fail(&*error), |()| ExitCode::SUCCESS)
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("rust-tch: {error}");
    ExitCode::FAILURE
}

fn train(session: &Session) -> Result<()> {
    let (rank, size) = (session.rank(), session.size());
    let (points, labels) = spirals();
    let mine = Tensor::arange_start_step(rank as i64, POINTS, size as i64, (Kind::Int64, Device::Cpu));
    let (my_points, my_labels) = (points.index_select(0, &mine), labels.index_select(0, &mine));

    // Each process draws its own parameters; `Parallel::new` broadcasts those of rank 0.
    tch::manual_seed(rank as i64);
    let variables = nn::VarStore::new(Device::Cpu);
    let model = network(&variables.root());
    let parallel = Parallel::new(session, &variables)?;
    let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&variables, 0.2)?;

    for step in 1..=STEPS {
        optimizer.zero_grad();
        let loss = model.forward(&my_points).cross_entropy_for_logits(&my_labels);
        loss.backward();
        parallel.average_gradients()?;
        optimizer.step();
        if step == 1 || step % PRINT_EVERY == 0 {
            let loss = parallel.average(&loss.detach())?.double_value(&[]);
            if rank == 0 {
                println!("step {step} loss {loss:.6}");
            }
        }
    }

    parallel.check_replicas()?;
    if rank == 0 {
        let accuracy = model.forward(&points).accuracy_for_logits(&labels).double_value(&[]);
        println!("accuracy {accuracy:.4}; parameters bitwise equal on {size} ranks");
    }
    Ok(())
}

fn network(root: &nn::Path<'_>) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(root / "in", 2, 64, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(root / "middle", 64, 64, Default::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(root / "out", 64, 2, Default::default()))
}

/// Points on two spirals, and on which one each is.
fn spirals() -> (Tensor, Tensor) {
    let index = Tensor::arange(POINTS, (Kind::Int64, Device::Cpu));
    let labels = index.remainder(2);
    let turn = index.to_kind(Kind::Float) / POINTS as f64 * 7.0 + 0.5;
    let angle = &turn + labels.to_kind(Kind::Float) * std::f64::consts::PI;
    let points = Tensor::stack(&[&turn * angle.cos(), &turn * angle.sin()], 1) / 4.0;
    (points, labels)
}
