//! How a wait spends its time before it sleeps: it spins briefly, if that takes no core from the awaited processes, and
//! then yields for a while, so that they can use this core.
//!
//! Note "sleep is slow". A core without runnable threads halts, and waking it takes 5 to 30 us or more. One late wake-up
//! makes the woken member late for the next synchronisation, for which the others then sleep. This pattern repeats, and
//! doubled the time of pipelined operations. So yielding lasts longer than the steps of a pipeline differ.
//!
//! Note "yield is slow". A thread that yields to one with other work gets its core back when that one's time slice ends,
//! whatever happens meanwhile, but a thread that sleeps gets it back when it is woken. So after a yield of the length of
//! a time slice, waits sleep at once for a while. At a load of 6 on 2 cores, an all-reduce of 25 MiB between hosts took
//! 0.6 times as long as with yields only.
//!
//! The time of spinning is measured ([`super::wake_up`]). The other times are multiples of the kernel's time slice, which
//! is a setting of the kernel and not a property of the processor: yields and their loss are decisions of its scheduler.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{cores, wake_up};

/// Number of spins between two checks of which members share the core.
const SPINS_PER_CORE_CHECK: u32 = 64;
/// Part of a time slice for which a wait yields: as long as many chunks take. With 4 processes on 2 cores and time slices
/// of 4 ms, a tenth of it made all-reduces of 64 KiB to 4 MiB a quarter slower. Threads with work to do get the core at the
/// first yield.
const YIELD_SLICES: f32 = 0.5;
/// A yield of this part of a time slice went to a thread with work of its own: longer than the steps between two waits.
const LONG_YIELD_SLICES: f32 = 0.25;
/// As above if members share cores. They may have work between two waits, but give the core back before their slice ends.
/// A quarter instead made all-reduces of 16 KiB between 4 processes on 2 cores twice as slow, because waits for such
/// members slept; a whole slice missed busy processes.
const LONG_CROWDED_YIELD_SLICES: f32 = 0.75;
/// Time slices for which waits then sleep at once: so many that the next slice that is lost to a trial does not matter.
const SLEEPING_SLICES: f32 = 25.0;

/// Until when waits of this process sleep at once, in milliseconds since the first wait.
static SLEEPS_UNTIL: AtomicU64 = AtomicU64::new(0);

fn process_ms(now: Instant) -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    now.saturating_duration_since(*START.get_or_init(|| now)).as_millis() as u64
}

/// The times of waits in this process.
#[derive(Clone, Copy, Debug)]
struct WaitTimes {
    yielding: Duration,
    long_yield: Duration,
    long_crowded_yield: Duration,
    sleeping_ms: u64,
}

impl WaitTimes {
    fn get() -> &'static Self {
        static TIMES: OnceLock<WaitTimes> = OnceLock::new();
        TIMES.get_or_init(|| Self::of(time_slice()))
    }

    fn of(slice: Duration) -> Self {
        Self {
            yielding: slice.mul_f32(YIELD_SLICES),
            long_yield: slice.mul_f32(LONG_YIELD_SLICES),
            long_crowded_yield: slice.mul_f32(LONG_CROWDED_YIELD_SLICES),
            sleeping_ms: slice.mul_f32(SLEEPING_SLICES).as_millis() as u64,
        }
    }
}

/// How long the kernel runs a busy thread before another one on its core: until the first tick after the thread's slice.
fn time_slice() -> Duration {
    let mut tick = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let mut slice = tick;
    // SAFETY: both calls write the time that they are given. If one fails, its time stays zero.
    #[cfg(not(miri))]
    unsafe {
        // This clock advances with each tick.
        libc::clock_getres(libc::CLOCK_MONOTONIC_COARSE, &mut tick);
        // In whole ticks, rounded down; 0 is this thread.
        libc::sched_rr_get_interval(0, &mut slice);
    }
    let duration = |time: libc::timespec| Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.max(0) as u32);
    // The limits are for real-time policies, and for kernels without ticks.
    (duration(tick) + duration(slice)).clamp(Duration::from_millis(2), Duration::from_millis(10))
}

/// One wait.
pub(crate) struct Backoff {
    /// Spins that are left.
    spins: u32,
    yields_since: Option<Instant>,
    /// Whether the group has more members on this host than there are cores.
    is_crowded: bool,
    /// Whether something will wake this thread if it sleeps.
    is_woken: bool,
    times: &'static WaitTimes,
}

impl Backoff {
    /// A wait in a group with `members` members on this host, that yields from the start if it may not spin.
    pub(crate) fn new(members: usize, may_spin: bool) -> Self {
        // A multiple, so that the first spin checks the cores.
        let spins = if may_spin { wake_up::spins().next_multiple_of(SPINS_PER_CORE_CHECK) } else { 0 };
        Self { spins, yields_since: None, is_crowded: members > cores(), is_woken: true, times: WaitTimes::get() }
    }

    /// The pauses of a thread that polls because nothing would wake it: it yields also where waits sleep at once.
    pub(super) fn of_polling_thread() -> Self {
        // Others may wait for it on this core, unless there are enough of them.
        Self { is_woken: false, ..Self::new(1, cores() > 2) }
    }

    /// Whether it is not yet time to sleep.
    pub(super) fn has_time(&mut self) -> bool {
        let now = Instant::now();
        now.saturating_duration_since(*self.yields_since.get_or_insert(now)) < self.times.yielding
    }

    /// Waits briefly without sleeping; returns false when it is time to sleep. `shares_core` says whether an awaited
    /// member may need the core of this thread.
    pub(crate) fn pause(&mut self, shares_core: impl FnOnce() -> bool) -> bool {
        if self.spins > 0 {
            if self.spins.is_multiple_of(SPINS_PER_CORE_CHECK) && shares_core() {
                self.spins = 0;
                return true;
            }
            self.spins -= 1;
            std::hint::spin_loop();
            true
        } else {
            let start = Instant::now();
            if start.saturating_duration_since(*self.yields_since.get_or_insert(start)) >= self.times.yielding
                || (self.is_woken && process_ms(start) < SLEEPS_UNTIL.load(Ordering::Relaxed))
            {
                return false;
            }
            std::thread::yield_now();
            let end = Instant::now();
            let long = if self.is_crowded { self.times.long_crowded_yield } else { self.times.long_yield };
            if self.is_woken && end.saturating_duration_since(start) >= long {
                SLEEPS_UNTIL.store(process_ms(end) + self.times.sleeping_ms, Ordering::Relaxed);
            }
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore)]
    fn the_times_follow_the_time_slice() {
        let slice = time_slice();
        assert!((Duration::from_millis(2)..=Duration::from_millis(10)).contains(&slice), "{slice:?}");
        let times = WaitTimes::of(Duration::from_millis(4));
        assert_eq!((times.yielding, times.long_yield), (Duration::from_millis(2), Duration::from_millis(1)));
        assert_eq!(times.long_crowded_yield, Duration::from_millis(3));
        assert_eq!(times.sleeping_ms, 100);
    }

    #[test]
    fn a_wait_yields_before_it_sleeps_and_does_not_spin_beside_an_awaited_member() {
        let mut backoff = Backoff::new(1, true);
        let spins = backoff.spins;
        assert!(spins >= SPINS_PER_CORE_CHECK && backoff.pause(|| false) && backoff.spins == spins - 1);
        assert!(Backoff::new(1, false).spins == 0);
        let mut beside = Backoff::new(1, true);
        assert!(beside.pause(|| true) && beside.spins == 0 && beside.yields_since.is_none());
        while beside.pause(|| true) {}
        assert!(beside.yields_since.is_some(), "it has yielded");
    }
}
