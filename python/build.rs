//! Names the library, so that a shim linked to it finds the copy that Python has already loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,_core.abi3.so");
    println!("cargo:rerun-if-changed=build.rs");
}
