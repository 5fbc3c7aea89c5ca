"""Sharded optimizer states: training compared with one process, memory, and checkpoints."""

from __future__ import annotations

import copy
import shutil
import tempfile

import pytest

from support import Forked, more, run_ranks

CONFIG = {
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
    "ddp": True,
    "shard_optimizer_state": True,
}


def _model(torch):
    """Returns a model with a frozen parameter, an unused one, and sizes that are not divisible by the number of
    ranks."""
    torch.manual_seed(3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(6, 31)
            self.norm = torch.nn.LayerNorm(31)
            self.last = torch.nn.Linear(31, 6, bias=False)
            self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=False)
            self.unused = torch.nn.Parameter(torch.ones(5))

        def forward(self, x):
            return self.last(self.norm(torch.nn.functional.gelu(self.first(x)))) * self.frozen

    return Model()


def _batch(torch, number, replica):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + replica))


def _start(torch, smp, config, passes=1, **scales):
    smp.init({**CONFIG, **config})
    module = _model(torch)
    if smp.pp_size() > 1:
        smp.set_partition(module.last, 1)
    model = smp.DistributedModel(module, backward_passes_per_step=passes)
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.01), **scales)

    @smp.step
    def step(model, x):
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return model, optimizer, step


def _equality(torch, smp, config, passes, clip, keep):
    model, optimizer, step = _start(torch, smp, config, passes)
    alone = _model(torch)
    reference = torch.optim.AdamW([each for each in alone.parameters() if each.requires_grad], lr=0.01)
    tolerance = 1e-10 if torch.get_default_dtype() == torch.float64 else 1e-5
    replicas = smp.dp_size()
    for number in range(5):
        if not keep:
            optimizer.zero_grad()
            reference.zero_grad()
        for part in range(passes):
            at = number * passes + part
            losses = step(model, _batch(torch, at, smp.dp_rank()))
            for replica in range(replicas):
                for index, piece in enumerate(_batch(torch, at, replica).chunk(2)):
                    loss = alone(piece).square().mean()
                    (loss / 2 / replicas).backward()
                    if replica == smp.dp_rank():
                        torch.testing.assert_close(losses[index], loss.detach(), rtol=tolerance, atol=tolerance)
        if clip:
            found = (torch.nn.utils.clip_grad_norm_ if number % 2 else smp.clip_grad_norm_)(model.parameters(), clip)
            wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
            torch.testing.assert_close(found.to(wanted), wanted, rtol=tolerance, atol=tolerance)
        own = dict(alone.named_parameters())
        total = torch.zeros(())
        for name, virtual in model.virtual_named_parameters():
            assert (virtual.grad is None) == (own[name].grad is None), name
            total += 0 if virtual.grad is None else virtual.grad.sum()
        sums = smp.allgather(total, smp.WORLD)
        wanted = sum(each.grad.sum() for each in own.values() if each.grad is not None)
        torch.testing.assert_close(sum(sums), wanted, rtol=100 * tolerance, atol=100 * tolerance)
        optimizer.step()
        reference.step()
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, own[name], rtol=tolerance, atol=tolerance)
    whole = optimizer.state_dict()["state"]
    assert whole.keys() == {name for name, each in own.items() if each.requires_grad and name != "unused"}
    for name, content in whole.items():
        for key, value in content.items():
            wanted = reference.state[own[name]][key]
            assert value.shape == wanted.shape, (name, key)
            torch.testing.assert_close(value, wanted, rtol=100 * tolerance, atol=tolerance)
    _check_memory(torch, smp, model, optimizer)
    _check_rejected_content(smp)
    if smp.pp_size() > 1:
        from smdistributed.modelparallel import exceptions

        # The parameters of exactly one partition: all ranks raise, also those which have given all that they hold.
        for function in (torch.nn.utils.clip_grad_norm_, smp.clip_grad_norm_):
            with pytest.raises(exceptions.SMPUsageError, match="pass all parameters"):
                function(list(model.module.last.parameters()), 1.0)
    torch.distributed.destroy_process_group()
    smp.shutdown()


def _check_rejected_content(smp):
    """Asserts that content that rank 0 cannot save raises on all ranks before they put sharded tensors together."""
    from smdistributed.modelparallel import exceptions

    folder = smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else None, smp.WORLD)[0]
    manager = smp.CheckpointManager(folder)
    with pytest.raises(exceptions.SMPCheckpointError, match=r"`user_content\['args'\]` is a"):
        manager.save(1, {"args": object()})
    manager.save(1, {"args": 2})
    assert manager.load() == {"args": 2}
    smp.barrier()
    if smp.rank() == 0:
        shutil.rmtree(folder)


