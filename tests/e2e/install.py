"""Installs the source distribution into a virtual environment of its own and checks the result; `make test-install`
runs it.

Neither PyTorch nor TensorFlow is installed there, so the error messages for missing frameworks are checked as well.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORK_MODULES = ["smdistributed.dataparallel.torch.distributed", "smdistributed.dataparallel.tensorflow"]


def main() -> None:
    """Installs and checks; any failure is an exception."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="smd-install-") as folder:
        venv = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([sys.executable, "-m", "maturin", "sdist", "--out", folder], cwd=ROOT, check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        subprocess.run([*pip, "-c", options.constraints, archive], check=True)

        def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
            # Runs in another folder and isolated, so that nothing is imported from the checkout.
            command = [venv / "bin/python", "-I", "-c", code, *words]
            return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)

        done = python("import smdistributed, horovod, smdistributed._core as core; print(core.__file__)")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(venv)), done.stdout
        for module in FRAMEWORK_MODULES:
            done = python(f"import {module}")
            assert "ImportError" in done.stderr, done.stderr
            assert "which is not installed: `pip install" in done.stderr, done.stderr
        job = Path(folder) / "job.py"
        job.write_text(
            "from smdistributed import _core\nfrom smdistributed._common import lifecycle\n"
            "lifecycle.init()\n_core.barrier(0)\nprint(_core.rank(), _core.size())\n"
        )
        done = subprocess.run(
            [venv / "bin/smdrun", "-n", "2", job], capture_output=True, text=True, timeout=60, check=False
        )
        assert sorted(done.stdout.splitlines()) == ["[0] 0 2", "[1] 1 2"], done.stdout + done.stderr
        for script in ("smddprun", "smddpmprun"):
            subprocess.run([venv / "bin" / script, "true"], check=True, timeout=60)
        report = subprocess.run(
            [venv / "bin/smdrun", "doctor"], capture_output=True, text=True, timeout=60, check=False
        )
        assert "not installed" in report.stdout, report.stdout + report.stderr
        print(report.stdout)

        installed, source = (_files(root) for root in (next(venv.glob("lib/python*/site-packages")), ROOT / "python"))
        assert installed == source, f"installed only: {installed - source}; in the source only: {source - installed}"
    print("the installed package is complete")


def _files(root: Path) -> set[str]:
    """The package's files below `root`, without files that Python writes and libraries that were built in place."""
    packages = [root / "smdistributed", root / "horovod"]
    files = {path.relative_to(root) for package in packages for path in package.rglob("*") if path.is_file()}
    built = {"__pycache__", "_prebuilt"}
    return {str(path) for path in files if not built.intersection(path.parts) and path.suffix != ".so"}


if __name__ == "__main__":
    main()
