//! The command line of `smdrun`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;

use crate::error::{Error, Result};

/// Starts N processes of a training script on this host, as the ranks of one job.
#[derive(Debug, Parser)]
#[command(
    name = "smdrun",
    version,
    override_usage = "smdrun -n N [OPTIONS] SCRIPT.py [ARGS]...\n       smdrun -n N [OPTIONS] -m MODULE [ARGS]...\n       \
                      smdrun doctor\n       smdrun plan -p N -m N [OPTIONS]\n       smdrun checkpoint inspect|verify|merge DIR\n       smdrun report TRACE\n       smdrun top [PID]",
    after_help = "`smdrun doctor` checks this machine and suggests remedies; `smdrun plan` shows the schedule of a pipeline;\n\
                  `smdrun report` shows a step of a timeline; `smdrun checkpoint` inspects checkpoints;\n\
                  `smdrun top` shows what running ranks do.\n\
                  Each rank gets the environment that torchrun sets. Ctrl-C goes to all ranks; a second one ends them.\n\
                  The exit code is that of the rank that failed first, 128 + signal if a signal ended it."
)]
pub(super) struct LauncherArgs {
    /// Processes to start; default: the number in `--hosts` or in `mpi.processes_per_host` of the configuration,
    /// or with a configuration one for each GPU
    #[arg(short = 'n', long = "num-processes", visible_alias = "nproc-per-node", value_name = "N", value_parser = num_processes)]
    pub num_processes: Option<usize>,

    /// The `distribution` dictionary of an estimator, as a JSON or YAML file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Sets a variable in the environment of every rank, overriding all other settings. May be repeated
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,

    /// Grace period in which ranks may end by themselves after a rank failed or Ctrl-C was pressed
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub grace: Duration,

    /// Also writes what each rank prints to DIR/rank.RANK/stdout and DIR/rank.RANK/stderr
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,

    /// Prints a summary at the end: steps, time in communication, exposed time, stalls, and the slowest rank
    #[arg(long)]
    pub summary: bool,

    /// Prefixes lines with `[RANK]<stdout>:`, as `horovodrun` does
    #[arg(long, hide = true)]
    pub horovod: bool,

    /// Hosts and their numbers of ranks, such as `a:2,b:2`; default: this host. Other hosts are reached by `ssh`
    #[arg(long, value_name = "HOSTS", value_parser = super::elastic::hosts)]
    pub hosts: Option<super::elastic::HostList>,

    /// Port of `ssh` on the other hosts
    #[arg(long, value_name = "PORT")]
    pub ssh_port: Option<u16>,

    /// Key for `ssh`
    #[arg(long, value_name = "FILE")]
    pub ssh_identity_file: Option<PathBuf>,

    /// With `--horovod`: prefixes lines with the time
    #[arg(long, hide = true)]
    pub prefix_timestamp: bool,

    /// File for the rank that failed first, and its exit code
    #[arg(long, hide = true)]
    pub reason_file: Option<PathBuf>,

    /// Runs a module, as `python -m` does, instead of a script
    #[arg(short = 'm', long)]
    pub module: bool,

    /// Runs an executable that is not Python
    #[arg(long, conflicts_with = "module")]
    pub no_python: bool,

    /// The script, module or executable, and its arguments
    #[arg(value_name = "SCRIPT [ARGS]", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<OsString>,
}

/// Reads the command line; the error is also what `--help` and `--version` print.
pub(super) fn parse(argv: Vec<OsString>) -> std::result::Result<LauncherArgs, clap::Error> {
    LauncherArgs::try_parse_from(argv)
}

impl LauncherArgs {
    /// The command of every rank.
    ///
    /// # Errors
    /// [`Error::Config`] if the script does not exist; checked here, so that not every rank reports it.
    pub fn command(&self, python: &Path) -> Result<Vec<OsString>> {
        let mut command: Vec<OsString> = Vec::new();
        if !self.no_python {
            // Unbuffered, as torchrun does: what a rank printed before it was killed is worth most.
            command.extend([python.as_os_str().to_owned(), "-u".into()]);
            if self.module {
                command.push("-m".into());
            } else if !is_script(self.script()) {
                return Err(Error::Config(self.missing_script()));
            }
        }
        command.extend(self.program.iter().cloned());
        Ok(command)
    }

