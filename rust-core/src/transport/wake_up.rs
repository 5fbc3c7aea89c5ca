//! Measures how long a wait should spin before it yields and sleeps.
//!
//! Note "spins". A wait that spins for as long as a sleep and a wake-up cost needs at most twice the time of the best
//! decision, whenever the awaited event comes (Karlin, Li, Manasse and Owicki, 1991). The cost is a property of the
//! processor, the kernel and the hypervisor: a core without runnable threads halts, and in a virtual machine the host has
//! to continue it. So each process measures it once, when it creates its first group: a helper thread sleeps, and notes
//! how long after the wake-up it runs. The time of one spin is measured as well: `pause` takes 10 times as long on some
//! processors as on others.
//!
//! The process may be disturbed while it measures, in which case a wake-up seems longer. So the second shortest one
//! counts, and it is limited.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::sync::{futex_wait, futex_wake_all};

/// Number of spins before the measurement.
const UNMEASURED_SPINS: u32 = 1024;
/// Measured wake-ups. With their sleeps, they take about half a millisecond.
const WAKE_UPS: usize = 5;
/// After this time the helper sleeps, and its core has halted if it has nothing else to run.
const FALL_ASLEEP: Duration = Duration::from_micros(50);
/// A wake-up that seems longer waited for a core.
const MAX_WAKE_UP: Duration = Duration::from_micros(100);
/// Spins whose time is measured together.
const TIMED_SPINS: u32 = 256;

static SPINS: AtomicU32 = AtomicU32::new(UNMEASURED_SPINS);

/// The number of spins that take as long as a sleep and a wake-up.
pub(super) fn spins() -> u32 {
    SPINS.load(Ordering::Relaxed)
}

/// Measures [`spins`], once in a process.
pub(super) fn measure_once() {
    static MEASURED: Once = Once::new();
    MEASURED.call_once(|| {
        // Miri has no time of its own.
        let Some(wake_up) = (!cfg!(miri)).then(wake_up_time).flatten() else { return };
        let spins = spins_within(wake_up, spin_time());
        tracing::debug!(?wake_up, spins, "waits spin for as long as a wake-up takes");
        SPINS.store(spins, Ordering::Relaxed);
    });
}

/// The number of spins of `spin` each that take as long as a wake-up.
fn spins_within(wake_up: Duration, spin: Duration) -> u32 {
    (wake_up.min(MAX_WAKE_UP).as_nanos() / spin.as_nanos().max(1)).max(1) as u32
}

/// The time of one spin, with its look at the awaited word.
fn spin_time() -> Duration {
    let word = AtomicU32::new(0);
    let timed = |_| {
        let start = Instant::now();
        for _ in 0..TIMED_SPINS {
            std::hint::black_box(&word).load(Ordering::Acquire);
            std::hint::spin_loop();
        }
        start.elapsed() / TIMED_SPINS
    };
    (0..3).map(timed).min().unwrap_or_default()
}

/// The time from a wake-up to the woken thread, or `None` if the system refuses a thread.
fn wake_up_time() -> Option<Duration> {
    let (turn, nanoseconds, is_over) = (AtomicU32::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let begin = Instant::now();
    let now = || begin.elapsed().as_nanos() as u64;
    let mut times = Vec::new();
    thread::scope(|threads| {
        let helper = || {
            for wake_up in 0.. {
                while turn.load(Ordering::Acquire) == wake_up {
                    futex_wait(&turn, wake_up, super::POLL_INTERVAL);
                }
                // Read before the time is published, after which the other thread may begin the last wake-up.
                let is_last = is_over.load(Ordering::Acquire);
                nanoseconds.store(now(), Ordering::Release);
                if is_last {
                    return;
                }
            }
        };
        thread::Builder::new().name("smd-wake-up".into()).spawn_scoped(threads, helper).ok()?;
        for wake_up in 0..=WAKE_UPS {
            thread::sleep(FALL_ASLEEP);
            is_over.store(wake_up == WAKE_UPS, Ordering::Release);
            nanoseconds.store(0, Ordering::Release);
            let woken = now();
            turn.fetch_add(1, Ordering::Release);
            futex_wake_all(&turn);
            let ran = loop {
                match nanoseconds.load(Ordering::Acquire) {
                    0 => thread::yield_now(),
                    ran => break ran,
                }
            };
            times.push(Duration::from_nanos(ran.saturating_sub(woken)));
        }
        Some(())
    })?;
    times.sort();
    times.get(1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore)]
    fn a_wait_spins_for_as_long_as_a_wake_up_takes() {
        let wake_up = wake_up_time().unwrap();
        assert!(!wake_up.is_zero() && wake_up < Duration::from_millis(100), "{wake_up:?}");
        let spin = spin_time();
        assert!(spin < Duration::from_micros(10), "{spin:?}");
        measure_once();
        assert!((1..=MAX_WAKE_UP.as_nanos() as u32).contains(&spins()));
    }

    #[test]
    fn a_disturbed_measurement_is_limited() {
        let nanoseconds = Duration::from_nanos;
        assert_eq!(spins_within(nanoseconds(30_000), nanoseconds(20)), 1500);
        assert_eq!(spins_within(Duration::from_secs(1), nanoseconds(100)), 1000);
        assert_eq!(spins_within(nanoseconds(5), nanoseconds(40)), 1);
        assert_eq!(spins_within(nanoseconds(500), Duration::ZERO), 500);
    }
}
