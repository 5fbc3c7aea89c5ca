"""`horovod.keras` with Keras on PyTorch: optimizers and `fit` give the weights of one process on all ranks' batches."""

from __future__ import annotations

import copy
import importlib.util
import os
import tempfile
import warnings

import pytest

from support import Forked, run_ranks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "keras"))), reason="PyTorch and Keras are not both installed"
)

ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "torch",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
}


def start():
    import sys

    import keras
    import numpy as np
    import torch

    import horovod.keras as hvd

    hvd.init()
    assert "horovod.tensorflow" not in sys.modules
    return np, torch, keras, hvd, hvd.rank(), hvd.size()


def raises(kind, text, call):
    with pytest.raises(kind, match=text):
        call()


def values():
    np, torch, _, hvd, rank, size = start()
    assert float(hvd.allreduce(float(rank), op=hvd.Sum)) == sum(range(size))
    assert hvd.allgather(np.full((rank + 1, 2), rank)).shape == (sum(range(size + 1)), 2)
    assert hvd.broadcast(torch.tensor([rank]), size - 1).tolist() == [size - 1]
    assert hvd.reducescatter(np.ones((size, 2), np.float32), op=hvd.Sum).tolist() == [[size, size]]
    raises(RuntimeError, "BroadcastGlobalVariablesCallback", lambda: hvd.broadcast_global_variables(0))


def optimizers():
    """Each option of the distributed optimizer, with the update that it should make."""
    np, torch, keras, hvd, rank, size = start()
    average = sum(range(1, size + 1)) / size
    sgd = keras.optimizers.SGD

    def updated(optimizer, steps=1, gradient=rank + 1.0, apply=None):
        variables = [keras.Variable(np.zeros(3, np.float32), name=f"v{at}") for at in range(3)]
        apply = apply or (lambda gradients: optimizer.apply(gradients, variables))
        for _ in range(steps):
            apply([torch.full((3,), gradient), None, torch.full((3,), 2.0 * gradient)])
        return [float(variable.numpy()[0]) for variable in variables], optimizer, variables

    plain = sgd(1.0)
    got, optimizer, _ = updated(hvd.DistributedOptimizer(plain))
    assert got == [-average, 0.0, -2 * average]
    assert type(optimizer).__name__ == "SGD"
    assert isinstance(optimizer, sgd)
    assert optimizer.name == "DistributedSGD"
    assert optimizer.iterations is plain.iterations
    assert int(plain.iterations) == 1
    for options in (
        {"groups": 2},
        {"num_groups": 1},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
    ):
        assert updated(hvd.DistributedOptimizer(sgd(1.0), **options))[0] == [-average, 0.0, -2 * average], options
    assert updated(hvd.DistributedOptimizer(sgd(1.0), op=hvd.Sum))[0][0] == -average * size
    # Keras clips and accumulates gradients after they are reduced.
    assert updated(hvd.DistributedOptimizer(sgd(1.0, clipvalue=0.5)))[0][0] == -0.5
    assert updated(hvd.DistributedOptimizer(sgd(1.0, gradient_accumulation_steps=2)), steps=4)[0][0] == -2 * average
    passes = {"backward_passes_per_step": 2}
    got, optimizer, _ = updated(hvd.DistributedOptimizer(sgd(1.0), **passes), steps=3)
    assert got[0] == -2 * average
    assert int(optimizer.iterations) == 3
    passes["average_aggregated_gradients"] = True
    assert updated(hvd.DistributedOptimizer(sgd(1.0), **passes), steps=2)[0][0] == -average
    # `skip_gradients_aggregation`: the caller has reduced the gradients.
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = hvd.DistributedOptimizer(sgd(1.0))
    optimizer.apply_gradients([(torch.tensor([rank + 1.0]), variable)], skip_gradients_aggregation=True)
    assert float(variable.numpy()[0]) == -(rank + 1.0)
    # A copy reduces, too.
    assert updated(copy.deepcopy(hvd.DistributedOptimizer(sgd(1.0))))[0][0] == -average
    only = hvd.add_process_set([0])
    assert updated(hvd.DistributedOptimizer(sgd(1.0), process_set=only))[0][0] == -(rank + 1.0)
    # Ranks outside the process set step with their own gradients.
    optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd(1.0), process_set=only))
    assert updated(optimizer, gradient=float(optimizer.initial_scale) * (rank + 1.0))[0][0] == -(rank + 1.0)
    hvd.remove_process_set(only)
    # The caller may write to gradients between passes.
    optimizer, variable = hvd.DistributedOptimizer(sgd(1.0), backward_passes_per_step=2), keras.Variable(np.zeros(1))
    gradient = torch.zeros(1)
    for factor in (1.0, 2.0):
        optimizer.apply([gradient.fill_(factor * (rank + 1))], [variable])
    assert gradient.item() == 2.0 * (rank + 1)
    assert float(variable.numpy()[0]) == -3 * average
    for build in (lambda each: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(each)),
                  lambda each: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(each))):  # fmt: skip
        optimizer = build(sgd(1.0))
        scale = float(optimizer.initial_scale)
        assert updated(optimizer, gradient=scale * (rank + 1.0))[0][0] == -average
        # An overflow on one rank: all ranks skip the step.
        optimizer = build(sgd(1.0))
        assert updated(optimizer, gradient=float("inf") if rank == 0 else scale)[0][0] == 0.0
    raises(ValueError, "op currently only supports", lambda: hvd.DistributedOptimizer(sgd(1.0), op=hvd.Min))
    raises(ValueError, "already", lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd(1.0))))
    raises(TypeError, "no optimizer|not an optimizer", lambda: hvd.DistributedOptimizer(object()))
    if size > 1:
        optimizer = hvd.DistributedOptimizer(sgd(1.0))
        pair = [keras.Variable(np.zeros(1, np.float32), name=name) for name in ("here", "there")]
        gradients = [torch.ones(1), None if rank == size - 1 else torch.ones(1)]
        text = rf"rank {size - 1} has no gradient of `1.there`"
        raises(hvd.HorovodInternalError, text, lambda: optimizer.apply(gradients, pair))


