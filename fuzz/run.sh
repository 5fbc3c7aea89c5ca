#!/bin/sh
# Fuzzes a target for some seconds with the stable toolchain: fuzz/run.sh [target] [seconds]
# cargo-fuzz does the same with nightly, and adds the address sanitizer: cargo +nightly fuzz run control_messages
set -eu
cd "$(dirname "$0")"
target=${1:-control_messages}
seconds=${2:-600}
# Coverage that libFuzzer steers by; these flags are LLVM's own, so stable rustc takes them. Given a target triple,
# cargo leaves build scripts alone.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 \
-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
triple=$(rustc -vV | sed -n 's/^host: //p')
cargo build --quiet --release --target "$triple" --bin "$target"
mkdir -p "corpus/$target" "artifacts/$target"
exec "target/$triple/release/$target" "corpus/$target" -max_total_time="$seconds" -max_len=4096 -rss_limit_mb=2048 \
    -artifact_prefix="artifacts/$target/" -print_final_stats=1
