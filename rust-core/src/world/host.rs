//! The identity of this host. Processes can share memory only if they have the same kernel and the same process ids.
//! So a host is identified by boot id, pid namespace and network namespace, and not by its name, which containers may
//! share.

/// The identity of the host (or container) that this process runs in.
pub fn identity() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = |kind: &str| {
        std::fs::read_link(format!("/proc/self/ns/{kind}"))
            .map(|link| link.to_string_lossy().into_owned())
            .unwrap_or_default()
    };
    format!("{}/{}/{}", boot.trim(), namespace("pid"), namespace("net"))
}

/// The host's name, for messages only.
pub fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_identity_is_stable() {
        assert_eq!(super::identity(), super::identity());
        assert!(super::identity().len() > 10);
    }
}
