//! Parses arbitrary bytes as a checkpoint's manifest. Parsing must not panic, and a manifest that is accepted must be equal
//! after it is written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use smd_core::checkpoint::Manifest;

fuzz_target!(|bytes: &[u8]| {
    let _ = Manifest::parse(bytes);
    // Parsed without the checksum, so that the fuzzer also reaches the checks after it.
    if let Ok(manifest) = serde_json::from_slice::<Manifest>(bytes)
        && manifest.check().is_ok()
    {
        let again = Manifest::parse(manifest.to_text().as_bytes()).expect("a written manifest can be read");
        assert_eq!(again, manifest);
    }
});
