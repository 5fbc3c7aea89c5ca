//! The wrappers of every call of C++ into the core (BRG-2): [`guard`], or [`guard_or`] where C++ cannot take an error.
//! A test reads the bridge and fails on a function that begins with neither.

use std::panic::{AssertUnwindSafe, catch_unwind};

use smd_core::{Error, Result};

/// The type of the exception in C++; it carries the error's report unchanged.
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

/// As [`guard`], for a function that C++ calls where nothing may be thrown, such as a destructor or an allocator. The
/// log has a panic's message, and the caller gets `otherwise`.
pub fn guard_or<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    guard(|| Ok(body())).unwrap_or_else(|report| {
        tracing::error!("{report}");
        otherwise
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions that C++ calls: each `fn` in an `extern "Rust"` block of the bridge, with its type if it is a
    /// method.
    fn exported() -> Vec<(Option<String>, String)> {
        let mut functions = Vec::new();
        let mut inside = false;
        for line in include_str!("bridge.rs").lines() {
            match line {
                "    extern \"Rust\" {" => inside = true,
                "    }" => inside = false,
                _ => {}
            }
            let line = line.trim();
            let declared = line.strip_prefix("unsafe ").unwrap_or(line).strip_prefix("fn ");
            if let Some((name, rest)) = declared.filter(|_| inside).and_then(|line| line.split_once('(')) {
                let receiver = rest.strip_prefix("self: &").map(|rest| rest.trim_start_matches("mut "));
                let of = |rest: &str| rest.split([',', ')']).next().unwrap_or_default().to_owned();
                // A long parameter list begins on the next line; `arrive` is the only method among these functions.
                let owner = receiver.map(of).or_else(|| (name == "arrive").then(|| "GradientPlan".to_owned()));
                functions.push((owner, name.to_owned()));
            }
        }
        functions
    }

    /// The first statement of the body of `function`, in the text of a source.
    fn body<'a>(source: &'a str, owner: Option<&str>, function: &str) -> Option<&'a str> {
        let scope = match owner {
            Some(owner) => {
                let start = source.find(&format!("\nimpl {owner} {{\n"))?;
                let rest = &source[start..];
                &rest[..rest.find("\n}\n").unwrap_or(rest.len())]
            }
            None => source,
        };
        let indent = if owner.is_some() { "    " } else { "" };
        let heads = [format!("\n{indent}pub fn {function}("), format!("\n{indent}pub unsafe fn {function}(")];
        let head = heads.iter().find_map(|head| scope.find(head))?;
        let open = head + scope[head..].find("{\n")? + 1;
        scope[open..].lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("//"))
    }

    #[test]
    fn every_function_of_the_bridge_is_guarded() {
        let sources = [
            include_str!("step_scope.rs"),
            include_str!("calls.rs"),
            include_str!("chunk_trial.rs"),
            include_str!("membership.rs"),
            include_str!("plan.rs"),
            include_str!("reducer.rs"),
        ];
        let functions = exported();
        assert!(functions.len() > 75, "the bridge's text is not understood: {functions:?}");
        let bare = functions.iter().filter(|(owner, name)| {
            let bodies: Vec<_> = sources.iter().filter_map(|source| body(source, owner.as_deref(), name)).collect();
            assert!(bodies.len() == 1, "{owner:?} {name}: {bodies:?}");
            !bodies[0].starts_with("guard(") && !bodies[0].starts_with("guard_or(")
        });
        assert_eq!(bare.collect::<Vec<_>>(), Vec::<&(Option<String>, String)>::new());
    }

    #[test]
    fn where_nothing_may_be_thrown_a_panic_gives_the_other_value() {
        assert_eq!(guard_or(7, || panic!("no")), 7);
        assert_eq!(guard_or(7, || 8), 8);
    }

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
