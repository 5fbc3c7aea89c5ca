//! The folder for libraries that are compiled on this host and then loaded: framework shims and the MPI plug-in.
//!
//! - CCH-1: a loaded library runs with this user's rights, so only this user and root may be able to write it. The
//!   file and every folder on its path belong to one of them and are not writable by other users. A folder with the
//!   sticky bit (`/tmp`) is accepted, because there users cannot replace each other's entries.
//! - CCH-2: a configured folder that violates CCH-1 is not used, nor is one that cannot be created or from which no
//!   library can be loaded. Libraries are built in a folder of this user below the temporary directory instead, which
//!   is checked in the same way. One process of each host logs the reason.

use std::ffi::CStr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::config;
use crate::error::{Error, Result};
use crate::world::env;

/// The folder for libraries, and why it is not the configured one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheFolder {
    /// An existing folder that satisfies CCH-1.
    pub path: PathBuf,
    /// Why this is not the configured folder; `None` if it is, and in all processes of a host except one, so that the
    /// reason is shown once.
    pub warning: Option<String>,
}

/// Returns the folder `name` inside the configured cache folder, created if necessary, or its replacement (CCH-2).
///
/// # Errors
/// [`Error::Unsupported`] if neither may be used.
pub fn folder(name: &str) -> Result<CacheFolder> {
    let text = config::CACHE_DIR.text().unwrap_or_else(|| config::CACHE_DIR.default.to_owned());
    let configured = in_home(&text, std::env::home_dir()).map(|folder| folder.join(name));
    let user = rustix::process::geteuid().as_raw();
    let temporary = std::env::temp_dir().join(format!("opensmd-{user}"));
    choose(configured, temporary.join(name), logs_for_host())
}

/// `configured` is `None` if the user has no home folder.
fn choose(configured: Option<PathBuf>, temporary: PathBuf, logs_for_host: bool) -> Result<CacheFolder> {
    let why = match &configured {
        None => "this user has no home folder".to_owned(),
        Some(folder) => match unusable(folder) {
            None => return Ok(CacheFolder { path: folder.clone(), warning: None }),
            Some(why) => why,
        },
    };
    let variable = config::CACHE_DIR.name;
    if let Some(other) = unusable(&temporary) {
        return Err(Error::Unsupported(format!(
            "no folder for built libraries that only this user can write to: {why}; {other}; set `{variable}` to one"
        )));
    }
    let place = configured.map_or_else(|| "the home folder".to_owned(), |folder| format!("`{}`", folder.display()));
    let warning = format!(
        "libraries in {place} are not loaded: {why}. They are built in `{}` instead; correct that, or set `{variable}` to a \
         folder that only you can write to",
        temporary.display(),
    );
    Ok(CacheFolder { path: temporary, warning: logs_for_host.then_some(warning) })
}

/// Returns why libraries cannot be built in and loaded from `folder`, which is created if necessary.
fn unusable(folder: &Path) -> Option<String> {
    let shown = folder.display();
    if let Err(error) = make(folder) {
        return Some(format!("`{shown}` cannot be created: {error}"));
    }
    if let Some(why) = untrusted(folder) {
        return Some(why);
    }
    match rustix::fs::statvfs(folder) {
        Ok(system) if system.f_flag.contains(StatVfsMountFlags::NOEXEC) => {
            Some(format!("`{shown}` is on a file system from which no library is loaded (it is mounted `noexec`)"))
        }
        Ok(_) => None,
        Err(error) => Some(format!("`{shown}` cannot be inspected: {error}")),
    }
}

/// Whether this process logs on behalf of all processes of its host.
fn logs_for_host() -> bool {
    env::detect(&env::variables()).map_or(true, |launch| launch.local.map_or(launch.rank, |(rank, _)| rank) == 0)
}

/// Expands a leading `~` as the shell does.
fn in_home(folder: &str, home: Option<PathBuf>) -> Option<PathBuf> {
    match Path::new(folder).strip_prefix("~") {
        Ok(inside) => home.map(|home| home.join(inside)),
        Err(_) => Some(folder.into()),
    }
}

