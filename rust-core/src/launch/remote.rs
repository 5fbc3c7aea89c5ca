//! Ranks on other hosts, through `ssh`.
//!
//! - SSH-1: the environment of a rank, including the job's secret, is sent over `ssh`'s standard input. Command
//!   lines, which other users of both hosts can see, contain only the host and `sh`. Variables whose names a shell
//!   does not accept, such as `SM_HP_BATCH-SIZE`, are visible on the other host for a moment, as arguments of `env`.
//! - SSH-2: a rank ends when `ssh` does, in whatever way: the shell that started the rank then reads the end of its
//!   input.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;

use super::training::{FOLDERS, REMOTE_PLACEHOLDERS};
use crate::error::{Error, Result};
use crate::world::host;

/// Options for connecting to other hosts.
#[derive(Clone, Debug, Default)]
pub(super) struct Ssh {
    pub port: Option<u16>,
    pub identity: Option<PathBuf>,
}

/// Variables that describe this host or this shell and are not passed on.
const HOST_VARIABLES: [&str; 9] = [
    "OLDPWD",
    "_HOROVOD_SECRET_KEY",
    "SSH_AUTH_SOCK",
    "SSH_CONNECTION",
    // bash, which `sh` may be, exits when a script sets these.
    "UID",
    "EUID",
    "PPID",
    "SHELLOPTS",
    "BASHOPTS",
];

/// Whether `name` is a name or an address of this host.
pub(super) fn is_here(name: &str) -> bool {
    if name == "localhost" || name == host::name() {
        return true;
    }
    // Binding succeeds only with an address of this host.
    (name, 0).to_socket_addrs().is_ok_and(|mut addresses| addresses.any(|address| TcpListener::bind(address).is_ok()))
}

/// The address of this host from which `other` can be reached.
///
/// # Errors
/// [`Error::Io`] if the name has no address, or there is no route.
pub(super) fn address_towards(other: &str) -> Result<IpAddr> {
    let find = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        // No packet is sent: connecting a UDP socket only makes the system choose a route.
        socket.connect((other, 22))?;
        Ok::<_, std::io::Error>(socket.local_addr()?.ip())
    };
    find().map_err(|error| Error::io(format!("looking for a way to host `{other}`"), error))
}

impl Ssh {
    /// The command that starts a program on `host`, and the text for its standard input.
    pub fn wrap(
        &self,
        host: &str,
        command: &[OsString],
        variables: &BTreeMap<OsString, OsString>,
    ) -> (Vec<OsString>, Vec<u8>) {
        let mut ssh: Vec<OsString> = vec!["ssh".into()];
        // Without `ServerAliveInterval`, ssh notices a host that is cut off after hours.
        for option in [
            "PasswordAuthentication=no",
            "StrictHostKeyChecking=no",
            "ConnectTimeout=10",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
        ] {
            ssh.extend(["-o".into(), option.into()]);
        }
        if let Some(port) = self.port {
            ssh.extend(["-p".into(), port.to_string().into()]);
        }
        if let Some(identity) = &self.identity {
            ssh.extend(["-i".into(), identity.into()]);
        }
        ssh.extend([host.into(), "exec".into(), "sh".into()]);
        (ssh, script(command, variables))
    }
}

/// The script that the shell on the other host reads.
fn script(command: &[OsString], variables: &BTreeMap<OsString, OsString>) -> Vec<u8> {
    let mut script = COUNTS.as_bytes().to_vec();
    let mut unnameable = Vec::new();
    for (name, value) in variables.iter().filter(|(name, _)| !is_local(&name.to_string_lossy())) {
        let Some(text) = name.to_str().filter(|text| is_name(text)) else {
            let pair = [name.as_os_str(), value.as_os_str()].join(OsStr::new("="));
            unnameable.push(b' ');
            unnameable.extend(filled(quote(&pair)));
            continue;
        };
        script.extend_from_slice(format!("export {text}=").as_bytes());
        script.extend(filled(quote(value)));
        script.push(b'\n');
    }
    if let Ok(folder) = std::env::current_dir() {
        script.extend_from_slice(b"cd ");
        script.extend(quote(folder.as_os_str()));
        script.extend_from_slice(b" || exit 127\n");
    }
    for name in FOLDERS {
        // If the folder does not exist, the training script reports that better.
        script.extend_from_slice(format!("[ -z \"${name}\" ] || mkdir -p \"${name}\" 2>/dev/null\n").as_bytes());
    }
    // The rank leads a process group of its own, which the shell ends when its input ends (SSH-2).
    script.extend_from_slice(b"exec 3<&0\nsetsid");
    if !unnameable.is_empty() {
        script.extend_from_slice(b" env");
        script.extend(unnameable);
    }
    for word in command {
        script.push(b' ');
        script.extend(quote(word));
    }
    script.extend_from_slice(
        b" </dev/null 3<&- & rank=$!\n\
          { cat >/dev/null; kill -TERM -$rank; sleep 5; kill -KILL -$rank; } <&3 >/dev/null 2>&1 & watch=$!\n\
          exec 3<&-\nwait $rank; code=$?; kill $watch 2>/dev/null; exit $code\n",
    );
    script
}

/// Whether a variable belongs to the launcher's host and is not sent to another one.
fn is_local(name: &str) -> bool {
    name.is_empty()
        || name.starts_with("BASH_FUNC_")
        || name.ends_with("CUDA_VISIBLE_DEVICES")
        || HOST_VARIABLES.contains(&name)
}

