//! Bodies of the bridge's section on steps of a pipeline.

use smd_core::session::attempt;

use crate::guard::{Report, guard};

/// A step that has begun.
pub struct Attempt(attempt::Attempt);

pub fn begin_step() -> Result<Box<Attempt>, Report> {
    guard(|| Ok(Box::new(Attempt(attempt::Attempt::begin()?))))
}

impl Attempt {
    pub fn end(&self) {
        self.say(attempt::Attempt::end);
    }

    pub fn fail(&self) {
        self.say(attempt::Attempt::fail);
    }

    fn say(&self, what: fn(&attempt::Attempt)) {
        // Called where nobody can be told of an error.
        let _ = guard(|| {
            what(&self.0);
            Ok(())
        });
    }
}
