#!/bin/sh
# Runs the matrix with a Python that this system lacks, from another release of Debian: debootstrap makes a root of it in
# build/, once, and a namespace of mounts shows it this checkout. The root has no compiler, so versions need libraries in
# the wheel. Needs root and the package debootstrap.
#
# Usage: debian.sh RELEASE PYTHON [arguments of matrix.py], such as
#     debian.sh forky python3.14 --wheel dist/opensmd-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl --only torch==2.15
set -eu
cd "$(dirname "$0")/../.."
release=$1 python=$2
shift 2
root=$PWD/build/debian-$release

if [ ! -d "$root" ]; then
    # It has a script for every release: they are all like that of sid.
    debootstrap --variant=minbase --include="$python,$python-venv,ca-certificates,procps" \
        "$release" "$root.part" http://deb.debian.org/debian sid
    mv "$root.part" "$root"
fi

# The mounts end with the command. Names and certificates of the network are this system's.
exec unshare --mount sh -euc '
    root=$1
    shift
    mount --rbind /dev "$root/dev"
    mount -t proc proc "$root/proc"
    mkdir -p "$root$PWD"
    mount --bind "$PWD" "$root$PWD"
    for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt; do
        touch "$root$file"
        mount --bind "$file" "$root$file"
    done
    exec chroot "$root" sh -euc '\''cd "$1"; shift; exec "$@"'\'' - "$PWD" "$@"
' - "$root" env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH="$PWD/python" \
    "$python" tests/matrix/matrix.py "$@"