def _check_memory(torch, smp, model, optimizer):
    """Asserts that a rank keeps only its share of the states, up to padding, and that virtual parameters are views."""
    states = [value for content in optimizer.state.values() for value in content.values() if value.dim()]
    elems = sum(value.numel() for value in states)
    whole = sum(parameter.numel() for parameter in model.local_parameters() if parameter.requires_grad)
    assert elems <= 2 * (whole / smp.dp_size() + 16), (elems, whole)
    storages = {each.untyped_storage().data_ptr() for each in model.local_parameters() if each.requires_grad}
    assert len(storages) == 1
    assert all(each.untyped_storage().data_ptr() in storages for _, each in model.virtual_named_parameters())


def _check_equality(ranks):
    import torch

    import smdistributed.modelparallel.torch as smp

    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        _equality(torch, smp, {}, 1, 0.01, False)
        if ranks == 4:
            _equality(torch, smp, {"partitions": 2}, 2, 0.0, False)
        # Without zero_grad, gradients accumulate as in one process.
        _equality(torch, smp, {}, 1, 0.0, True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, more(4)])
def test_sharded_states_train_as_one_process(ranks):
    run_ranks(_check_equality, ranks, ranks, launcher=Forked("torch"), timeout=100)


def _half(torch, smp, config, numbers, load=None):
    """Trains with 16-bit parameters; in steps 1 and 4 a gradient overflows on rank 1."""
    scales = {"dynamic_loss_scale": True, "init_scale": 256.0, "scale_window": 2}
    started = model, optimizer, step = _start(torch, smp, config, **scales)
    if load is not None:
        load()
    history = []
    for number in numbers:
        optimizer.zero_grad()
        losses = [float(loss) for loss in step(model, _batch(torch, number, smp.dp_rank())).outputs]
        virtual = [each for _, each in model.virtual_named_parameters() if each.grad is not None]
        if number in (1, 4) and smp.rank() == 1:
            virtual[0].grad[0] = torch.inf
        norm = optimizer.clip_master_grads(0.1)
        history.append((losses, norm, optimizer.loss_scale))
        optimizer.step()
        assert optimizer.overflow == (number in (1, 4)) == (norm == -1.0)
    return started, history


def _check_resume(folder):
    import torch

    import smdistributed.modelparallel.torch as smp

    config = {"fp16": True, "partitions": 2}
    (model, optimizer, _step), _ = _half(torch, smp, config, range(3))
    smp.save_checkpoint(folder, "t", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "full", partial=False, model=model)
    smp.save_checkpoint(folder, "core", format="sharded")
    whole = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    smp.shutdown()

    def from_files():
        smp.resume_from_checkpoint(folder, "t")

    def from_dicts():
        smp.state.model.load_state_dict(whole[0])
        smp.state.optimizer.load_state_dict(copy.deepcopy(whole[1]))

    def from_core():
        smp.resume_from_checkpoint(folder, "core")

    found = []
    for load in (from_files, from_dicts, from_core):
        started, history = _half(torch, smp, config, range(3, 8), load)
        found.append((history, started[0].state_dict(), started[1].state_dict()))
        smp.shutdown()
    _, history = _half(torch, smp, config, range(8))
    found.append((history[3:], smp.state.model.state_dict(), smp.state.optimizer.state_dict()))
    smp.shutdown()
    for other in found[:3]:
        _same(torch, other, found[3])
    # Loaded with one partition and four replicas: other shards of bitwise the same state.
    _start(torch, smp, {"fp16": True}, dynamic_loss_scale=True)
    from_files()
    after = smp.state.optimizer.state_dict()
    _same(torch, {key: after[key] for key in ("state", "master_weights", "loss_scale")},
          {key: whole[1][key] for key in ("state", "master_weights", "loss_scale")})  # fmt: skip
    smp.shutdown()
    torch.distributed.destroy_process_group()


