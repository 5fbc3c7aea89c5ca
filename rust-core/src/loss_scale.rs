//! The loss scale of 16-bit training: the factor of a loss before its backward, which keeps small gradients from
//! becoming zero in a 16-bit type.
//!
//! All ranks pass the same overflow flag for a step, so all have the same scale in the next one.
//!
//! - LSC-1: a dynamic scale is divided by `factor` in a step whose gradients overflow, and multiplied by it after
//!   `window` steps in a row without an overflow.
//! - LSC-2: the first `delayed_shift - 1` overflows do not divide it; every later one does. The count starts again when
//!   the scale grows; if `consecutive_hysteresis`, also after every step without an overflow.

use crate::error::{Error, Result};

/// How a dynamic scale changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dynamics {
    /// Factor of growth, and divisor after an overflow.
    pub factor: f64,
    /// Steps without an overflow before the scale grows.
    pub window: u64,
    /// The scale never becomes smaller.
    pub min_scale: f64,
    /// Overflows until the scale shrinks, from 1.
    pub delayed_shift: u64,
    /// Whether a step without an overflow renews the tolerance.
    pub consecutive_hysteresis: bool,
}

impl Default for Dynamics {
    fn default() -> Self {
        Self { factor: 2.0, window: 1000, min_scale: 1.0, delayed_shift: 1, consecutive_hysteresis: false }
    }
}

/// The state of a [`LossScale`] that a checkpoint contains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleState {
    /// Factor of the next loss.
    pub scale: f64,
    /// Steps without an overflow since the last overflow or growth.
    pub clean_steps: u64,
    /// Overflows until the scale shrinks.
    pub tolerance: u64,
}

/// A loss scale, static or dynamic.
#[derive(Clone, Debug)]
pub struct LossScale {
    state: ScaleState,
    dynamics: Option<Dynamics>,
}

impl LossScale {
    /// A scale that starts at `scale`, and stays there without `dynamics`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming an invalid value.
    pub fn new(scale: f64, dynamics: Option<Dynamics>) -> Result<Self> {
        check_scale("the loss scale", scale)?;
        if let Some(dynamics) = dynamics {
            check_scale("`min_scale`", dynamics.min_scale)?;
            let fail = |text: String| Err(Error::InvalidArgument(text));
            if !(dynamics.factor.is_finite() && dynamics.factor > 1.0) {
                return fail(format!("`scale_factor` is {}: expected a number above 1", dynamics.factor));
            }
            if dynamics.window == 0 {
                return fail("`scale_window` is 0: expected at least 1".into());
            }
            if dynamics.delayed_shift == 0 {
                return fail("`delayed_shift` is 0: expected at least 1".into());
            }
        }
        let tolerance = dynamics.map_or(1, |dynamics| dynamics.delayed_shift);
        Ok(Self { state: ScaleState { scale, clean_steps: 0, tolerance }, dynamics })
    }

    /// The factor of the next loss.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// The state for a checkpoint.
    pub fn state(&self) -> ScaleState {
        self.state
    }

    /// Continues from a checkpoint.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the state is invalid.
    pub fn restore(&mut self, state: ScaleState) -> Result<()> {
        check_scale("the saved loss scale", state.scale)?;
        self.state = state;
        Ok(())
    }

    /// Ends a step; `overflow` says whether any rank found a gradient that is not finite.
    pub fn update(&mut self, overflow: bool) {
        let Some(dynamics) = self.dynamics else { return };
        let state = &mut self.state;
        if overflow {
            state.clean_steps = 0;
            if state.tolerance <= 1 {
                state.scale = (state.scale / dynamics.factor).max(dynamics.min_scale);
            } else {
                state.tolerance -= 1;
            }
            return;
        }
        if dynamics.consecutive_hysteresis {
            state.tolerance = dynamics.delayed_shift;
        }
        state.clean_steps += 1;
        if state.clean_steps == dynamics.window {
            state.clean_steps = 0;
            state.tolerance = dynamics.delayed_shift;
            let grown = state.scale * dynamics.factor;
            // With a larger scale, every gradient would overflow forever.
            if grown.is_finite() {
                state.scale = grown;
            }
        }
    }
}

