//! Reductions of a few numbers over all members, by name.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::{Factors, Name, NamedHandle, NamedRequest, Negotiator};
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::Request;
use crate::error::{Error, Result};
use crate::world::monitor::interrupt_pending;

/// Interval at which a wait looks for signals.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A reduction of numbers that is running or complete.
pub struct Numbers {
    outcome: Arc<NumbersState>,
    handle: NamedHandle,
}

#[derive(Default)]
struct NumbersState {
    result: Mutex<Option<Result<Vec<u64>>>>,
    decided: Condvar,
}

impl Numbers {
    /// Submits the reduction of these 64-bit integers. Both functions are called with the result, on any thread:
    /// `before_known` before [`Numbers::known`] returns it, and `after_known` after that. Neither is called if this
    /// returns an error.
    ///
    /// # Errors
    /// As [`Negotiator::request`].
    pub fn submit(
        negotiator: &Negotiator,
        name: Name,
        mut numbers: Vec<u64>,
        op: ReduceOp,
        before_known: impl FnOnce(&Result<Vec<u64>>) + Send + 'static,
        after_known: impl FnOnce(&Result<Vec<u64>>) + Send + 'static,
    ) -> Result<Self> {
        // SAFETY: the completion owns the numbers, which are on the heap; no other code accesses them before it is
        // called.
        let view =
            unsafe { TensorView::new(numbers.as_mut_ptr().cast(), numbers.len(), DType::Int64, Device::Cpu, 0) }?;
        let shape = Some(vec![numbers.len() as u64]);
        let outcome = Arc::new(NumbersState::default());
        let learned = Arc::clone(&outcome);
        let done = move |result: Result<Option<usize>>| {
            let result = result.map(|_| numbers);
            before_known(&result);
            *learned.result.lock() = Some(result.clone());
            learned.decided.notify_all();
            after_known(&result);
        };
        let request = NamedRequest {
            name,
            tensors: vec![(Request::AllReduce { input: view, output: view, op }, shape)],
            factors: Factors::default(),
            blocking: false,
        };
        Ok(Self { outcome, handle: negotiator.request(request, || Box::new(done))? })
    }

    /// The result, if it is known.
    pub fn known(&self) -> Option<Result<Vec<u64>>> {
        self.outcome.result.lock().clone()
    }

    /// Waits for the result; `during` describes the wait in errors.
    ///
    /// # Errors
    /// [`Error::Interrupted`]; the error that ended the negotiation, for example because a member did not submit the
    /// name in time.
    pub fn wait(&self, during: &str) -> Result<Vec<u64>> {
        loop {
            if let Some(result) = self.known() {
                return result;
            }
            if !self.handle.drive() {
                let mut result = self.outcome.result.lock();
                if result.is_none() {
                    self.outcome.decided.wait_for(&mut result, SIGNAL_CHECK_INTERVAL);
                }
            }
            if self.outcome.result.lock().is_none() && interrupt_pending() {
                return Err(Error::Interrupted { during: during.to_owned() });
            }
        }
    }
}
