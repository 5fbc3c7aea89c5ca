//! The sizes of buckets that follow from a script's settings; shared by both frameworks.

use super::ReducerOptions;
use crate::error::{Error, Result};

const MIB: f64 = (1 << 20) as f64;
/// Collectives work on chunks of this size, so a bucket's size is a multiple of it.
const MULTIPLE_BYTES: usize = 128;
/// Larger than any memory, and exactly representable as a float.
const MAX_BYTES: f64 = (1u64 << 62) as f64;

/// The size in bytes of a bucket of `mib` MiB. The default is [`ReducerOptions::DEFAULT_BUCKET_BYTES`], or
/// [`ReducerOptions::DEFAULT_DEVICE_BUCKET_BYTES`] for gradients on a device.
///
/// # Errors
/// [`Error::InvalidArgument`] if it is not positive, or not a multiple of 128 bytes.
pub fn bucket_bytes(mib: Option<f64>, on_device: bool) -> Result<usize> {
    let Some(mib) = mib else {
        return Ok(if on_device {
            ReducerOptions::DEFAULT_DEVICE_BUCKET_BYTES
        } else {
            ReducerOptions::DEFAULT_BUCKET_BYTES
        });
    };
    let bytes = mib * MIB;
    // Also rejects NaN.
    if !(bytes > 0.0 && bytes < MAX_BYTES) {
        return Err(Error::InvalidArgument(format!("`bucket_cap_mb` is {mib:?}: expected a positive number of MiB")));
    }
    if bytes % MULTIPLE_BYTES as f64 != 0.0 {
        return Err(Error::InvalidArgument(format!(
            "`bucket_cap_mb` is {mib:?}, which is {bytes} bytes: expected a multiple of {MULTIPLE_BYTES} bytes"
        )));
    }
    Ok(bytes as usize)
}

/// The sizes of buckets of at most `cap_bytes`, as in [`ReducerOptions::bucket_bytes`]: the first one is small, so
/// that the reduction starts early.
pub fn bucket_sizes(cap_bytes: usize) -> Vec<usize> {
    vec![ReducerOptions::DEFAULT_FIRST_BUCKET_BYTES.min(cap_bytes), cap_bytes]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_multiples() {
        assert_eq!(bucket_bytes(None, false).unwrap(), 25 << 20);
        assert_eq!(bucket_bytes(None, true).unwrap(), 100 << 20);
        assert_eq!(bucket_bytes(Some(1.0), true).unwrap(), 1 << 20);
        assert_eq!(bucket_bytes(Some(256.0 / MIB), false).unwrap(), 256);
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 100.0 / MIB, 1.00001] {
            let text = bucket_bytes(Some(wrong), false).unwrap_err().to_string();
            assert!(text.starts_with("`bucket_cap_mb` is "), "{text}");
        }
    }

    #[test]
    fn the_first_bucket_is_small() {
        assert_eq!(bucket_sizes(25 << 20), [1 << 20, 25 << 20]);
        assert_eq!(bucket_sizes(4096), [4096, 4096]);
    }
}
