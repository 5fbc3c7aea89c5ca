#!/bin/sh
# Runs tests of the core under a checker: tests/sanitizers.sh asan|tsan|miri [filter of tests]
#
# Ranks of these tests are threads, so a checker sees both sides of what they share. What the toolchain lacks is said, and
# another tool takes its place where there is one; docs/contributing/checkers.md says what each one finds.
set -eu
cd "$(dirname "$0")/.."
checker=${1:?asan, tsan or miri}
toolchain=${SMD_NIGHTLY:-nightly}
triple=$(rustc -vV | sed -n 's/^host: //p')
# Messages and collectives over shared memory and TCP, what is cancelled, panics, the store and the buckets.
default='collectives::tests::shm transport:: world::store reducer::tests'
filter=${2:-$default}

suppressions=$PWD/tests/tsan.supp

say() { echo "sanitizers: $*" >&2; }

has_nightly() { rustc "+$toolchain" --version >/dev/null 2>&1; }

# Runs the tests of a build for a checker, one process for all tests of a filter.
sanitized() {
    # std is not built anew: that takes the component rust-src. Its own accesses are not checked then.
    if [ -d "$(rustc "+$toolchain" --print sysroot)/lib/rustlib/src/rust/library" ]; then
        std="-Zbuild-std"
    else
        std=""
        say "the component rust-src is missing: the standard library is not instrumented"
        say "(rustup component add --toolchain $toolchain rust-src)"
        suppressions=$PWD/tests/tsan_std.supp
    fi
    export TSAN_OPTIONS="suppressions=$suppressions:halt_on_error=0:exitcode=66:${TSAN_OPTIONS:-}"
    # shellcheck disable=SC2086  # a list of words
    CARGO_INCREMENTAL=0 RUSTFLAGS="-Zsanitizer=$1 -Cunsafe-allow-abi-mismatch=sanitizer" \
        CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitizers-$1" \
        cargo "+$toolchain" test --locked $std --target "$triple" -p smd-core --lib -- --test-threads=1 $filter
}

# Runs the ordinary build of the tests under valgrind's memcheck, some hundred times slower. So the default is a few tests.
under_memcheck() {
    command -v valgrind >/dev/null || { say "valgrind is missing, too (Debian: valgrind): nothing was run"; exit 2; }
    tests=$(cargo test --locked --no-run -p smd-core --lib 2>&1 | sed -n 's/.*(\(.*\)).*/\1/p' | tail -1)
    # shellcheck disable=SC2086  # a list of words
    (cd rust-core && PROPTEST_CASES=8 exec valgrind --tool=memcheck --error-exitcode=9 --quiet "$tests" --test-threads=1 \
        ${1:-transport::shm transport::mailbox collectives::tests::shm::windows collectives::tests::shm::a_message})
}

case $checker in
asan)
    if has_nightly; then
        # Threads that wait for the process's end keep what they have.
        export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
        sanitized address
    else
        say "no toolchain \`$toolchain\`: memcheck of valgrind takes the place of AddressSanitizer"
        under_memcheck "${2:-}"
    fi
    ;;
tsan)
    if has_nightly; then
        sanitized thread
    else
        # helgrind knows no atomics: it reports every lock-free access of the core and of the standard library.
        say "no toolchain \`$toolchain\`, and valgrind has no substitute: rustup toolchain install nightly"
        say "nothing was run"
        exit 2
    fi
    ;;
miri)
    if ! cargo "+$toolchain" miri --version >/dev/null 2>&1; then
        say "the component miri is missing: rustup component add --toolchain $toolchain miri rust-src"
        say "nothing was run"
        exit 2
    fi
    # What needs no system call that Miri lacks: no shared memory, no sockets, no CUDA.
    export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks"
    # shellcheck disable=SC2086  # a list of words
    cargo "+$toolchain" miri test --locked -p smd-core --lib -- \
        ${2:-transport::mailbox transport::shm::layout buffer error negotiation::bits pipeline::operations partition}
    ;;
*)
    say "unknown checker \`$checker\`"
    exit 2
    ;;
esac
