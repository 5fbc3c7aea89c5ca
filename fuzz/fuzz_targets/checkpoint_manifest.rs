//! What stands in a checkpoint's manifest, whoever wrote it: parsed without a panic, and what is accepted is written and
//! read as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use smd_core::checkpoint::Manifest;

fuzz_target!(|bytes: &[u8]| {
    let _ = Manifest::parse(bytes);
    // A checksum that fits, so that what lies behind it is reached as well.
    if let Ok(manifest) = serde_json::from_slice::<Manifest>(bytes)
        && manifest.check().is_ok()
    {
        let again = Manifest::parse(manifest.to_text().as_bytes()).expect("what was written is read");
        assert_eq!(again, manifest);
    }
});
