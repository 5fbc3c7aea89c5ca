//! Planned gradient reduction.
