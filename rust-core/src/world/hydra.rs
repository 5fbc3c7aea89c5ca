//! The address of MPICH's `mpiexec`, which identifies a job: it is in the command line of the ranks' parent, a proxy of
//! the launcher Hydra, and in no variable of the ranks.
//!
//! Two jobs of MPICH on one host set equal variables. The address is the same for all ranks of a job and belongs to no
//! other job while `mpiexec` runs.

use std::path::Path;
use std::sync::OnceLock;

/// The name by which [`super::env::variables`] hands the address on.
pub(super) const VARIABLE: &str = "HYDRA_CONTROL_PORT";

const PROXY: &str = "hydra_pmi_proxy";
const MAX_ANCESTORS: usize = 64;

/// `host:port` of the `mpiexec` that started this process, and the group of processes that it belongs to; `None` under
/// another launcher.
pub(super) fn control_port() -> Option<String> {
    // The proxy may end before its ranks do, which then have another parent.
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    FOUND.get_or_init(|| find(std::process::id(), read)).clone()
}

/// The command line of a process and its line of state.
fn read(process: u32) -> Option<(Vec<u8>, String)> {
    let file = |name| format!("/proc/{process}/{name}");
    Some((std::fs::read(file("cmdline")).ok()?, std::fs::read_to_string(file("stat")).ok()?))
}

fn find(mut process: u32, read: impl Fn(u32) -> Option<(Vec<u8>, String)>) -> Option<String> {
    for _ in 0..MAX_ANCESTORS {
        let (command, stat) = read(process)?;
        if let Some(found) = address_in(&command) {
            return Some(found);
        }
        // `pid (name) state parent`; the name may contain spaces and brackets.
        process = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    }
    None
}

/// The address in the command line of a proxy, and `None` for other commands.
fn address_in(command: &[u8]) -> Option<String> {
    let words: Vec<&str> = command.split(|&byte| byte == 0).filter_map(|word| std::str::from_utf8(word).ok()).collect();
    if Path::new(words.first()?).file_name()? != PROXY {
        return None;
    }
    let option = |name| words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1).copied());
    let address = option("--control-port")?;
    Some(option("--pgid").map_or_else(|| address.to_owned(), |group| format!("{address} {group}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(from: u32, processes: &[(u32, u32, &str)]) -> Option<String> {
        find(from, |process| {
            let (_, parent, command) = processes.iter().find(|(each, ..)| *each == process)?;
            Some((command.replace(' ', "\0").into_bytes(), format!("{process} (a (b) c) S {parent} 1 1 0")))
        })
    }

    #[test]
    fn the_address_is_that_of_the_nearest_proxy() {
        let proxy = "/usr/bin/hydra_pmi_proxy --control-port node1:35759 --rmk user --pgid 0 --proxy-id 0";
        let job = [(9, 7, "python train.py"), (7, 5, "sh -c x"), (5, 3, proxy), (3, 0, "mpiexec")];
        assert_eq!(found(9, &job).as_deref(), Some("node1:35759 0"));
        assert_eq!(found(3, &job), None);
        assert_eq!(found(9, &[(9, 3, "python hydra_pmi_proxy --control-port a:1"), (3, 0, "slurmstepd")]), None);
    }
}