def model_of(keras):
    layers = [keras.layers.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def fits():
    """`fit` with all callbacks, compared with one process; a saved model; a layer that stays local."""
    np, _, keras, hvd, rank, size = start()
    draw = np.random.RandomState(3)
    x = draw.rand(16 * size, 4).astype(np.float32)
    y = x.sum(1, keepdims=True)
    # This rank's rows: the batches of 4 of all ranks make one batch of 4 * size of the single process.
    mine = np.arange(16 * size).reshape(4, size, 4)[:, rank].ravel()
    keras.utils.set_random_seed(100 + rank)
    model = model_of(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse", metrics=["mae"])
    keras.utils.set_random_seed(100)
    alone = model_of(keras)
    alone.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    alone.fit(x, y, batch_size=4 * size, epochs=2, verbose=0, shuffle=False)
    history = model.fit(
        x[mine],
        y[mine],
        batch_size=4,
        epochs=2,
        verbose=0,
        shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    for one, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        assert np.allclose(one, other, atol=1e-5), np.abs(one - other).max()
    losses = hvd.allgather(np.array(history.history["loss"])[None])
    assert np.ptp(losses.numpy(), axis=0).max() == 0.0
    rates = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    with tempfile.TemporaryDirectory() as folder:
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        best.filepath = os.path.join(folder, "best.keras")
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * size, warmup_epochs=1, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.1 * size, multiplier=0.5, start_epoch=1),
            Recorder(),
            best,
        ]
        model.fit(x[mine], y[mine], batch_size=4, epochs=2, callbacks=callbacks, verbose=0, shuffle=False)
        again = hvd.load_model(best.filepath)
    warmup = [0.1 * ((batch + 1) / 4 * (size - 1) + 1) for batch in range(4)]
    assert np.allclose(rates, warmup + [0.1 * size] * 4, atol=1e-6), rates
    assert type(again.optimizer).__module__ == "horovod._keras_torch"
    assert int(again.optimizer.iterations) > 0
    again.fit(x[mine], y[mine], epochs=1, verbose=0)
    # A local layer: its weights differ between ranks.
    keras.utils.set_random_seed(7)
    partly = model_of(keras)
    partly.compile(hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=partly.layers[-1]), "mse")
    partly.fit(x[mine], y[mine] + rank, batch_size=4, epochs=1, verbose=0, shuffle=False)
    first, last = (hvd.allgather(layer.kernel.value.detach()[None]).numpy() for layer in partly.layers[-2:])
    assert np.ptp(first, axis=0).max() < 1e-6
    assert size == 1 or np.ptp(last, axis=0).max() > 1e-4


