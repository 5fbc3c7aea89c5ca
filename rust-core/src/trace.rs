//! Timeline and counters. (Owner fills this in.)