/// Whether a shell accepts a variable of this name.
fn is_name(name: &str) -> bool {
    let mut letters = name.chars();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
}

/// Variables that describe the rank's host ([`REMOTE_PLACEHOLDERS`]); `nproc` would obey `OMP_NUM_THREADS`.
const COUNTS: &str = "smd_cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)\n\
    smd_gpus=0\n\
    if [ -n \"${CUDA_VISIBLE_DEVICES+set}\" ]; then\n\
    for smd_id in $(echo \"$CUDA_VISIBLE_DEVICES\" | tr , ' '); do [ \"$smd_id\" = -1 ] && break; smd_gpus=$((smd_gpus + 1)); done\n\
    elif [ -d /proc/driver/nvidia/gpus ]; then smd_gpus=$(ls /proc/driver/nvidia/gpus | wc -l)\n\
    fi\n\
    smd_type=local\n\
    [ $smd_gpus = 0 ] || smd_type=local_gpu\n";

/// Quotes a word, with placeholders replaced by numbers that the shell has counted.
fn filled(quoted: Vec<u8>) -> Vec<u8> {
    // Placeholders occur only in variables that `smdrun` sets, which are valid UTF-8.
    let Ok(mut text) = String::from_utf8(quoted.clone()) else { return quoted };
    for (mark, counted) in [
        (REMOTE_PLACEHOLDERS.num_gpus, "gpus"),
        (REMOTE_PLACEHOLDERS.num_cpus, "cpus"),
        (REMOTE_PLACEHOLDERS.instance_type, "type"),
    ] {
        text = text.replace(mark, &format!("'\"$smd_{counted}\"'"));
    }
    text.into_bytes()
}

/// Quotes `word` for the shell.
fn quote(word: &OsStr) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        match byte {
            b'\'' => quoted.extend_from_slice(b"'\\''"),
            other => quoted.push(other),
        }
    }
    quoted.push(b'\'');
    quoted
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    fn run(command: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
        let command: Vec<OsString> = command.iter().map(Into::into).collect();
        let variables = variables.iter().map(|(name, value)| (name.into(), value.into())).collect();
        let mut shell = Command::new("sh").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = shell.stdin.take().unwrap();
        input.write_all(&script(&command, &variables)).unwrap();
        // The input stays open while the command runs.
        let output = shell.wait_with_output().unwrap();
        drop(input);
        output
    }

    #[test]
    fn a_command_gets_its_words_and_variables_as_they_are() {
        let value = "it's \"a\" $b\\\n`c`";
        let output =
            run(&["sh", "-c", "printf %s \"$SECRET|$1\"; exit 7", "name", value], &[("SECRET", value), ("1x", "")]);
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{value}|{value}"));
        assert_eq!(output.status.code(), Some(7));
    }

    #[test]
    fn variables_of_the_shell_itself_stay_here() {
        let names = ["UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS"];
        let output = run(&["echo", "runs"], &names.map(|name| (name, "0")));
        assert_eq!(output.stdout, b"runs\n");
        assert!(names.into_iter().all(is_local));
    }

    #[test]
    fn names_that_no_shell_has_get_there_too() {
        let variables = [("SM_HP_BATCH-SIZE", "6 4'"), ("a.b", "$x"), ("BASH_FUNC_f%%", "() { :; }"), ("1x", "")];
        let output = run(&["env"], &variables);
        let lines: Vec<&str> = str::from_utf8(&output.stdout).unwrap().lines().collect();
        for line in ["SM_HP_BATCH-SIZE=6 4'", "a.b=$x", "1x="] {
            assert!(lines.contains(&line), "{line} in {lines:?}");
        }
        assert!(!lines.iter().any(|line| line.starts_with("BASH_FUNC_")), "{lines:?}");
    }

    #[test]
    fn devices_are_counted_on_their_host() {
        let cpus = std::thread::available_parallelism().unwrap().to_string();
        let gpus = crate::launch::training::count_gpus().to_string();
        let kind = if gpus == "0" { "local" } else { "local_gpu" };
        let values = format!(
            "{}|{}|{}",
            REMOTE_PLACEHOLDERS.num_cpus, REMOTE_PLACEHOLDERS.num_gpus, REMOTE_PLACEHOLDERS.instance_type
        );
        let output = run(&["sh", "-c", "printf %s \"$VALUES\""], &[("VALUES", &values), ("OMP_NUM_THREADS", "1")]);
        assert_eq!(str::from_utf8(&output.stdout).unwrap(), format!("{cpus}|{gpus}|{kind}"));
    }

    #[test]
    fn the_command_line_contains_no_values() {
        let ssh = Ssh { port: Some(2222), identity: Some("/id".into()) };
        let variables = BTreeMap::from([("SMD_SECRET".into(), "very".into())]);
        let (words, script) = ssh.wrap("node-1", &["train".into()], &variables);
        let line = words.join(OsStr::new(" ")).into_string().unwrap();
        let options = "-o PasswordAuthentication=no -o StrictHostKeyChecking=no -o ConnectTimeout=10 \
                       -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -p 2222 -i /id";
        assert_eq!(line, format!("ssh {options} node-1 exec sh"));
        assert!(String::from_utf8(script).unwrap().contains("export SMD_SECRET='very'\n"));
    }

    #[test]
    fn names_and_addresses_of_this_host_are_here() {
        assert!(is_here("localhost") && is_here("127.0.0.1") && is_here("127.0.0.7") && is_here(&host::name()));
        assert!(!is_here("no-such-host.invalid") && !is_here("192.0.2.1"));
    }
}
