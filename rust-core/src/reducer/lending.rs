//! Guesses which tensor will become which gradient, before it is made.
//!
//! A gradient that is made in its slot need not be copied there. A framework's allocator knows of a tensor only its
//! size; but a model's backward asks for memory in the same order step after step. So the n-th request of a size is
//! remembered by what became of its memory, and the next time it gets that parameter's slot.
//!
//! A value: no memory is touched here, and a wrong guess costs a copy, nothing else.

use std::collections::HashMap;

/// After so many wrong guesses for a parameter its backward is taken to have no stable order.
const PATIENCE: u8 = 4;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Lending {
    /// By size in bytes; only sizes that a parameter has.
    classes: HashMap<usize, Class>,
    /// Wrong guesses, by parameter; the first observation counts as one.
    wrong: Vec<u8>,
}

#[derive(Debug, Default)]
struct Class {
    /// What the n-th request of a backward becomes.
    expected: HashMap<usize, usize>,
    /// Where the memory for the n-th request of this backward was.
    addresses: Vec<usize>,
}

impl Lending {
    /// For parameters whose gradients have these sizes in bytes.
    pub fn new(bytes: impl Iterator<Item = usize>) -> Self {
        let mut lending = Self::default();
        for bytes in bytes {
            lending.classes.entry(bytes).or_default();
            lending.wrong.push(0);
        }
        lending
    }

    /// A backward begins.
    pub fn start(&mut self) {
        for class in self.classes.values_mut() {
            class.addresses.clear();
        }
    }

    /// The backward asks for `bytes` bytes. `grant` gets the parameter whose gradient this is likely to be, if there is
    /// one, and returns an address; [`Lending::granted_elsewhere`] must follow if it returns none.
    pub fn request<T>(&mut self, bytes: usize, grant: impl FnOnce(usize) -> Option<(usize, T)>) -> Option<T> {
        let class = self.classes.get_mut(&bytes)?;
        let granted = class.expected.get(&class.addresses.len()).and_then(|&param| grant(param));
        let (address, value) = granted.map_or((0, None), |(address, value)| (address, Some(value)));
        class.addresses.push(address);
        value
    }

    /// The last request for `bytes` bytes got memory at `address`.
    pub fn granted_elsewhere(&mut self, bytes: usize, address: usize) {
        if let Some(last) = self.classes.get_mut(&bytes).and_then(|class| class.addresses.last_mut()) {
            *last = address;
        }
    }

    /// The gradient of `param`, which has `bytes` bytes, was made at `address` and not in its slot.
    pub fn observe(&mut self, param: usize, bytes: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        if self.wrong[param] >= PATIENCE {
            return;
        }
        self.wrong[param] += 1;
        class.expected.retain(|_, expected| *expected != param);
        // Memory may be used for several tensors, one after the other: the last one is the gradient.
        if let Some(request) = class.addresses.iter().rposition(|&granted| granted == address)
            && self.wrong[param] < PATIENCE
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

    /// One backward: each request becomes the gradient of a parameter, or a temporary. Returns what the requests got.
    fn backward(lending: &mut Lending, becomes: &[Option<usize>]) -> Vec<Option<usize>> {
        lending.start();
        let mut got = Vec::new();
        let mut addresses = Vec::new();
        for request in 0..becomes.len() {
            let param = lending.request(BYTES, |param| Some((SLOTS + param, param)));
            if param.is_none() {
                lending.granted_elsewhere(BYTES, request + 1);
            }
            addresses.push(param.map_or(request + 1, |param| SLOTS + param));
            got.push(param);
        }
        for (request, param) in becomes.iter().enumerate() {
            if let Some(param) = *param
                && addresses[request] != SLOTS + param
            {
                lending.observe(param, BYTES, addresses[request]);
            }
        }
        got
    }

    #[test]
    fn after_one_backward_gradients_are_made_in_their_slots_and_temporaries_are_not() {
        let mut lending = Lending::new([BYTES; 3].into_iter());
        let becomes = [None, Some(2), Some(0), None, Some(1)];
        assert_eq!(backward(&mut lending, &becomes), [None; 5]);
        assert_eq!(backward(&mut lending, &becomes), becomes);
        assert_eq!(backward(&mut lending, &becomes), becomes);
        // Another order is learned, too.
        let other = [Some(0), None, Some(1), Some(2), None];
        backward(&mut lending, &other);
        assert_eq!(backward(&mut lending, &other), other);
    }

    #[test]
    fn an_order_that_never_settles_is_given_up() {
        let mut lending = Lending::new([BYTES; 2].into_iter());
        for _ in 0..PATIENCE {
            backward(&mut lending, &[Some(0), Some(1)]);
            backward(&mut lending, &[Some(1), Some(0)]);
        }
        assert_eq!(backward(&mut lending, &[Some(0), Some(1)]), [None, None]);
    }

    #[test]
    fn other_sizes_are_not_tracked() {
        let mut lending = Lending::new([BYTES].into_iter());
        assert_eq!(lending.request(BYTES + 1, |param| Some((1, param))), None);
        lending.observe(0, BYTES + 1, 7);
        assert!(lending.classes[&BYTES].addresses.is_empty());
    }
}
