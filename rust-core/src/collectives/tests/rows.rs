//! The contract of collectives that allocate their outputs once the numbers of rows are known.

use std::sync::Arc;

use super::ranks::*;
use crate::buffer::{DType, TensorView};
use crate::collectives::{MakeOutputs, Request};
use crate::error::{Code, Error, Result};

/// A batch gives the results of its collectives one by one, whichever of them are packed.
/// Memory that is made once its sizes are known.
#[derive(Debug)]
struct DelayedOutputs {
    row_elems: usize,
    blocks: parking_lot::Mutex<Vec<Memory>>,
}

impl DelayedOutputs {
    fn new(row_elems: usize) -> Arc<Self> {
        Arc::new(Self { row_elems, blocks: Default::default() })
    }
}

impl MakeOutputs for DelayedOutputs {
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>> {
        if rows.iter().sum::<usize>() > 1_000_000 {
            return Err(Error::InvalidArgument("too much to take".into()));
        }
        let mut blocks = self.blocks.lock();
        *blocks = rows.iter().map(|rows| Memory::zeros(DType::Int16, rows * self.row_elems)).collect();
        Ok(views(&mut blocks))
    }
}

pub(super) fn rows_of_unknown_number(make: MakeTransports) {
    for size in [1, 2, 3, 5] {
        let job = job(make, size, TIMEOUT);
        for round in 0..3 {
            let mut random = Random(round);
            // All the same in one round.
            let mut count = || if round == 1 { 4 } else { random.below(2_000) * usize::from(random.below(3) > 0) };
            let table: Vec<Vec<usize>> = (0..size).map(|_| (0..size).map(|_| 3 * count()).collect()).collect();
            let block = |from: usize, to: usize| {
                Memory::random(DType::Int16, table[from][to], (from * 100 + to) as u64 + round)
            };
            on_all(&job, |me, communicator| {
                let (outputs, mut input) = (DelayedOutputs::new(3), block(me, 0));
                let request = Request::AllGatherRows {
                    input: input.view(),
                    rows: input.elems / 3,
                    row_elems: 3,
                    outputs: outputs.clone(),
                };
                communicator.run(&request).unwrap();
                for (from, output) in outputs.blocks.lock().iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, 0).bytes(), "all_gather from {from} of {size}");
                }
                let mut inputs: Vec<_> = (0..size).map(|to| block(me, to)).collect();
                let rows = inputs.iter().map(|input| input.elems / 3).collect();
                let (inputs, outputs) = (views(&mut inputs), DelayedOutputs::new(3));
                communicator
                    .run(&Request::AllToAllRows { inputs, rows, row_elems: 3, outputs: outputs.clone() })
                    .unwrap();
                for (from, output) in outputs.blocks.lock().iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, me).bytes(), "all_to_all from {from} of {size}");
                }
            });
        }
        let errors = on_all(&job, |me, communicator| {
            let mut input = Memory::zeros(DType::Int16, if me == 0 { 12 } else { 6 });
            let row_elems = if me + 1 == size { 3 } else { 2 };
            let (rows, outputs) = (input.elems / row_elems, DelayedOutputs::new(row_elems));
            communicator.run(&Request::AllGatherRows { input: input.view(), rows, row_elems, outputs }).map_err(
                |error| {
                    assert_eq!(error.code(), Code::Mismatch);
                    error.to_string()
                },
            )
        });
        let text = format!(
            "rank 0 called all_gather of rows of 2 int16, rank {} called all_gather of rows of 3 int16",
            size - 1
        );
        assert!(errors.iter().all(|error| size == 1 || error.as_ref().is_err_and(|error| error.ends_with(&text))));
        // One member cannot allocate its output; the others get its error.
        let errors = on_all(&job, |me, communicator| {
            let mut inputs: Vec<_> =
                (0..size).map(|to| Memory::zeros(DType::Int16, if to == 0 { 1_000_001 } else { 1 })).collect();
            let rows = inputs.iter().map(|input| input.elems).collect();
            let (inputs, outputs) = (views(&mut inputs), DelayedOutputs::new(1));
            let error = communicator.run(&Request::AllToAllRows { inputs, rows, row_elems: 1, outputs }).unwrap_err();
            assert_eq!(error.code(), if me == 0 { Code::InvalidArgument } else { Code::PeerFailed });
            error.to_string()
        });
        assert!(errors.iter().all(|error| error.contains("too much to take")), "{errors:?}");
        on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
    }
}
