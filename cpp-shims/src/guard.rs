//! The door through which every call of C++ enters the core (BRG-2).

use std::panic::{AssertUnwindSafe, catch_unwind};

use smd_core::{Error, Result};

/// What cxx throws on the other side: the error's report, unchanged.
#[derive(Debug)]
pub struct Report(String);

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Report {
    fn from(error: Error) -> Self {
        Report(error.report())
    }
}

/// Runs `body`; a panic becomes [`Error::Internal`] with the panic's message.
pub fn guard<T>(body: impl FnOnce() -> Result<T>) -> Result<T, Report> {
    // Unwind safety: what the core shares between calls is behind locks that do not poison, or is atomic; a
    // half-done operation leaves its group closed, not inconsistent.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Error::from_panic(&*panic))).map_err(Report::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        let report = guard::<()>(|| panic!("the {} broke", "invariant")).unwrap_err();
        assert!(report.to_string().starts_with("internal error: the invariant broke"), "{report}");
        assert!(report.to_string().ends_with("[smd:internal]"), "{report}");
    }

    #[test]
    fn an_error_keeps_its_text_and_code() {
        let report = guard::<()>(|| Err(Error::InvalidArgument("root 7 of 2 ranks".into()))).unwrap_err();
        assert_eq!(report.to_string(), "root 7 of 2 ranks [smd:invalid_argument]");
    }
}
