"""Hugging Face's Trainer, whose branch for model parallelism on SageMaker calls this library.

The branch runs if two variables of SageMaker's launcher are set. It leaves the division of data to accelerate, which
``integrations/accelerate.py`` adapts.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from smdistributed import _core
from smdistributed._common import import_hooks
from smdistributed.modelparallel.config import warn_once
from smdistributed.modelparallel.exceptions import SMPUsageError
from smdistributed.modelparallel.torch.checkpoint import save_load
from smdistributed.modelparallel.torch.hooks import call_hook
from smdistributed.modelparallel.torch.integrations import trainer_loss
from smdistributed.modelparallel.torch.precision import loss_scale
from smdistributed.modelparallel.torch.state import state

_PARAMETERS, _FRAMEWORK = "SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS"
#: The list of several files of weights.
_INDEX = "model.safetensors.index.json"
_ARGUMENTS, _TRAINER = "transformers.training_args", "transformers.trainer"


def enable_trainer(config: Mapping[str, Any] | None = None, **scale: Any) -> None:
    """Make the Trainer of transformers train with model parallelism. A script calls it before it imports the Trainer.

    The import of the Trainer calls ``smp.init``. Without CUDA devices, the Trainer trains on CPUs.

    Args:
        config: Keys of the configuration; those that the launcher gives take precedence.
        **scale: For the configuration's ``fp16``: arguments of ``smp.DistributedOptimizer`` that describe the loss
            scale, such as ``dynamic_loss_scale``. The Trainer passes none, so its losses are not scaled by default.

    Raises:
        SMPUsageError: transformers was imported before, and has decided that there is no model parallelism.
        SMPValidationError: A value of the loss scale is invalid.
        TypeError: An argument of the loss scale is unknown.

    Examples:
        >>> from smdistributed.modelparallel.torch.integrations import enable_trainer
        >>> enable_trainer({"partitions": 2, "microbatches": 4, "fp16": True}, dynamic_loss_scale=True)
        >>> from transformers import Trainer, TrainingArguments
    """
    loss_scale.choose(scale)
    parameters = {**(config or {}), **json.loads(os.environ.get(_PARAMETERS) or "{}")}
    # transformers looks for this key.
    parameters.setdefault("partitions", parameters.pop("pipeline_parallel_degree", 1))
    framework = json.loads(os.environ.get(_FRAMEWORK) or "{}")
    os.environ[_PARAMETERS] = json.dumps(parameters)
    os.environ[_FRAMEWORK] = json.dumps({**framework, "sagemaker_mpi_enabled": True})
    utils = sys.modules.get("transformers.utils")
    if utils is not None and not utils.is_sagemaker_mp_enabled():
        raise SMPUsageError("`enable_trainer` has to be called before transformers is imported")
    if hasattr(sys.modules.get(_TRAINER), "Trainer"):
        _adapt()
    import_hooks.after_import(_TRAINER, _adapt)
    if not torch.cuda.is_available():
        if hasattr(sys.modules.get(_ARGUMENTS), "TrainingArguments"):
            _allow_cpus()
        import_hooks.after_import(_ARGUMENTS, _allow_cpus)


def _adapt() -> None:
    """Correct the Trainer's branch.

    That of transformers 5 makes no optimizer, wraps the model again to evaluate it, and computes losses that depend on
    the number of microbatches (``integrations/trainer_loss.py``). All versions load the optimizer
    after the first forward and backward, whose gradients then have the loss scale of a new optimizer and may overflow.
    """
    kind: Any = vars(sys.modules[_TRAINER])["Trainer"]
    create_scheduler, wrap_model, load_optimizer = (
        kind.create_scheduler, kind._wrap_model, kind._load_optimizer_and_scheduler
    )  # fmt: skip
    if hasattr(create_scheduler, "__wrapped__"):
        return

    @functools.wraps(create_scheduler)
    def create_both(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.optimizer is None:
            self.create_optimizer(state.require_model())
        return create_scheduler(self, num_training_steps, optimizer)

    @functools.wraps(wrap_model)
    def wrap_once(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        is_wrapped = state.model is not None and self.model_wrapped is state.model
        if not is_wrapped:
            _warn_of_ignored(self, kind)
        return state.model if is_wrapped else wrap_model(self, model, *args, **kwargs)

    @functools.wraps(load_optimizer)
    def load_before_step(self: Any, checkpoint: str | None) -> None:
        model = state.require_model()
        others = list(model.post_step_hooks)
        load_optimizer(self, checkpoint)
        hooks, model.post_step_hooks[:] = model.post_step_hooks[len(others) :], others
        for hook in hooks:
            # The optimizer itself waits for the partition.
            call_hook(hook, model)

    kind.create_scheduler, kind._wrap_model = create_both, wrap_once
    kind._load_optimizer_and_scheduler = load_before_step
    _load_several_files(sys.modules[_TRAINER])
    trainer_loss.adapt(sys.modules[_TRAINER])


def _load_several_files(module: Any) -> None:
    """Make the Trainer load a model from several files as from one.

    Its own function compares names with those of the wrapped model, and so knows no names of modules that tensor
    parallelism has replaced, and none that transformers converts.
    """
    load_files = getattr(module, "load_sharded_checkpoint", None)
    if load_files is None:
        return

    @functools.wraps(load_files)
    def load(model: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        if model is not state.model or not os.path.isfile(os.path.join(folder, _INDEX)):
            return load_files(model, folder, *args, **kwargs)
        save_load.resume_from_checkpoint(folder, _INDEX, partial=False, load_optimizer=False)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    module.load_sharded_checkpoint = load


def _warn_of_ignored(trainer: Any, kind: type) -> None:
    """Warn of settings that the branch ignores: it calls the model by a function of its own."""
    arguments = getattr(trainer, "args", None)
    of_loss = {
        "`label_smoothing_factor`": getattr(arguments, "label_smoothing_factor", 0.0),
        "`compute_loss_func`": getattr(trainer, "compute_loss_func", None),
        f"`{type(trainer).__name__}.compute_loss`": (
            getattr(type(trainer), "compute_loss", None) is not getattr(kind, "compute_loss", None)
        ),
    }
    for name, value in of_loss.items():
        if value:
            warn_once(
                f"{name} is ignored in training: with model parallelism, the Trainer takes the loss that the model "
                "returns; compute it in the model's `forward`"
            )
    if getattr(arguments, "torch_compile", False):
        warn_once("`torch_compile` is ignored: with model parallelism, the Trainer does not compile the model")


def _allow_cpus() -> None:
    # The Trainer's branch has no other device than those of CUDA.
    sys.modules[_ARGUMENTS].TrainingArguments._setup_devices = property(_use_cpu)


def _use_cpu(arguments: Any) -> torch.device:
    arguments.distributed_state, arguments._n_gpu, arguments.local_rank = None, 1, _core.local_rank()
    return torch.device("cpu")
