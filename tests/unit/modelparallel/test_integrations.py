"""Stand-ins for Apex, the helpers for tests of scripts, and Hugging Face's accelerate and Trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import smdistributed.modelparallel.torch as smp  # noqa: E402
from smdistributed._common import lifecycle  # noqa: E402
from smdistributed.modelparallel.exceptions import SMPCheckpointError, SMPUsageError  # noqa: E402
from smdistributed.modelparallel.test.torch.utils import dump_model, verify  # noqa: E402
from smdistributed.modelparallel.torch.integrations import (  # noqa: E402
    accelerate,
    apex,
    enable_trainer,
    trainer_loss,
)
from smdistributed.modelparallel.torch.integrations import trainer as integration  # noqa: E402


@pytest.fixture
def job(monkeypatch):
    """Initializes a job of one process, without configuration variables of a launcher."""
    for name in ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS", "SMP_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    smp.init({})
    yield smp
    smp.shutdown()
    lifecycle.shutdown()


@pytest.mark.skipif(
    importlib.util.find_spec("apex") is None or not isinstance(importlib.util.find_spec("apex").loader, apex._Finder),
    reason="Apex is installed",
)
def test_scripts_import_apex_where_it_is_not_installed():
    apex._warn.cache_clear()
    with pytest.raises(ImportError):
        from apex import amp  # noqa: F401
    with pytest.raises(ImportError):
        from apex.normalization import FusedRMSNorm  # noqa: F401
    import amp_C

    with pytest.warns(UserWarning, match="Apex is not installed"):
        norm = amp_C.multi_tensor_l2norm
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad

    assert FusedLayerNorm is smp.nn.FusedLayerNorm
    assert (FusedAdam, FusedLAMB) == (smp.optimizers.FusedAdam, smp.optimizers.FusedLAMB)
    assert FusedNovoGrad is smp.optimizers.FusedNovoGrad
    scale = amp_C.multi_tensor_scale
    flag = torch.zeros(1, dtype=torch.int)
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    total, each = multi_tensor_applier(norm, flag, [gradients], True)
    assert (total.tolist(), each.tolist()) == ([5.0], [3.0, 4.0])
    assert multi_tensor_applier(norm, flag, [gradients], False)[1].numel() == 0
    half = [torch.empty(2, dtype=torch.float16), torch.empty(1, 1)]
    multi_tensor_applier(scale, flag, [gradients, half], 0.5)
    assert ([part.tolist() for part in half], flag.item()) == ([[1.5, 0.0], [[2.0]]], 0)
    multi_tensor_applier(scale, flag, [[torch.tensor([1e9])], [torch.empty(1, dtype=torch.float16)]], 1.0)
    assert flag.item() == 1


def test_a_dump_is_verified(job, tmp_path):
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    dump_model(model, tmp_path / "dump.pt")
    verify(model, tmp_path / "dump.pt")
    with torch.no_grad():
        model.module.bias[1] += 1.0
    with pytest.raises(SMPCheckpointError, match="`bias` differs"):
        verify(model, tmp_path / "dump.pt")
    verify(model, tmp_path / "dump.pt", atol=1.1)
    torch.save({"weight": torch.zeros(2, 2)}, tmp_path / "other.pt")
    with pytest.raises(SMPCheckpointError, match=r"only one of both has \['bias'\]"):
        verify(model, tmp_path / "other.pt")


def test_an_accelerator_divides_data_over_ranks_with_different_data(job, monkeypatch):
    """Uses a replacement for accelerate that, like accelerate, keeps its state in attributes that all objects share."""

    class PartialState:
        shared: ClassVar = {}

        def __init__(self):
            self.__dict__ = self.shared

    class Accelerator:
        def __init__(self, cpu=False):
            self.state = PartialState()
            self.state.num_processes, self.state.process_index, self.state.distributed_type = 4, 1, "MULTI_CPU"

    kinds = types.SimpleNamespace(NO="NO")
    state = types.SimpleNamespace(PartialState=PartialState, DistributedType=kinds)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", types.SimpleNamespace(Accelerator=Accelerator))
    accelerate.install()
    accelerate.install()
    monkeypatch.setitem(smp.state.groups.members, "dp", [5, smp.rank()])
    made = Accelerator(cpu=True)
    assert vars(PartialState()) == {"num_processes": 2, "process_index": 1, "distributed_type": "NO"}
    monkeypatch.setattr(accelerate, "allgather", lambda data, group: [data, data + 1])
    assert made.gather(torch.tensor(3)).tolist() == [3, 4]


def test_results_of_ranks_are_concatenated(job, monkeypatch):
    results = [
        {"loss": torch.tensor(1.0), "logits": (torch.ones(2, 3), torch.ones(2, 1, 5))},
        {"loss": torch.tensor(2.0), "logits": (torch.ones(2, 1), torch.ones(2, 2, 5))},
    ]
    monkeypatch.setattr(accelerate, "allgather", lambda data, group: results)
    state = types.SimpleNamespace(end_of_dataloader=False, remainder=3)
    accelerator = types.SimpleNamespace(gradient_state=state)
    found = accelerate._gather_for_metrics(accelerator, smp.DP_GROUP, results[0])
    assert found["loss"].tolist() == [1.0, 2.0]
    logits, others = found["logits"]
    assert logits.tolist() == [[1, 1, 1], [1, 1, 1], [1, -100, -100], [1, -100, -100]]
    assert others.shape == (4, 2, 5)
    assert others[0, 1].tolist() == [-100] * 5
    # The last batch is padded with samples that were evaluated already; they are dropped.
    state.end_of_dataloader = True
    assert len(accelerate._gather_for_metrics(accelerator, smp.DP_GROUP, results[0])["logits"][0]) == 3
    results[:] = ["a", "b"]
    with pytest.raises(TypeError, match="results to gather are tensors"):
        accelerate._gather_for_metrics(accelerator, smp.DP_GROUP, "a")


def test_the_trainer_must_be_enabled_before_transformers_is_imported(monkeypatch):
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"microbatches": 4}')
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", '{"sagemaker_mpi_num_of_processes_per_host": 2}')
    utils = types.SimpleNamespace(is_sagemaker_mp_enabled=lambda: False)
    monkeypatch.setitem(sys.modules, "transformers.utils", utils)
    with pytest.raises(SMPUsageError, match="before transformers is imported"):
        enable_trainer({"pipeline_parallel_degree": 2, "microbatches": 2})
    utils.is_sagemaker_mp_enabled = lambda: True
    enable_trainer({"ddp": True})
    # The launcher's value of `microbatches` wins. transformers looks for the key `partitions`.
    found = json.loads(os.environ["SM_HP_MP_PARAMETERS"])
    assert found == {"partitions": 2, "microbatches": 4, "ddp": True}
    framework = json.loads(os.environ["SM_FRAMEWORK_PARAMS"])
    assert framework == {"sagemaker_mpi_num_of_processes_per_host": 2, "sagemaker_mpi_enabled": True}


def test_the_trainer_of_transformers_5_gets_an_optimizer_and_evaluates_the_wrapped_model(job, monkeypatch):
    class Trainer:
        def __init__(self, model):
            self.model_wrapped, self.optimizer, self.made = model, None, []

        def _wrap_model(self, model, training=True):
            return "wrapped again"

        def create_optimizer(self, model):
            self.optimizer = model

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.made.append((num_training_steps, self.optimizer))

        def _load_optimizer_and_scheduler(self, checkpoint):
            self.model_wrapped.register_post_step_hook(lambda model, optimizer: self.made.append((checkpoint, model)))

    monkeypatch.setitem(sys.modules, "transformers.trainer", types.SimpleNamespace(Trainer=Trainer))
    integration._adapt()
    integration._adapt()
    module = torch.nn.Linear(2, 2)
    trainer = Trainer(module)
    assert trainer._wrap_model(module, training=False) == "wrapped again"
    trainer.model_wrapped = model = smp.DistributedModel(module)
    assert trainer._wrap_model(module, training=False) is model
    trainer.create_scheduler(3)
    trainer.optimizer = "the script's"
    trainer.create_scheduler(4)
    assert trainer.made == [(3, model), (4, "the script's")]
    # The trainer's hook runs at once, before the first step, and is not kept; other hooks wait for a step.
    model.register_post_step_hook(others := [].append)
    trainer._load_optimizer_and_scheduler("checkpoint-4")
    assert trainer.made[2:] == [("checkpoint-4", model)]
    assert model.post_step_hooks == [others]
    output = smp.StepOutput([torch.ones(1, requires_grad=True) * 2]).detach()
    assert not output[0].requires_grad
    assert output.concat().tolist() == [2.0]


def test_settings_that_the_trainer_ignores_are_named(monkeypatch):
    class Trainer:
        compute_loss_func = None

        def compute_loss(self, model, inputs):
            return model(**inputs)

    class Weighted(Trainer):
        def compute_loss(self, model, inputs):
            return 2 * model(**inputs)

    warned = []
    monkeypatch.setattr(integration, "warn_once", warned.append)
    trainer = Trainer()
    trainer.args = types.SimpleNamespace(label_smoothing_factor=0.0, torch_compile=False)
    integration._warn_of_ignored(trainer, Trainer)
    assert not warned
    weighted = Weighted()
    weighted.args = types.SimpleNamespace(label_smoothing_factor=0.1, torch_compile=True)
    weighted.compute_loss_func = print
    integration._warn_of_ignored(weighted, Trainer)
    names = ["`label_smoothing_factor`", "`compute_loss_func`", "`Weighted.compute_loss`", "`torch_compile`"]
    assert [text.partition(" is ignored")[0] for text in warned] == names


def test_the_optimizer_of_the_trainer_gets_the_chosen_loss_scale(monkeypatch):
    from smdistributed.modelparallel.torch.precision import loss_scale

    for name in ("SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS"):
        monkeypatch.setenv(name, "{}")
    monkeypatch.setattr(loss_scale, "chosen", {})
    with pytest.raises(TypeError, match="no argument `window`"):
        enable_trainer(window=3)
    with pytest.raises(smp.exceptions.SMPValidationError, match="`scale_factor` is 1"):
        enable_trainer(dynamic_loss_scale=True, scale_factor=1.0)
    assert loss_scale.chosen == {}
    monkeypatch.setitem(sys.modules, "transformers.utils", types.SimpleNamespace(is_sagemaker_mp_enabled=lambda: True))
    enable_trainer(dynamic_loss_scaling=True, dynamic_loss_args={"init_scale": 2.0**7})
    smp.init({"fp16": True})
    try:
        model = smp.DistributedModel(torch.nn.Linear(2, 2))
        assert smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)).loss_scale == 2.0**7
        own = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), static_loss_scale=8.0)
        assert own.loss_scale == 8.0
    finally:
        smp.shutdown()
        lifecycle.shutdown()


def test_losses_of_the_trainer_are_divided_by_the_labels_of_all_batches(job, monkeypatch):
    class Counting(torch.nn.Linear):
        def forward(self, x, num_items_in_batch=None):
            return super().forward(x)

    class Trainer:
        model_accepts_loss_kwargs, current_gradient_accumulation_steps, label_names = True, 3, ("labels",)
        args = types.SimpleNamespace(average_tokens_across_devices=True, device="cpu")
        accelerator = types.SimpleNamespace(num_processes=4, gradient_state=types.SimpleNamespace(sync_gradients=True))

        def __init__(self, model):
            self.model = model

        def training_step(self, model, inputs, num_items_in_batch=None):
            return module.smp_forward_backward(model, inputs, 2)

        def prediction_step(self, model, inputs, prediction_loss_only):
            return inputs

        def _get_num_items_in_batch(self, batches, device):
            return torch.tensor(24)

    warned = []
    monkeypatch.setattr(trainer_loss, "warn_once", warned.append)
    model = Counting(2, 2)
    wrapped = smp.DistributedModel(model)
    two = types.SimpleNamespace(cfg=types.SimpleNamespace(microbatches=2), require_model=lambda: wrapped)
    monkeypatch.setattr(trainer_loss, "state", two)
    module = types.SimpleNamespace(
        Trainer=Trainer,
        smp_forward_backward=lambda model, inputs, steps: (inputs, steps),
        smp_forward_only=lambda model, inputs: inputs,
    )
    trainer_loss.adapt(module)
    trainer, labels = Trainer(model), torch.tensor([[1, 2], [3, -100]])
    inputs, divisor = trainer.training_step(model, {"labels": labels}, torch.tensor(12))
    # The mean over two microbatches and four ranks is the sum of all losses divided by 12.
    assert inputs["num_items_in_batch"].smp_slice(2, 1, 0).item() == 6.0
    assert divisor == 1 / 4
    assert not warned
    assert trainer.prediction_step(model, inputs, True)["num_items_in_batch"].smp_slice(2, 0, 0).item() == 3.0
    # If the model has no use for the number of labels, the loss is the mean over accumulated batches; the last ones of
    # an epoch may be fewer. If the model accepts the number and ignores it, the loss is their sum.
    other = Trainer(torch.nn.Linear(2, 2))
    assert other.training_step(model, {"labels": labels.abs()}, torch.tensor(12))[1] == 1.0
    other.loss_is_scaled_for_ga = False
    assert other.training_step(model, {"labels": labels.abs()}, torch.tensor(12))[1] == 3.0
    assert not warned
    inputs, divisor = other.training_step(model, {"labels": labels}, torch.tensor(12))
    assert ("num_items_in_batch" in inputs, divisor) == (False, 3.0)
    assert [text.partition(",")[0] for text in warned] == ["microbatches have different numbers of labels"]
    assert module.smp_forward_backward(model, inputs, 2)[1] == 2


def test_means_over_labels_are_weighted_by_the_labels_of_microbatches():
    class Masked(torch.nn.Module):
        def forward(self, x, labels=None, **kwargs):
            return torch.nn.CrossEntropyLoss()(x, labels)

    class Weighted(torch.nn.Module):
        def forward(self, x, labels=None):
            return torch.nn.CrossEntropyLoss(weight=torch.ones(4))(x, labels)

    class Several(torch.nn.Module):
        def forward(self, x, labels=None, sentence_label=None):
            loss = torch.nn.CrossEntropyLoss()
            return loss(x, labels) + loss(x, sentence_label)

    labels = torch.tensor([[1, 2, 3], [-100, 3, -100], [1, -100, -100], [-100, -100, 0]])
    for model, expected in ((Masked(), True), (Weighted(), False), (Several(), False), (torch.nn.Linear(2, 2), False)):
        trainer = types.SimpleNamespace(model=model)
        assert trainer_loss._averages_labels(trainer, {"labels": labels}) is expected
    assert not trainer_loss._averages_labels(types.SimpleNamespace(model=Masked()), {"labels": labels[:, 0]})
    # There are 12 labels on two ranks. The two microbatches of this rank have 4 and 2 of them.
    shares = trainer_loss.LabelShares(labels, torch.tensor(12), 2)
    assert [shares.smp_slice(2, at, 0).item() for at in range(2)] == [6 / (2 * 4), 6 / (2 * 2)]
    # With these weights, the mean over ranks and microbatches is the mean over all labels.
    losses = torch.randn(6, dtype=torch.float64)
    parts = [losses[:4].mean() / shares.smp_slice(2, 0, 0), losses[4:].mean() / shares.smp_slice(2, 1, 0)]
    torch.testing.assert_close(sum(parts) / 2, losses.sum() / 6)