fn check_scale(name: &str, scale: f64) -> Result<()> {
    if scale.is_finite() && scale > 0.0 {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("{name} is {scale}: expected a finite number above 0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dynamic(scale: f64, dynamics: Dynamics) -> LossScale {
        LossScale::new(scale, Some(dynamics)).expect("valid arguments")
    }

    /// The scale after each step; `x` is an overflow.
    fn history(scale: &mut LossScale, steps: &str) -> Vec<f64> {
        let step = |step| {
            scale.update(step == 'x');
            scale.scale()
        };
        steps.chars().map(step).collect()
    }

    #[test]
    fn a_static_scale_stays() {
        let mut scale = LossScale::new(128.0, None).expect("valid");
        assert_eq!(history(&mut scale, "x..x"), [128.0; 4]);
    }

    #[test]
    fn an_overflow_halves_and_a_window_doubles() {
        let mut scale = dynamic(16.0, Dynamics { window: 3, ..Dynamics::default() });
        assert_eq!(history(&mut scale, "..x...x"), [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 8.0]);
        // Each further window counts from the growth.
        assert_eq!(history(&mut scale, "......"), [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]);
    }

    #[test]
    fn the_scale_stays_above_its_minimum_and_finite() {
        let mut scale = dynamic(4.0, Dynamics { min_scale: 2.0, ..Dynamics::default() });
        assert_eq!(history(&mut scale, "xxx"), [2.0; 3]);
        let mut scale = dynamic(f64::MAX, Dynamics { window: 1, ..Dynamics::default() });
        assert_eq!(history(&mut scale, ".."), [f64::MAX; 2]);
    }

    #[test]
    fn a_shift_is_delayed_until_the_tolerance_is_used_up() {
        let dynamics = Dynamics { delayed_shift: 3, window: 4, ..Dynamics::default() };
        // The tolerance is used up once, and renewed by a growth.
        assert_eq!(history(&mut dynamic(8.0, dynamics), "x.x.x.x"), [8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 2.0]);
        assert_eq!(history(&mut dynamic(8.0, dynamics), "xx....xxx"), [8.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 8.0]);
        let consecutive = Dynamics { consecutive_hysteresis: true, ..dynamics };
        assert_eq!(history(&mut dynamic(8.0, consecutive), "x.x.xxx"), [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 4.0]);
    }

    #[test]
    fn a_restored_scale_continues_like_the_saved_one() {
        let dynamics = Dynamics { delayed_shift: 2, window: 3, ..Dynamics::default() };
        let mut saved = dynamic(64.0, dynamics);
        history(&mut saved, "x..");
        let mut restored = dynamic(1.0, dynamics);
        restored.restore(saved.state()).expect("a valid state");
        assert_eq!(history(&mut restored, ".xx.x"), history(&mut saved, ".xx.x"));
        assert_eq!(restored.state(), saved.state());
    }

    #[test]
    fn values_that_make_no_sense_are_refused() {
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(LossScale::new(scale, None).is_err(), "{scale}");
        }
        let dynamics = [
            Dynamics { factor: 1.0, ..Dynamics::default() },
            Dynamics { window: 0, ..Dynamics::default() },
            Dynamics { min_scale: 0.0, ..Dynamics::default() },
            Dynamics { delayed_shift: 0, ..Dynamics::default() },
        ];
        for dynamics in dynamics {
            assert!(LossScale::new(1.0, Some(dynamics)).is_err(), "{dynamics:?}");
        }
        let mut scale = LossScale::new(1.0, None).expect("valid");
        assert!(scale.restore(ScaleState { scale: f64::NAN, clean_steps: 0, tolerance: 1 }).is_err());
    }
}
