//! What a thread makes for another one that may not wait for it to the end.

/// A value on its way: it ends unless somebody takes it, wherever on the way it is when nobody comes any more.
pub(super) struct Unclaimed<T> {
    value: Option<T>,
    end: fn(&T),
}

impl<T> Unclaimed<T> {
    /// `value`, of which `end` is called if nobody takes it.
    pub(super) fn new(value: T, end: fn(&T)) -> Self {
        Self { value: Some(value), end }
    }

    /// It is the caller's.
    pub(super) fn take(mut self) -> T {
        self.value.take().expect("it is taken once, as that consumes this")
    }
}

impl<T> Drop for Unclaimed<T> {
    fn drop(&mut self) {
        self.value.iter().for_each(self.end);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, mpsc};
    use std::thread;

    use super::*;

    fn count(ended: &Arc<AtomicUsize>) {
        ended.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn whatever_comes_as_the_wait_ends_is_taken_or_ends() {
        const ROUNDS: usize = 2000;
        let (ended, mut taken) = (Arc::new(AtomicUsize::new(0)), 0);
        for round in 0..ROUNDS {
            let (sender, receiver) = mpsc::channel();
            let value = Unclaimed::new(ended.clone(), count);
            let maker = thread::spawn(move || sender.send(value).is_ok());
            // The moment at which the wait ends moves over the one at which the value comes.
            (0..round % 64).for_each(|_| std::hint::spin_loop());
            taken += receiver.try_recv().map_or(0, |value| usize::from(Arc::strong_count(&value.take()) > 1));
            drop(receiver);
            maker.join().expect("the maker only sends");
        }
        assert_eq!(ended.load(Ordering::Relaxed) + taken, ROUNDS);
        assert!(taken < ROUNDS, "none was late");
    }
}
