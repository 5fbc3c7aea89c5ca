"""The names of the Rust crates: no type name stands for two things in one crate."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CRATES = {"smd-core": "rust-core/src", "smd-bridge": "cpp-shims/src", "smd-python": "python/src"}
# Types in an `impl` block and in the bridge are indented; they refer to definitions elsewhere.
DEFINITION = re.compile(r"^(?:pub(?:\([a-z: ]+\))? +)?(?:unsafe +)?(?:struct|enum|trait|type|union) +([A-Z]\w*)", re.M)


@pytest.mark.parametrize("crate", CRATES)
def test_a_type_name_stands_for_one_thing_in_a_crate(crate: str) -> None:
    defined = defaultdict(list)
    for path in (ROOT / CRATES[crate]).rglob("*.rs"):
        for name in DEFINITION.findall(path.read_text()):
            defined[name].append(path.relative_to(ROOT).as_posix())
    assert defined, "no type was found: the sources have moved"
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}