fn make(folder: &Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Returns why a user other than this one and root may have written `path`; `None` if no other user can have (CCH-1).
pub fn untrusted(path: &Path) -> Option<String> {
    let trust = TrustedOwners::of_this_process();
    // The path as written, whose links other users may own, and the resolved path.
    let found = std::path::absolute(path).and_then(|written| Ok([written, std::fs::canonicalize(path)?]));
    let ways = match found {
        Ok(ways) => ways,
        Err(error) => return Some(format!("`{}` cannot be inspected: {error}", path.display())),
    };
    ways.iter().flat_map(|way| way.ancestors()).find_map(|part| trust.reason_for_distrust(part))
}

/// The users that this process trusts.
struct TrustedOwners {
    user: u32,
    /// The owner id that the kernel shows for users without a mapping in this process's user namespace. Inside such a
    /// namespace, root's files may have it too.
    nameless: Option<u32>,
}

impl TrustedOwners {
    fn of_this_process() -> Self {
        let maps = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let number = |text: Option<&str>| text.and_then(|text| text.parse::<u64>().ok());
        let has_root = maps.is_empty()
            || maps.lines().any(|line| {
                let mut words = line.split_whitespace();
                // The first id of the range outside of the namespace, where root is 0.
                words.next().is_some() && number(words.next()) == Some(0)
            });
        let overflow = || number(Some(std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim()));
        let nameless = (!has_root).then(overflow).flatten().and_then(|user| u32::try_from(user).ok());
        Self { user: rustix::process::geteuid().as_raw(), nameless }
    }

    /// Returns the reason why a component of a path cannot be trusted, or `None` if it can.
    fn reason_for_distrust(&self, part: &Path) -> Option<String> {
        let shown = part.display();
        let data = match std::fs::symlink_metadata(part) {
            Ok(data) => data,
            Err(error) => return Some(format!("`{shown}` cannot be inspected: {error}")),
        };
        let owner = data.uid();
        let is_folder = data.is_dir();
        let is_ours = owner == self.user || owner == 0;
        if !(is_ours || is_folder && Some(owner) == self.nameless) {
            return Some(format!("`{shown}` belongs to user {owner}, not to user {} or root", self.user));
        }
        let mode = data.mode() & 0o7777;
        // The mode of a symbolic link has no meaning.
        let by_others = !data.is_symlink() && mode & 0o002 != 0;
        let by_group = !data.is_symlink() && mode & 0o020 != 0 && !is_private_group(data.gid(), self.user);
        let is_sticky = is_folder && mode & 0o1000 != 0;
        if (by_others || by_group) && !is_sticky {
            let who = if by_others { "all users" } else { "its group" };
            return Some(format!("`{shown}` can be written by {who} (mode {mode:o})"));
        }
        None
    }
}

/// Whether the group has this user's name and no other member. Many systems create such a group for each user.
fn is_private_group(group: u32, user: u32) -> bool {
    const ROOM: usize = 1 << 14;
    let mut text = vec![0; ROOM];
    // SAFETY: the structures consist of pointers and numbers, for which all-zero bytes are valid.
    let (mut found_user, mut found_group): (libc::passwd, libc::group) = unsafe { std::mem::zeroed() };
    let mut end = std::ptr::null_mut();
    // SAFETY: all pointers are to live memory of the given size; the results point into `text`.
    let outcome = unsafe { libc::getpwuid_r(user, &mut found_user, text.as_mut_ptr(), ROOM, &mut end) };
    if outcome != 0 || end.is_null() {
        return false;
    }
    // SAFETY: the call above succeeded, so the name is a string in `text`, which still lives.
    let name = unsafe { CStr::from_ptr(found_user.pw_name) }.to_owned();
    let mut end = std::ptr::null_mut();
    // SAFETY: as above.
    let outcome = unsafe { libc::getgrgid_r(group, &mut found_group, text.as_mut_ptr(), ROOM, &mut end) };
    // SAFETY: as above.
    if outcome != 0 || end.is_null() || unsafe { CStr::from_ptr(found_group.gr_name) } != name.as_c_str() {
        return false;
    }
    let mut member = found_group.gr_mem;
    // SAFETY: the list ends with a null pointer, and its entries are strings in `text`.
    unsafe {
        while !(*member).is_null() {
            if CStr::from_ptr(*member) != name.as_c_str() {
                return false;
            }
            member = member.add(1);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("smd-cache-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            make(&path).unwrap();
            Self(path.canonicalize().unwrap())
        }

        fn folder(&self, name: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            make(&path).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        }

        fn file(&self, name: &str, mode: u32) -> PathBuf {
            let path = self.0.join(name);
            std::fs::write(&path, "library").unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_folder_that_others_can_write_is_not_trusted() {
        let scratch = Scratch::new("modes");
        assert_eq!(untrusted(&scratch.file("mine.so", 0o755)), None);
        let open = untrusted(&scratch.file("open.so", 0o666)).unwrap();
        assert!(open.contains("can be written by all users (mode 666)"), "{open}");
        scratch.folder("wide", 0o777);
        let inside = untrusted(&scratch.file("wide/inside.so", 0o700)).unwrap();
        assert!(inside.contains("/wide` can be written by all users"), "{inside}");
        // Other users may add entries, but cannot change existing ones.
        scratch.folder("shared", 0o1777);
        assert_eq!(untrusted(&scratch.file("shared/inside.so", 0o700)), None);
        let link = scratch.0.join("link.so");
        symlink(scratch.0.join("wide/inside.so"), &link).unwrap();
        assert!(untrusted(&link).is_some());
        symlink(&scratch.0, scratch.0.join("wide/back")).unwrap();
        assert!(untrusted(&scratch.0.join("wide/back/mine.so")).is_some(), "the way there counts");
        assert!(untrusted(&scratch.0.join("missing.so")).unwrap().contains("cannot be inspected"));
    }

    #[test]
    fn a_folder_of_another_user_is_not_trusted() {
        let scratch = Scratch::new("owners");
        let file = scratch.file("theirs.so", 0o755);
        let user = rustix::process::geteuid().as_raw();
        let other = TrustedOwners { user: user + 1, nameless: None };
        // For another user, files of this user are not trusted, unless the owner is root.
        assert_eq!(other.reason_for_distrust(&file).is_none(), user == 0);
        if user == 0 {
            std::os::unix::fs::chown(&file, Some(65_534), None).unwrap();
            let why = untrusted(&file).unwrap();
            assert!(why.contains("belongs to user 65534, not to user 0 or root"), "{why}");
        }
    }

    #[test]
    fn a_private_folder_replaces_a_folder_that_others_can_write() {
        let scratch = Scratch::new("instead");
        let (open, own) = (scratch.folder("open", 0o777), scratch.0.join("own"));
        let chosen = choose(Some(open.clone()), own.clone(), true).unwrap();
        assert_eq!(chosen.path, own);
        assert!(chosen.warning.is_some_and(|text| text.contains("can be written by all users")));
        assert_eq!(std::fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        assert_eq!(choose(Some(open.clone()), own.clone(), false).unwrap().warning, None);
        std::fs::set_permissions(&own, Permissions::from_mode(0o777)).unwrap();
        let refused = choose(Some(open), own.clone(), true).unwrap_err().to_string();
        assert!(refused.contains("no folder for built libraries that only this user can write to"), "{refused}");
        let fine = scratch.0.join("fine/inside");
        assert_eq!(choose(Some(fine.clone()), own, true).unwrap(), CacheFolder { path: fine, warning: None });
    }

    #[test]
    fn a_private_folder_replaces_a_missing_home_folder_and_one_that_cannot_be_created() {
        let scratch = Scratch::new("none");
        let own = scratch.0.join("own");
        let chosen = choose(None, own.clone(), true).unwrap();
        assert_eq!(chosen.path, own);
        assert!(chosen.warning.is_some_and(|text| text.contains("this user has no home folder")));
        let impossible = scratch.file("file", 0o600).join("inside");
        let chosen = choose(Some(impossible), own.clone(), true).unwrap();
        assert_eq!(chosen.path, own);
        assert!(chosen.warning.is_some_and(|text| text.contains("file/inside` cannot be created")));
    }

    #[test]
    fn a_private_folder_replaces_one_from_which_nothing_can_be_loaded() {
        // Uses one of the file systems that every Linux has, if it is mounted `noexec` and root can write to it.
        let none = ["/dev/mqueue", "/sys/fs/cgroup", "/proc"].map(Path::new).into_iter().find(|path| {
            rustix::fs::statvfs(*path).is_ok_and(|system| system.f_flag.contains(StatVfsMountFlags::NOEXEC))
        });
        let Some(none) = none else { return };
        assert!(unusable(none).is_some_and(|why| why.contains("noexec") || why.contains("can be written by")));
    }

    #[test]
    fn a_folder_may_be_in_the_home_folder() {
        let home = || Some(PathBuf::from("/home/ada"));
        assert_eq!(in_home("~/.cache/opensmd", home()), Some("/home/ada/.cache/opensmd".into()));
        assert_eq!(in_home("~", home()), Some("/home/ada".into()));
        assert_eq!(in_home("/var/~/cache", home()), Some("/var/~/cache".into()));
        assert_eq!(in_home("cache", None), Some("cache".into()));
        assert_eq!(in_home("~/cache", None), None);
    }
}