def states():
    """`restore` brings back the committed state, `sync` broadcasts rank 0's, and both drop aggregated gradients."""
    np, torch, keras, hvd, rank, _ = start()
    model = model_of(keras)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse")
    state = hvd.elastic.KerasState(model, epoch=rank)
    state.sync()
    assert state.epoch == 0
    kernel = model.get_weights()[0]
    assert np.ptp(hvd.allgather(kernel[None]).numpy(), axis=0).max() == 0.0
    model.fit(np.ones((4, 4), np.float32), np.ones((4, 1), np.float32), verbose=0)
    assert not np.array_equal(model.get_weights()[0], kernel)
    state.restore()
    assert np.array_equal(model.get_weights()[0], kernel)
    assert int(model.optimizer.iterations) == 0
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    state = hvd.elastic.KerasState(model, optimizer)
    for again in (state.sync, state.restore):
        state.sync()
        before = model.get_weights()[0]
        gradients = [torch.ones_like(each.value) for each in model.trainable_variables]
        for passes in ([] if rank else [1], [1, 1]):
            for _ in passes:
                optimizer.apply(gradients, model.trainable_variables)
            if len(passes) < 2:
                again()
        assert np.array_equal(model.get_weights()[0], before - 2.0), again


PARTS = (values, optimizers, fits, states)


def check_all():
    for part in PARTS:
        part()


@pytest.mark.timeout(120)
def test_training():
    """The assertions are in `check_all`, which runs on each rank."""
    run_ranks(check_all, 2, launcher=Forked("torch"), env=ENV, timeout=100)


def told():
    """Slower paths are counted, and arguments without an effect warn once."""
    np, torch, keras, hvd, _, size = start()
    from horovod.common import basics
    from smdistributed import _core

    def count():
        return dict(_core.running_fallbacks(os.getpid())[0][2])["gradients_one_by_one"]

    def warned(call):
        basics._warned_texts.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                call()
        return [str(one.message) for one in caught]

    sgd = keras.optimizers.SGD
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = hvd.DistributedOptimizer(sgd(1.0))
    before = count()
    texts = warned(lambda: optimizer.apply([torch.ones(1)], [variable]))
    assert count() - before == 2 * (size > 1)
    assert [text.partition(",")[0] for text in texts] == ["gradients are reduced by name after backward"] * (size > 1)
    devices = {"device_dense": "cpu", "device_sparse": "cpu", "sparse_as_dense": True}
    for build in (hvd.DistributedOptimizer, hvd.PartialDistributedOptimizer):
        texts = warned(lambda build=build: build(sgd(1.0), **devices))
        assert [text.split("`")[1] for text in texts] == list(devices), texts
        assert not warned(lambda build=build: build(sgd(1.0)))
    broadcast, average = hvd.callbacks.BroadcastGlobalVariablesCallback, hvd.callbacks.MetricAverageCallback
    for name, build in (("Broadcast", lambda *device: broadcast(0, *device)), ("MetricAverage", average)):
        (text,) = warned(lambda build=build: build("/cpu:0"))
        assert text.startswith(f"`device` of {name}")
        assert not warned(build)


@pytest.mark.timeout(60)
def test_slower_paths_and_arguments_without_effect_are_told():
    """The assertions are in `told`, which runs on each rank."""
    run_ranks(told, 2, launcher=Forked("torch"), env=ENV, timeout=50)


@pytest.mark.timeout(60)
def test_another_backend_is_refused():
    """In one process, with a fake `keras` module on the backend jax: the import error names the supported backends."""
    import subprocess
    import sys

    program = """
import sys, types
sys.modules["keras"] = types.ModuleType("keras")
sys.modules["keras"].backend = types.SimpleNamespace(backend=lambda: "jax")
import horovod.keras
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert "Keras runs on jax: `horovod.keras` needs KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch" in outcome.stderr