def _same(torch, one, other, where=""):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _same(torch, one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        for place, pair in enumerate(zip(one, other, strict=True)):
            _same(torch, *pair, f"{where}/{place}")
    else:
        assert one == other, where


@pytest.mark.timeout(120)
def test_sharded_states_with_master_weights_are_resumed_bit_for_bit(tmp_path):
    run_ranks(_check_resume, 4, str(tmp_path), launcher=Forked("torch"), timeout=100)


def _check_refusals():
    import torch

    import smdistributed.modelparallel.torch as smp

    with pytest.raises(smp.exceptions.SMPConfigError, match="`shard_optimizer_state` needs `ddp: true`"):
        smp.init({"shard_optimizer_state": True})
    smp.init(CONFIG)
    model = smp.DistributedModel(_model(torch))
    for kind in (smp.optimizers.FusedLAMB, smp.optimizers.FusedNovoGrad, torch.optim.Adafactor):
        with pytest.raises(smp.exceptions.SMPUnsupportedError, match="cannot be sharded"):
            smp.DistributedOptimizer(kind([each for each in model.parameters() if each.requires_grad]))
    with pytest.raises(smp.exceptions.SMPUnsupportedError, match="without a batch"):
        model.join()
    with pytest.raises(smp.exceptions.SMPUnsupportedError, match="register_comm_hook"):
        model.register_comm_hook(None, print)

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    with pytest.raises(smp.exceptions.SMPUsageError, match="wrap the optimizer"):
        step(model, torch.ones(4, 6))
    smp.shutdown()
    torch.distributed.destroy_process_group()


def test_unsupported_combinations_with_sharded_states_raise():
    run_ranks(_check_refusals, 2, launcher=Forked("torch"), timeout=50)


def _check_gathered(folder, settings, precision):
    """Optimizer states are gathered on the first replica, saved there, and loaded by all ranks."""
    import torch

    import smdistributed.modelparallel.torch as smp
    from support.tensor_parallel import batch_of, start

    torch.set_default_dtype(torch.float64)
    config = {"ddp": True, "sdp_param_persistence_threshold": 9, **settings, **precision}

    def train(step, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            step(smp.state.model, batch_of(number))
            optimizer.step()

    _, optimizer, step = start(config)
    train(step, optimizer, range(2))
    whole, shards = optimizer.state_dict(), optimizer.local_state_dict(gather_if_shard=False)
    weights = copy.deepcopy(smp.state.model.state_dict())
    found = optimizer.local_state_dict()
    assert found["_smp_is_partial"]
    assert "shards" in shards
    assert "shards" not in found
    assert bool(found["state"]) == (smp.rdp_rank() == 0)
    if smp.rdp_rank() == 0:
        held = [name for group in shards["param_groups"] for name in group["params"]]
        assert set(held) <= found["state"].keys()
        smp.save(found, f"{folder}/gathered")
    smp.barrier()
    train(step, optimizer, range(2, 4))
    expected = smp.state.model.state_dict()
    smp.shutdown()

    model, optimizer, step = start(config, seed=5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(smp.load(f"{folder}/gathered", back_compat=False))
    step(model, batch_of(0))
    again = optimizer.state_dict()
    for name, content in whole["state"].items():
        assert all(torch.equal(again["state"][name][key], value) for key, value in content.items()), name
    if "master_weights" not in again:
        train(step, optimizer, range(2, 4))
        assert all(torch.equal(model.state_dict()[name], each) for name, each in expected.items())


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("ranks", "settings", "precision"),
    [
        (2, {"shard_optimizer_state": True}, {}),
        (2, {"sharded_data_parallel_degree": 2}, {}),
        (4, {"shard_optimizer_state": True, "tensor_parallel_degree": 2}, {}),
        more(4, {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
        more(4, {"shard_optimizer_state": True, "partitions": 2}, {}),
        more(4, {"shard_optimizer_state": True, "tensor_parallel_degree": 2}, {"bf16": True}),
    ],
)
def test_states_are_gathered_on_the_first_replica(ranks, settings, precision, tmp_path):
    run_ranks(_check_gathered, ranks, str(tmp_path), settings, precision, launcher=Forked("torch"), timeout=140)


def _buffers_body():
    import torch

    import smdistributed.modelparallel.torch as smp

    found = []
    for broadcast in (True, False):
        smp.init({"ddp": True})
        model = smp.DistributedModel(torch.nn.BatchNorm1d(2), broadcast_buffers=broadcast)

        @smp.step
        def step(model, x):
            model.backward(model(x).sum())

        for number in range(2):
            step(model, torch.full((4, 2), float(smp.rank() + number)))
        found.append(model.module.running_mean.tolist())
        smp.shutdown()
    return found


@pytest.mark.timeout(60)
def test_broadcast_buffers():
    first, second = run_ranks(_buffers_body, 2, launcher=Forked("torch"), timeout=50)
    # Rank 1 starts the second step with rank 0's buffers (`broadcast_buffers=True`), or with its own.
    assert first == [[pytest.approx(0.1)] * 2] * 2
    assert second == [[pytest.approx(0.2)] * 2, [pytest.approx(0.29)] * 2]
