//! Chooses the address of this host that other hosts use, if a setting names network interfaces.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::config::Setting;
use crate::error::{Error, Result};

/// Returns the address of the first existing interface in the setting, a comma-separated list; none without the
/// setting.
///
/// # Errors
/// [`Error::Config`] listing the available interfaces, if this host has none of those in the setting.
pub(crate) fn address(setting: &Setting) -> Result<Option<IpAddr>> {
    let Some((name, wanted)) = setting.set() else { return Ok(None) };
    let there = interfaces()?;
    choose(&wanted, &there).map(Some).ok_or_else(|| {
        let mut names: Vec<&str> = there.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let all = names.join(", ");
        Error::Config(format!("`{name}` is `{wanted}`: this host has no such network interface that is up, only {all}"))
    })
}

fn choose(wanted: &str, there: &[(String, IpAddr)]) -> Option<IpAddr> {
    let of = |name: &str| {
        let own = || there.iter().filter(|(each, _)| each == name).map(|(_, address)| *address);
        // IPv6 addresses that need a scope cannot be used by other hosts.
        own().find(IpAddr::is_ipv4).or_else(|| own().next())
    };
    wanted.split(',').map(str::trim).find_map(of)
}

/// The interfaces that are up, with their addresses.
fn interfaces() -> Result<Vec<(String, IpAddr)>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is valid for the write.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(Error::io("looking for network interfaces", std::io::Error::last_os_error()));
    }
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: it is an entry of the list, which is not freed before the loop ends.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: the address is there, and begins with its family.
        let address = match i32::from(unsafe { (*entry.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: an address of this family is of this type; it need not be aligned as one.
                let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::V4(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                if address.sin6_scope_id != 0 {
                    continue;
                }
                IpAddr::V6(Ipv6Addr::from(address.sin6_addr.s6_addr))
            }
            _ => continue,
        };
        // SAFETY: an entry's name is a string that ends with a zero.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push((name.to_string_lossy().into_owned(), address));
    }
    // SAFETY: the list is from `getifaddrs`, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_interface_that_is_there_counts() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let there = [
            ("lo".to_owned(), address("127.0.0.1")),
            ("ib0".to_owned(), address("fd00::7")),
            ("eth0".to_owned(), address("fd00::8")),
            ("eth0".to_owned(), address("10.0.0.8")),
        ];
        assert_eq!(choose("eth0", &there), Some(address("10.0.0.8")));
        assert_eq!(choose("eth1, ib0,eth0", &there), Some(address("fd00::7")));
        assert_eq!(choose("eth", &there), None);
        assert!(interfaces().expect("the system tells").iter().any(|(_, address)| address.is_loopback()));
    }
}
