"""Builds what a release consists of, in `dist/`, and checks it; nothing is uploaded. Run by `make release`.

- The wheel runs on glibc 2.28 and newer. It contains the operator libraries in `python/smdistributed/_prebuilt`, which
  `make matrix ARGS=--prebuilt` puts there, the notices of the crates (`notices.py`), and maturin's list of them
  (CycloneDX).
- The source distribution needs Rust and a C++ compiler.

With `--add-prebuilt`, the wheel in `dist/` gets the operator libraries that have been built since, and nothing is
compiled: what `make matrix ARGS='--prebuilt --wheel dist/...'` has tested is what is released.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
DIST = ROOT / "dist"
PREBUILT = ROOT / "python/smdistributed/_prebuilt"
#: What manylinux_2_28 has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
MOST_BYTES = 60 << 20


def run(*command: object, **variables: str) -> None:
    """Runs a command of the release; programs that are installed beside this Python come first."""
    print("+", *command, flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | {"PATH": path} | variables, check=True)


def build() -> tuple[Path, Path]:
    """Builds the wheel and the source distribution; returns their files."""
    with tempfile.TemporaryDirectory(prefix="smd-release-") as scratch:
        names = Path(scratch) / "names.o"
        run("c++", "-O2", "-fPIC", "-x", "c++", "-c", HERE / "old_glibc.h", "-o", names)
        linker = [f"-Clinker={HERE / 'zig-linker.sh'}", f"-Clink-arg={names}"]
        maturin = [sys.executable, "-m", "maturin"]
        options = ["--release", "--locked", "--compatibility", "manylinux_2_28", "--out", scratch]
        run(*maturin, "build", *options, "--", *linker, PYTHON=sys.executable)
        run(*maturin, "sdist", "--out", scratch)
        DIST.mkdir(exist_ok=True)
        (wheel,), (archive,) = Path(scratch).glob("*.whl"), Path(scratch).glob("*.tar.gz")
        wheel, archive = (Path(shutil.move(file, DIST / file.name)) for file in (wheel, archive))
        return wheel, archive


def add_prebuilt() -> tuple[Path, Path]:
    """Puts the operator libraries of the checkout in place of those in the wheel; returns the files of the release."""
    (wheel,), (archive,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="smd-release-") as scratch:
        run(sys.executable, "-m", "wheel", "unpack", wheel, "--dest", scratch)
        (content,) = Path(scratch).iterdir()
        folder = content / "smdistributed/_prebuilt"
        shutil.rmtree(folder, ignore_errors=True)
        for library in PREBUILT.glob("*/*.so"):
            (folder / library.parent.name).mkdir(parents=True)
            shutil.copy2(library, folder / library.parent.name)
        run(sys.executable, "-m", "wheel", "pack", content, "--dest-dir", DIST)
    return wheel, archive


def problems(wheel: Path) -> Iterator[str]:
    """What is wrong with a wheel."""
    if wheel.stat().st_size > MOST_BYTES:
        yield f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}"
    with zipfile.ZipFile(wheel) as file, tempfile.TemporaryDirectory() as folder:
        names = file.namelist()
        for part in ("LICENSE", "THIRD_PARTY_NOTICES.txt"):
            if not any(re.search(rf"\.dist-info/licenses/{re.escape(part)}$", name) for name in names):
                yield f"{wheel.name} has no {part}"
        if not any(name.endswith(".cyclonedx.json") for name in names):
            yield f"{wheel.name} has no list of its crates"
        file.extractall(folder)
        for name in names:
            if name.endswith(".so"):
                for symbol in too_new(Path(folder) / name):
                    yield f"{name} asks for {symbol}"
        yield from stale(Path(folder))


def stale(package: Path) -> Iterator[str]:
    """Prebuilt libraries that no user would get, since the core in the folder `package` has other sources of them."""
    command = [sys.executable, "-m", "smdistributed._common.shims", "--sources"]
    known = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(package)}, capture_output=True, text=True, check=True
    ).stdout.split()
    for folder in sorted({library.parent for library in PREBUILT.glob("*/*.so")}):
        file = folder / "sources"
        # What a build that was cut off left, or a copy of the library alone.
        if not file.is_file():
            yield f"{folder.name} does not say its sources: remove the folder, and build it by `make matrix`"
        elif file.read_text() not in known:
            yield f"{folder.name} is of other sources: remove the folder, and build it by `make matrix`"


def too_new(library: Path) -> list[str]:
    """Symbols of a library that manylinux_2_28 does not have, as `name (version)`."""
    listed = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)\s+(\S+)", listed)
    return [
        f"{symbol} ({kind}_{version})"
        for kind, version, symbol in found
        if tuple(map(int, version.split("."))) > NEWEST[kind]
    ]


def digest(file: Path) -> str:
    """Of a file, as indexes of packages state it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> int:
    """Builds and checks; the exit code is 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--add-prebuilt", action="store_true", help="add libraries to what is in dist/; compile nothing"
    )
    options = parser.parse_args()
    run(sys.executable, HERE / "notices.py", "--check")
    # Not the database of advisories, which is on the network.
    run("cargo-deny", "--locked", "--config", HERE / "deny.toml", "check", "licenses", "bans", "sources")
    files = add_prebuilt() if options.add_prebuilt else build()
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    found = list(problems(files[0]))
    version = files[1].name.removesuffix(".tar.gz").split("-")[1]
    if f"\n## {version}" not in (ROOT / "CHANGELOG.md").read_text():
        print(f"CHANGELOG.md has no section `{version}` yet: what is under `Unreleased` goes there")
    with zipfile.ZipFile(files[0]) as wheel:
        libraries = [name.split("/")[-2] for name in wheel.namelist() if "/_prebuilt/" in name]
    print("prebuilt:", ", ".join(sorted(libraries)) or "nothing: each user needs a compiler")
    for file in files:
        print(f"{digest(file)}  {file.relative_to(ROOT)}  {file.stat().st_size / 1e6:.1f} MB")
    print("\n".join(found) or "the wheel is fit for manylinux_2_28")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
