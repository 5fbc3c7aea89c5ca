"""The modules of the model-parallel packages: import paths and import cycles."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "python/smdistributed/modelparallel"
FRAMEWORKS = ["torch", "tensorflow"]
#: Imports of published scripts, by framework; each text runs in a process of its own.
PUBLIC = {
    "torch": """
import smdistributed.modelparallel.torch as smp
import smdistributed.modelparallel.torch.exceptions
import smdistributed.modelparallel.backend.exceptions
from smdistributed.modelparallel.torch import core, exceptions, patches, state, step
from smdistributed.modelparallel.torch.amp import GradScaler
from smdistributed.modelparallel.torch.checkpoint import load, resume_from_checkpoint, save, save_checkpoint
from smdistributed.modelparallel.torch.model import DistributedModel
from smdistributed.modelparallel.torch.nn import DistributedModule, DistributedTransformerLMHead, FusedLayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed_gpt2, translate_state_dict_to_hf_gpt2,
)
from smdistributed.modelparallel.torch.nn.huggingface.gptj import translate_hf_gptj_state_dict_to_smdistributed_gptj
from smdistributed.modelparallel.torch.nn.huggingface.roberta import translate_state_dict_to_smdistributed
from smdistributed.modelparallel.torch.optimizer import DistributedOptimizer
from smdistributed.modelparallel.torch.output import StepOutput
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint, checkpoint_sequential
assert callable(smp.step) and callable(smp.partition) and smp.save is save
""",
    "tensorflow": """
import smdistributed.modelparallel.tensorflow as smp
import smdistributed.modelparallel.tensorflow.exceptions
from smdistributed.modelparallel.tensorflow import core, exceptions, state, step
from smdistributed.modelparallel.tensorflow.checkpoint import CheckpointManager
from smdistributed.modelparallel.tensorflow.model import DistributedModel
from smdistributed.modelparallel.tensorflow.output import StepOutput
assert callable(smp.step) and callable(smp.partition) and smp.CheckpointManager is CheckpointManager
""",
}


def modules():
    """Yields the dotted name and the path of every module of the packages."""
    for path in PACKAGE.rglob("*.py"):
        parts = ["smdistributed", "modelparallel", *path.relative_to(PACKAGE).with_suffix("").parts]
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(tree, known):
    """Yields the modules of the packages that a module imports while it is imported itself."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{each.name}" for each in node.names)
            yield from (name if name in known else node.module for name in names)
        yield from imports(node, known)


def test_imports_have_no_cycle():
    known = dict(modules())
    graph = {name: set(imports(ast.parse(path.read_text()), known)) & set(known) for name, path in known.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(known)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_published_import_paths(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    command = [sys.executable, "-c", PUBLIC[framework]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
