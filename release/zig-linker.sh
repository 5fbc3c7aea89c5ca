#!/bin/sh
# The linker of wheels: it knows the symbols of glibc 2.28 alone, whatever this machine has. Rust's `-C linker=`.
#
# The libraries of GCC are named by their paths, since zig would put its own libc++ and libunwind in their place, and
# exceptions would not be recognized on their way from a shim.
set -eu
for argument do
    shift
    case $argument in
    -lstdc++) argument=$(c++ -print-file-name=libstdc++.so.6) ;;
    -lgcc_s) argument=$(c++ -print-file-name=libgcc_s.so.1) ;;
    esac
    set -- "$@" "$argument"
done
exec "${PYTHON:-python3}" -m ziglang cc -target x86_64-linux-gnu.2.28 "$@"
