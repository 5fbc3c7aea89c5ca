//! The CPU core on which a process runs collectives by name, if the user sets one.

use crate::config;

/// Returns the core for the process with this local rank, from [`config::THREAD_AFFINITY`]; `None` if that is not set
/// or invalid, which is logged.
pub fn core(local_rank: usize, local_size: usize) -> Option<usize> {
    let (name, text) = config::THREAD_AFFINITY.set()?;
    let cores = parse(&text).filter(|cores| cores.len() >= local_size);
    if cores.is_none() {
        tracing::error!(
            "`{name}` is `{text}`: expected {local_size} numbers of cores with commas, one for each process of this host; it \
             has no effect"
        );
    }
    cores?.get(local_rank).copied()
}

fn parse(text: &str) -> Option<Vec<usize>> {
    text.split(',').map(|number| number.trim().parse().ok()).collect()
}

/// Pins the calling thread to this core.
pub(super) fn pin(core: usize) {
    // Libraries cache the number of available cores at the first query, so it is queried before this thread is
    // pinned.
    crate::transport::cores();
    let pinned = if core < rustix::thread::CpuSet::MAX_CPU {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(core);
        rustix::thread::sched_setaffinity(None, &cores).map_err(|error| error.to_string())
    } else {
        Err("the number is too large".to_owned())
    };
    match pinned {
        Ok(()) => tracing::debug!("collectives by name run on core {core}"),
        Err(why) => tracing::error!("collectives by name do not run on core {core}: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores() {
        assert_eq!(parse("0, 3"), Some(vec![0, 3]));
        for text in ["", "a", "1,", "-1"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_thread_stays_on_its_core() {
        std::thread::spawn(|| {
            let before = rustix::thread::sched_getaffinity(None).unwrap();
            let core = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| before.is_set(*core)).unwrap();
            pin(core);
            let after = rustix::thread::sched_getaffinity(None).unwrap();
            assert!(after.count() == 1 && after.is_set(core));
            pin(usize::MAX);
            assert_eq!(rustix::thread::sched_getaffinity(None).unwrap(), after, "it says so, and that is all");
        })
        .join()
        .unwrap();
    }
}
