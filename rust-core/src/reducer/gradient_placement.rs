//! Predicts which allocation of a backward becomes which gradient, so that the gradient is written into its slot.
//!
//! A gradient that is allocated in its slot need not be copied there. A framework's allocator knows only the size of a
//! tensor; but a model's backward allocates in the same order in every step. So the prediction for the n-th allocation
//! of a size is the parameter whose gradient that allocation became in the step before.
//!
//! This type touches no memory. A wrong prediction costs one copy.

use std::collections::HashMap;

/// Wrong predictions for a parameter after which no more are made: its backward has no stable order.
const MAX_WRONG_PREDICTIONS: u8 = 4;

/// The predictions for the parameters of one reducer.
#[derive(Debug, Default)]
pub struct GradientPlacement {
    /// By size in bytes; only sizes that a parameter has.
    classes: HashMap<usize, SizeClass>,
    /// Wrong predictions, by parameter. The first observation counts as one.
    wrong: Vec<u8>,
}

#[derive(Debug, Default)]
struct SizeClass {
    /// By the number of an allocation in the backward: the parameter whose gradient it becomes.
    expected: HashMap<usize, usize>,
    /// By the number of an allocation in this backward: its address.
    addresses: Vec<usize>,
}

impl GradientPlacement {
    /// For parameters whose gradients have these sizes in bytes.
    pub fn new(bytes: impl Iterator<Item = usize>) -> Self {
        let mut placement = Self::default();
        for bytes in bytes {
            placement.classes.entry(bytes).or_default();
            placement.wrong.push(0);
        }
        placement
    }

    /// Begins a backward: allocations are counted from 0 again.
    pub fn start(&mut self) {
        for class in self.classes.values_mut() {
            class.addresses.clear();
        }
    }

    /// Predicts what the next allocation of `bytes` bytes becomes. `place` gets the predicted parameter, if there is
    /// one, and returns the address of a free slot. If no slot results, [`GradientPlacement::placed_elsewhere`] must
    /// follow.
    pub fn request<T>(&mut self, bytes: usize, place: impl FnOnce(usize) -> Option<(usize, T)>) -> Option<T> {
        let class = self.classes.get_mut(&bytes)?;
        let placed = class.expected.get(&class.addresses.len()).and_then(|&param| place(param));
        let (address, value) = placed.map_or((0, None), |(address, value)| (address, Some(value)));
        class.addresses.push(address);
        value
    }

    /// Records that the last allocation of `bytes` bytes lies at `address`, which is not a slot.
    pub fn placed_elsewhere(&mut self, bytes: usize, address: usize) {
        if let Some(last) = self.classes.get_mut(&bytes).and_then(|class| class.addresses.last_mut()) {
            *last = address;
        }
    }

    /// Records that the gradient of `param`, of `bytes` bytes, lies at `address` and not in its slot.
    pub fn observe(&mut self, param: usize, bytes: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        if self.wrong[param] >= MAX_WRONG_PREDICTIONS {
            return;
        }
        self.wrong[param] += 1;
        class.expected.retain(|_, expected| *expected != param);
        // An address may be used for several tensors, one after the other: the last one is the gradient.
        if let Some(request) = class.addresses.iter().rposition(|&placed| placed == address)
            && self.wrong[param] < MAX_WRONG_PREDICTIONS
        {
            class.expected.insert(request, param);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;
    const SLOTS: usize = 0x1000;

    /// Simulates one backward: each allocation becomes the gradient of a parameter, or a temporary. Returns the
    /// predictions.
    fn backward(placement: &mut GradientPlacement, becomes: &[Option<usize>]) -> Vec<Option<usize>> {
        placement.start();
        let mut got = Vec::new();
        let mut addresses = Vec::new();
        for request in 0..becomes.len() {
            let param = placement.request(BYTES, |param| Some((SLOTS + param, param)));
            if param.is_none() {
                placement.placed_elsewhere(BYTES, request + 1);
            }
            addresses.push(param.map_or(request + 1, |param| SLOTS + param));
            got.push(param);
        }
        for (request, param) in becomes.iter().enumerate() {
            if let Some(param) = *param
                && addresses[request] != SLOTS + param
            {
                placement.observe(param, BYTES, addresses[request]);
            }
        }
        got
    }

    #[test]
    fn after_one_backward_gradients_are_made_in_their_slots_and_temporaries_are_not() {
        let mut placement = GradientPlacement::new([BYTES; 3].into_iter());
        let becomes = [None, Some(2), Some(0), None, Some(1)];
        assert_eq!(backward(&mut placement, &becomes), [None; 5]);
        assert_eq!(backward(&mut placement, &becomes), becomes);
        assert_eq!(backward(&mut placement, &becomes), becomes);
        // Another order is learned after it was observed once.
        let other = [Some(0), None, Some(1), Some(2), None];
        backward(&mut placement, &other);
        assert_eq!(backward(&mut placement, &other), other);
    }

    #[test]
    fn an_order_that_never_settles_is_given_up() {
        let mut placement = GradientPlacement::new([BYTES; 2].into_iter());
        for _ in 0..MAX_WRONG_PREDICTIONS {
            backward(&mut placement, &[Some(0), Some(1)]);
            backward(&mut placement, &[Some(1), Some(0)]);
        }
        assert_eq!(backward(&mut placement, &[Some(0), Some(1)]), [None, None]);
    }

    #[test]
    fn other_sizes_are_not_tracked() {
        let mut placement = GradientPlacement::new([BYTES].into_iter());
        assert_eq!(placement.request(BYTES + 1, |param| Some((1, param))), None);
        placement.observe(0, BYTES + 1, 7);
        assert!(placement.classes[&BYTES].addresses.is_empty());
    }
}
