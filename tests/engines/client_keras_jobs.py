"""KerasTuner's distributed search, each trial of which is a job of two ranks: ``make test-clients``."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from clients import CLIENTS, ROOT, needs_libraries
from waiting import output_of

from support.launchers import clean_environment, free_port

pytestmark = [
    pytest.mark.timeout(400),
    needs_libraries("keras_tuner"),
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]

# One for each worker. Of further ones, KerasTuner's grid search lets one trial run at a time, although both workers are free: it waits
# for the end of all running trials before it draws the next value. A worker without a trial asks the chief again without a pause. The
# time of a trial is the imports of TensorFlow on its ranks.
RATES = [0.05, 0.1]

TRAIN = """
import json, os, sys, time

def train(rate):
    import keras
    import numpy as np
    import horovod.keras as hvd
    hvd.init()
    inputs = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    targets = inputs.sum(1, keepdims=True)
    # The starting weights of rank 0 are those of one process.
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
    share = slice(hvd.rank(), None, hvd.size())
    model.fit(inputs[share], targets[share], batch_size=16 // hvd.size(), epochs=3, shuffle=False, verbose=0,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return hvd.size(), float(model.evaluate(inputs, targets, batch_size=32, verbose=0))
"""

ONE = """
print(json.dumps([train(rate)[1] for rate in json.loads(sys.argv[1])]))
"""

SEARCH = """
import types
import horovod
import keras_tuner
from keras_tuner.src.distribute import oracle_chief

# The chief looks only every 20 seconds whether the last trial has ended.
oracle_chief.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.5)))
folder, name = os.environ["WORK"], os.environ["KERASTUNER_TUNER_ID"]
parameters = keras_tuner.HyperParameters()
parameters.Choice("rate", json.loads(sys.argv[1]))

class Tuner(keras_tuner.Tuner):
    def run_trial(self, trial):
        # Each worker has a trial before one of them has two.
        open(os.path.join(folder, name), "w").close()
        while not all(os.path.exists(os.path.join(folder, f"tuner{number}")) for number in range(2)):
            time.sleep(0.1)
        rate = trial.hyperparameters.get("rate")
        results = horovod.run(train, kwargs={"rate": rate}, np=2)
        with open(os.path.join(folder, f"{trial.trial_id}.json"), "w") as file:
            json.dump({"tuner": name, "rate": rate, "results": results}, file)
        return results[0][1]

objective = keras_tuner.Objective("default_objective", "min")
oracle = keras_tuner.oracles.GridSearchOracle(
    objective=objective, max_trials=len(json.loads(sys.argv[1])), hyperparameters=parameters)
tuner = Tuner(oracle=oracle, directory=folder, project_name="search")
tuner.search()
if name == "chief":
    best = oracle.get_best_trials(1)[0]
    print("BEST", json.dumps({"rate": best.hyperparameters.get("rate"), "score": best.score}))
"""


def start(path, **variables):
    environment = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(CLIENTS)]),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, str(path), json.dumps(RATES)], env=environment, text=True, **pipes)


def test_a_distributed_search_of_jobs(tmp_path):
    """A chief and two workers; each trial has the loss of one process that trains with the same rate."""
    one, search = tmp_path / "one.py", tmp_path / "search.py"
    one.write_text(TRAIN + ONE)
    search.write_text(TRAIN + SEARCH)
    losses = dict(zip(RATES, json.loads(output_of(start(one), 300).splitlines()[-1]), strict=True))

    chief = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": str(free_port()), "WORK": str(tmp_path)}
    processes = [start(search, KERASTUNER_TUNER_ID=name, **chief) for name in ("chief", "tuner0", "tuner1")]
    try:
        outputs = [output_of(process, 300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    trials = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(each["rate"] for each in trials) == RATES, outputs
    assert {each["tuner"] for each in trials} == {"tuner0", "tuner1"}
    for each in trials:
        assert each["results"][0] == each["results"][1]
        assert each["results"][0] == [2, pytest.approx(losses[each["rate"]], rel=1e-4)]
    best = json.loads(outputs[0].rpartition("BEST ")[2].splitlines()[0])
    assert best["rate"] == min(losses, key=losses.__getitem__)
    assert best["score"] == pytest.approx(min(losses.values()), rel=1e-4)
