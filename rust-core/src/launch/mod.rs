//! `smdrun`.
