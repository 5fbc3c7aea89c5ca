"""The versions that the package is tested with.

`smdrun doctor`, the documentation and the test matrix read them here. A test compares the oldest versions with the
requirements in `pyproject.toml`. The newest versions are not requirements: the package may also work with newer ones,
because the shims are built for the installed version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Versions of one package, by major and minor number.

    Attributes:
        title: The spelling for messages.
        oldest: Older versions lack something that the package needs.
        newest: The newest version that was tested.
    """

    title: str
    oldest: str
    newest: str

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def is_older(self, version: str) -> bool:
        """Return whether a version is older than the window.

        Args:
            version: The version.

        Returns:
            ``True`` if it is.
        """
        return _numbers(version) < _numbers(self.oldest)

    def is_newer(self, version: str) -> bool:
        """Return whether a version is newer than the window.

        Args:
            version: The version.

        Returns:
            ``True`` if it is.
        """
        return _numbers(version) > _numbers(self.newest)


#: Windows by the name of the distribution on PyPI, and of Python.
WINDOWS = {
    "python": Window("Python", "3.10", "3.14"),
    "torch": Window("PyTorch", "2.9", "2.15"),
    "tensorflow": Window("TensorFlow", "2.16", "2.21"),
    "keras": Window("Keras", "3.5", "3.15"),
    "tf-keras": Window("tf_keras", "2.16", "2.21"),
}


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number: (2, 11) for `2.11.0+cu130`."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
