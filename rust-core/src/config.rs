//! Every knob, once: name, spellings, default, unit and meaning. The environment reference in `docs/environment.md`
//! is generated from this list.

use std::time::Duration;

use crate::error::{Error, Result};

/// One setting that is read from the environment.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// The variable that is read first.
    pub name: &'static str,
    /// Other spellings, tried in order.
    pub aliases: &'static [&'static str],
    /// What holds when none is set, as text.
    pub default: &'static str,
    /// What it does, with its unit.
    pub doc: &'static str,
}

macro_rules! knobs {
    ($($ident:ident = $name:literal, [$($alias:literal),*], $default:literal, $doc:literal;)*) => {
        $(#[doc = $doc] pub const $ident: Knob = Knob { name: $name, aliases: &[$($alias),*], default: $default, doc: $doc };)*
        /// Every knob, in the order of the reference.
        pub const ALL: &[Knob] = &[$($ident),*];
    };
}

knobs! {
    TIMEOUT_SECONDS = "SMD_TIMEOUT_SECONDS", [], "1800",
        "Longest wait of a collective for its peers, in seconds; then an error names the missing ranks.";
    INIT_TIMEOUT_SECONDS = "SMD_INIT_TIMEOUT_SECONDS", [], "300",
        "Longest wait of `init()` for the other ranks, in seconds.";
    PEER_TIMEOUT_SECONDS = "SMD_PEER_TIMEOUT_SECONDS", [], "10",
        "Silence of a host, in seconds, after which its ranks count as dead. A process that dies is noticed at once; this is for hosts and links.";
    SECRET = "SMD_SECRET", [], "",
        "Secret that the members of a job share; `smdrun` makes a new one for each job. Without it a key is derived from the launcher's variables.";
    RENDEZVOUS = "SMD_RENDEZVOUS", [], "",
        "`host:port` of a rendezvous that the launcher serves. Without it rank 0 serves one.";
    TIMELINE = "SMD_TIMELINE", ["HOROVOD_TIMELINE"], "",
        "Path of a Chrome trace to write; Perfetto opens it.";
    LOG = "SMD_LOG", ["HOROVOD_LOG_LEVEL"], "warn",
        "What to log on standard error: error, warn, info, debug or trace.";
    CACHE_DIR = "SMD_CACHE_DIR", [], "~/.cache/opensmd",
        "Where shims that were built for the installed frameworks are kept.";
}

impl Knob {
    /// The text in the environment, if one of the spellings is set and not empty.
    pub fn text(&self) -> Option<String> {
        std::iter::once(self.name)
            .chain(self.aliases.iter().copied())
            .find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// The value as a duration in seconds; fractions are allowed.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is not a positive number.
    pub fn seconds(&self) -> Result<Duration> {
        let text = self.text().unwrap_or_else(|| self.default.to_owned());
        match text.parse::<f64>() {
            Ok(seconds) if seconds > 0.0 && seconds < 1e9 => Ok(Duration::from_secs_f64(seconds)),
            _ => Err(Error::Config(format!("`{}` is `{text}`: expected a positive number of seconds", self.name))),
        }
    }
}
