//! The loss scale of 16-bit training (`smd_core::loss_scale`).

use pyo3::prelude::*;
use smd_core::loss_scale::{self, Dynamics, ScaleState};

use crate::enter::enter;

/// The loss scale, which changes with the steps whose gradients overflow.
#[pyclass(module = "smdistributed._core")]
pub struct LossScale(loss_scale::LossScale);

#[pymethods]
impl LossScale {
    #[new]
    #[pyo3(signature = (scale, dynamic=false, scale_factor=2.0, scale_window=1000, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=false))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        scale: f64,
        dynamic: bool,
        scale_factor: f64,
        scale_window: u64,
        min_scale: f64,
        delayed_shift: u64,
        consecutive_hysteresis: bool,
    ) -> PyResult<Self> {
        let dynamics =
            Dynamics { factor: scale_factor, window: scale_window, min_scale, delayed_shift, consecutive_hysteresis };
        enter(py, || Ok(Self(loss_scale::LossScale::new(scale, dynamic.then_some(dynamics))?)))
    }

    /// The factor for the next loss.
    #[getter]
    fn scale(&self) -> f64 {
        self.0.scale()
    }

    /// Ends a step; `overflow` says whether any rank found a gradient that is not finite.
    fn update(&mut self, overflow: bool) {
        self.0.update(overflow);
    }

    /// The state for a checkpoint: the scale, steps since the last change, and overflows until the next one.
    fn state(&self) -> (f64, u64, u64) {
        let ScaleState { scale, clean_steps, tolerance } = self.0.state();
        (scale, clean_steps, tolerance)
    }

    /// Restores the state of a checkpoint.
    fn restore(&mut self, py: Python<'_>, scale: f64, clean_steps: u64, tolerance: u64) -> PyResult<()> {
        enter(py, || self.0.restore(ScaleState { scale, clean_steps, tolerance }))
    }
}
