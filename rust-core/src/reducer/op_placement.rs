//! Predicts which operation of a graph allocates which gradient, so that the gradient is written into its slot.
//!
//! An executor that runs several operations in parallel does not keep the order of allocations on which
//! [`super::gradient_placement`] relies. But it reports the operation for which it allocates, and an operation of a
//! graph computes the same tensor in every step.
//!
//! This type touches no memory. A wrong prediction costs one copy.

use std::collections::HashMap;

/// Number of wrong predictions for a gradient after which no more are made. The first observation counts as one.
const MAX_WRONG_PREDICTIONS: u8 = 4;
/// Number of allocations of one size that are remembered, with their operations.
const MEMORY: usize = 1024;

/// A gradient of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gradient {
    /// Number of its reducer spec.
    pub plan: usize,
    /// Parameter in it.
    pub param: usize,
}

/// The predictions for the gradients of a process.
#[derive(Debug, Default)]
pub struct OpPlacement {
    /// By size in bytes; only sizes that a gradient has.
    classes: HashMap<usize, OpClass>,
    /// Wrong predictions.
    wrong: HashMap<Gradient, u8>,
}

#[derive(Debug, Default)]
struct OpClass {
    /// For each operation, the gradient that it computes.
    gradients: HashMap<usize, Gradient>,
    /// For each address that is not a slot, the operation that allocated it.
    allocated: HashMap<usize, usize>,
}

impl OpPlacement {
    /// Adds gradients of these sizes in bytes.
    pub fn expect(&mut self, bytes: impl Iterator<Item = usize>) {
        for bytes in bytes.filter(|&bytes| bytes > 0) {
            self.classes.entry(bytes).or_default();
        }
    }

    /// Predicts the gradient that an allocation of `bytes` bytes by operation `op` becomes. If the operation does not
    /// get that gradient's slot, [`OpPlacement::placed_elsewhere`] must follow.
    pub fn request(&self, bytes: usize, op: usize) -> Option<Gradient> {
        self.classes.get(&bytes)?.gradients.get(&op).copied()
    }

    /// Records that `bytes` bytes which operation `op` allocated lie at `address`, which is not a slot.
    pub fn placed_elsewhere(&mut self, bytes: usize, op: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        if class.allocated.len() >= MEMORY {
            class.allocated.clear();
        }
        class.allocated.insert(address, op);
    }

    /// Records that a gradient of `bytes` bytes lies at `address` and not in its slot.
    pub fn observe(&mut self, gradient: Gradient, bytes: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        let op = class.allocated.get(&address).copied();
        if op.is_some_and(|op| class.gradients.get(&op) == Some(&gradient)) {
            // The prediction was right; another tensor still held the slot.
            return;
        }
        // A new trace of the function has new operations; the entries of the old ones stay.
        let wrong = self.wrong.entry(gradient).or_default();
        *wrong = wrong.saturating_add(1).min(MAX_WRONG_PREDICTIONS);
        if *wrong < MAX_WRONG_PREDICTIONS
            && let Some(op) = op
        {
            class.gradients.insert(op, gradient);
        }
    }

    /// Removes the prediction for `gradient`, because other operations read the tensor, so that it cannot be reduced
    /// in place, or because another operation computed it. Returns whether predictions for it continue.
    pub fn reject(&mut self, gradient: Gradient, bytes: usize) -> bool {
        let wrong = self.wrong.entry(gradient).or_default();
        *wrong = wrong.saturating_add(1).min(MAX_WRONG_PREDICTIONS);
        if let Some(class) = self.classes.get_mut(&bytes) {
            class.gradients.retain(|_, predicted| *predicted != gradient);
        }
        *wrong < MAX_WRONG_PREDICTIONS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;
    const SLOTS: usize = 0x1000;

    fn gradient(param: usize) -> Gradient {
        Gradient { plan: 3, param }
    }

    /// Simulates one step: operations allocate tensors, each of which becomes a gradient or does not. Returns the
    /// predictions.
    fn step(placement: &mut OpPlacement, operations: &[(usize, Option<usize>)]) -> Vec<Option<usize>> {
        let made: Vec<_> = operations.iter().map(|(op, _)| placement.request(BYTES, *op)).collect();
        let mut addresses = Vec::new();
        for (at, (op, _)) in operations.iter().enumerate() {
            addresses.push(made[at].map_or(at, |gradient| SLOTS + gradient.param));
            if made[at].is_none() {
                placement.placed_elsewhere(BYTES, *op, at);
            }
        }
        for (at, (_, becomes)) in operations.iter().enumerate() {
            if let Some(param) = *becomes
                && addresses[at] != SLOTS + param
            {
                placement.observe(gradient(param), BYTES, addresses[at]);
            }
        }
        made.into_iter().map(|gradient| gradient.map(|gradient| gradient.param)).collect()
    }

    #[test]
    fn after_one_step_gradients_are_made_in_their_slots_in_whatever_order() {
        let mut placement = OpPlacement::default();
        placement.expect([BYTES].into_iter());
        assert_eq!(step(&mut placement, &[(70, Some(0)), (71, None), (72, Some(1))]), [None; 3]);
        assert_eq!(step(&mut placement, &[(70, Some(0)), (71, None), (72, Some(1))]), [Some(0), None, Some(1)]);
        assert_eq!(step(&mut placement, &[(72, Some(1)), (70, Some(0)), (71, None)]), [Some(1), Some(0), None]);
        // A function that is traced again has new operations.
        step(&mut placement, &[(80, Some(0)), (82, Some(1))]);
        assert_eq!(step(&mut placement, &[(80, Some(0)), (82, Some(1))]), [Some(0), Some(1)]);
    }

    #[test]
    fn an_operation_that_makes_several_gradients_is_taken_to_make_one_and_the_others_are_given_up() {
        let mut placement = OpPlacement::default();
        placement.expect([BYTES].into_iter());
        for _ in 0..MAX_WRONG_PREDICTIONS {
            step(&mut placement, &[(70, Some(0))]);
            step(&mut placement, &[(70, Some(1))]);
        }
        assert_eq!(placement.wrong[&gradient(1)], MAX_WRONG_PREDICTIONS);
        step(&mut placement, &[(71, Some(1))]);
        assert_eq!(step(&mut placement, &[(70, Some(0)), (71, Some(1))]), [Some(0), None]);
    }

    #[test]
    fn a_taken_slot_does_not_count_as_a_wrong_prediction() {
        let mut placement = OpPlacement::default();
        placement.expect([BYTES].into_iter());
        step(&mut placement, &[(70, Some(0))]);
        for _ in 0..2 * MAX_WRONG_PREDICTIONS {
            placement.placed_elsewhere(BYTES, 70, 5);
            placement.observe(gradient(0), BYTES, 5);
        }
        assert_eq!(placement.request(BYTES, 70), Some(gradient(0)));
    }

    #[test]
    fn gradients_that_others_see_are_made_elsewhere_and_other_sizes_are_not_tracked() {
        let mut placement = OpPlacement::default();
        placement.expect([BYTES].into_iter());
        step(&mut placement, &[(70, Some(0))]);
        placement.reject(gradient(0), BYTES);
        assert_eq!(placement.request(BYTES, 70), None);
        placement.placed_elsewhere(BYTES + 1, 70, 9);
        placement.observe(gradient(0), BYTES + 1, 9);
        assert_eq!(placement.request(BYTES + 1, 70), None);
        for address in 0..3 * MEMORY {
            placement.placed_elsewhere(BYTES, 70, address);
        }
        assert!(placement.classes[&BYTES].allocated.len() <= MEMORY);
    }
}