    fn script(&self) -> &Path {
        Path::new(self.program.first().expect("clap requires one word"))
    }

    fn missing_script(&self) -> String {
        let script = self.script().display().to_string();
        let mut text = format!("there is no script `{script}`");
        if script.rsplit('/').next().is_some_and(|name| name.starts_with("python")) {
            text.push_str("; each rank is started with this Python: leave the word out, or pass --no-python");
        }
        text
    }

    /// The arguments of the script or module.
    pub fn arguments(&self) -> Vec<String> {
        self.program.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect()
    }

    /// The folder of the script, if it is one.
    pub fn script_dir(&self) -> Option<PathBuf> {
        if self.module || self.no_python {
            return None;
        }
        let script = std::path::absolute(self.script()).ok()?;
        script.parent().map(Path::to_owned)
    }
}

/// Whether Python runs `path` as a script: any file, or a folder with a `__main__.py`.
fn is_script(path: &Path) -> bool {
    if path.is_dir() { path.join("__main__.py").exists() } else { path.exists() }
}

/// Maximum number of processes of one job.
pub(super) const MAX_PROCESSES: usize = 4096;

fn num_processes(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=MAX_PROCESSES) => Ok(n),
        _ => Err(format!("expected a number from 1 to {MAX_PROCESSES}")),
    }
}

fn variable(text: &str) -> std::result::Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("expected NAME=VALUE".into()),
    }
}

pub(super) fn seconds(text: &str) -> std::result::Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds from 0 to 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> LauncherArgs {
        parse(line.split(' ').map(OsString::from).collect()).expect("the line is valid")
    }

    #[test]
    fn options_after_the_script_belong_to_it() {
        let args = parsed("smdrun -n 2 --env A=1 --env B=x=y -m pkg.train --env -n 7 -- z");
        assert_eq!(args.num_processes, Some(2));
        assert_eq!(args.env, [("A".into(), "1".into()), ("B".into(), "x=y".into())]);
        let command = args.command(Path::new("/py")).expect("a module is not looked for");
        assert_eq!(command, ["/py", "-u", "-m", "pkg.train", "--env", "-n", "7", "--", "z"]);
    }

    #[test]
    fn an_executable_runs_as_it_is() {
        let command = parsed("smdrun --nproc-per-node 2 --no-python ls -l").command(Path::new("/py")).expect("valid");
        assert_eq!(command, ["ls", "-l"]);
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in [
            "smdrun",
            "smdrun -n 0 a.py",
            "smdrun -n x a.py",
            "smdrun -n 5000 a.py",
            "smdrun --hosts a:0 a.py",
            "smdrun --hosts a:2,b:0 a.py",
            "smdrun -n 1 --env A a.py",
            "smdrun -n 1 --env =3 a.py",
            "smdrun -n 1 --grace -1 a.py",
            "smdrun -n 1 --grace nan a.py",
            "smdrun -n 1 -m --no-python a",
        ] {
            assert!(parse(line.split(' ').map(OsString::from).collect()).is_err(), "{line}");
        }
    }

    #[test]
    fn a_missing_script_is_named() {
        let error = parsed("smdrun -n 1 no/such.py").command(Path::new("/py")).unwrap_err();
        assert_eq!(error.to_string(), "there is no script `no/such.py`");
        // Also a folder of that name that Python could not run.
        let folder = std::env::temp_dir().join(format!("smd-args-{}", std::process::id()));
        let path = folder.join("python3");
        std::fs::create_dir_all(&path).expect("the folder is writable");
        let line = format!("smdrun -n 1 {} train.py", path.display());
        let text = parsed(&line).command(Path::new("/py")).unwrap_err().to_string();
        assert!(
            text.ends_with("python3`; each rank is started with this Python: leave the word out, or pass --no-python")
        );
        std::fs::write(path.join("__main__.py"), "").expect("the folder is writable");
        assert!(parsed(&line).command(Path::new("/py")).is_ok());
        std::fs::remove_dir_all(&folder).expect("the folder is there");
    }
}
