//! Guesses which operation of a graph will make which gradient, so that it is made in its slot.
//!
//! What [`super::lending`] learns from the order of requests, an executor that runs several operations at once does not
//! keep. But it says on whose behalf it asks for memory, and an operation of a graph makes the same tensor step after step.
//!
//! A value: no memory is touched here, and a wrong guess costs a copy, nothing else.

use std::collections::HashMap;

/// After so many wrong guesses for a gradient no operation is taken to make it; the first observation counts as one.
const PATIENCE: u8 = 4;
/// Of how many tensors of one size it is remembered who made them.
const MEMORY: usize = 1024;

/// A gradient of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gradient {
    /// Number of its blueprint.
    pub plan: usize,
    /// Parameter in it.
    pub param: usize,
}

/// See the module's text.
#[derive(Debug, Default)]
pub struct Makers {
    /// By size in bytes; only sizes that a gradient has.
    classes: HashMap<usize, Class>,
    /// Wrong guesses.
    wrong: HashMap<Gradient, u8>,
}

#[derive(Debug, Default)]
struct Class {
    /// What an operation makes.
    makes: HashMap<usize, Gradient>,
    /// Which operation asked for the memory at an address that is no slot.
    asked: HashMap<usize, usize>,
}

impl Makers {
    /// From now on there are gradients of these sizes in bytes.
    pub fn expect(&mut self, bytes: impl Iterator<Item = usize>) {
        for bytes in bytes.filter(|&bytes| bytes > 0) {
            self.classes.entry(bytes).or_default();
        }
    }

    /// The gradient that operation `maker` is likely to make if it asks for `bytes` bytes. If it does not get that one's
    /// slot, [`Makers::made_elsewhere`] must follow.
    pub fn request(&self, bytes: usize, maker: usize) -> Option<Gradient> {
        self.classes.get(&bytes)?.makes.get(&maker).copied()
    }

    /// The operation `maker` asked for `bytes` bytes and got memory at `address`, which is no slot.
    pub fn made_elsewhere(&mut self, bytes: usize, maker: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        if class.asked.len() >= MEMORY {
            class.asked.clear();
        }
        class.asked.insert(address, maker);
    }

    /// A gradient of `bytes` bytes was made at `address` and not in its slot.
    pub fn observe(&mut self, gradient: Gradient, bytes: usize, address: usize) {
        let Some(class) = self.classes.get_mut(&bytes) else { return };
        let maker = class.asked.get(&address).copied();
        if maker.is_some_and(|maker| class.makes.get(&maker) == Some(&gradient)) {
            // The guess was right; somebody still had the slot.
            return;
        }
        // Another trace of the function has other operations: what those make stays known.
        let wrong = self.wrong.entry(gradient).or_default();
        *wrong = wrong.saturating_add(1).min(PATIENCE);
        if *wrong < PATIENCE
            && let Some(maker) = maker
        {
            class.makes.insert(maker, gradient);
        }
    }

    /// Whoever makes `gradient` makes it for others as well, so that it cannot be reduced where it is, or it was made by
    /// another operation than expected. Returns whether it is worth a new guess.
    pub fn is_wrong(&mut self, gradient: Gradient, bytes: usize) -> bool {
        let wrong = self.wrong.entry(gradient).or_default();
        *wrong = wrong.saturating_add(1).min(PATIENCE);
        if let Some(class) = self.classes.get_mut(&bytes) {
            class.makes.retain(|_, makes| *makes != gradient);
        }
        *wrong < PATIENCE
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

    /// One step: operations make tensors, each of which becomes a gradient or does not. Returns what the operations were
    /// taken to make.
    fn step(makers: &mut Makers, operations: &[(usize, Option<usize>)]) -> Vec<Option<usize>> {
        let made: Vec<_> = operations.iter().map(|(maker, _)| makers.request(BYTES, *maker)).collect();
        let mut addresses = Vec::new();
        for (at, (maker, _)) in operations.iter().enumerate() {
            addresses.push(made[at].map_or(at, |gradient| SLOTS + gradient.param));
            if made[at].is_none() {
                makers.made_elsewhere(BYTES, *maker, at);
            }
        }
        for (at, (_, becomes)) in operations.iter().enumerate() {
            if let Some(param) = *becomes
                && addresses[at] != SLOTS + param
            {
                makers.observe(gradient(param), BYTES, addresses[at]);
            }
        }
        made.into_iter().map(|gradient| gradient.map(|gradient| gradient.param)).collect()
    }

    #[test]
    fn after_one_step_gradients_are_made_in_their_slots_in_whatever_order() {
        let mut makers = Makers::default();
        makers.expect([BYTES].into_iter());
        assert_eq!(step(&mut makers, &[(70, Some(0)), (71, None), (72, Some(1))]), [None; 3]);
        assert_eq!(step(&mut makers, &[(70, Some(0)), (71, None), (72, Some(1))]), [Some(0), None, Some(1)]);
        assert_eq!(step(&mut makers, &[(72, Some(1)), (70, Some(0)), (71, None)]), [Some(1), Some(0), None]);
        // A function that is traced anew has other operations.
        step(&mut makers, &[(80, Some(0)), (82, Some(1))]);
        assert_eq!(step(&mut makers, &[(80, Some(0)), (82, Some(1))]), [Some(0), Some(1)]);
    }

    #[test]
    fn an_operation_that_makes_several_gradients_is_taken_to_make_one_and_the_others_are_given_up() {
        let mut makers = Makers::default();
        makers.expect([BYTES].into_iter());
        for _ in 0..PATIENCE {
            step(&mut makers, &[(70, Some(0))]);
            step(&mut makers, &[(70, Some(1))]);
        }
        assert_eq!(makers.wrong[&gradient(1)], PATIENCE);
        step(&mut makers, &[(71, Some(1))]);
        assert_eq!(step(&mut makers, &[(70, Some(0)), (71, Some(1))]), [Some(0), None]);
    }

    #[test]
    fn a_slot_that_somebody_has_does_not_make_the_guess_wrong() {
        let mut makers = Makers::default();
        makers.expect([BYTES].into_iter());
        step(&mut makers, &[(70, Some(0))]);
        for _ in 0..2 * PATIENCE {
            makers.made_elsewhere(BYTES, 70, 5);
            makers.observe(gradient(0), BYTES, 5);
        }
        assert_eq!(makers.request(BYTES, 70), Some(gradient(0)));
    }

    #[test]
    fn gradients_that_others_see_are_made_elsewhere_and_other_sizes_are_not_tracked() {
        let mut makers = Makers::default();
        makers.expect([BYTES].into_iter());
        step(&mut makers, &[(70, Some(0))]);
        makers.is_wrong(gradient(0), BYTES);
        assert_eq!(makers.request(BYTES, 70), None);
        makers.made_elsewhere(BYTES + 1, 70, 9);
        makers.observe(gradient(0), BYTES + 1, 9);
        assert_eq!(makers.request(BYTES + 1, 70), None);
        for address in 0..3 * MEMORY {
            makers.made_elsewhere(BYTES, 70, address);
        }
        assert!(makers.classes[&BYTES].asked.len() <= MEMORY);
    }
}
