"""Losses and parameters of transformers 5's Trainer under model parallelism, compared with the Trainer in one process.

Batches have different numbers of labels that are -100. Epochs end with fewer batches than are accumulated otherwise.
`make test-trainer` runs this file, which starts itself again in one process and in jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from trainer import LENGTH, NEW, ROOT, TINY, VERSIONS, WORDS, install, models

EXAMPLES, BATCH, STEPS = 40, 8, 6
#: Number of processes and configuration. A batch is that of all data-parallel ranks together.
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"partitions": 2, "microbatches": 4}),
    (4, {"partitions": 2, "microbatches": 2, "ddp": True}),
    (2, {"partitions": 1, "microbatches": 2, "ddp": True, "shard_optimizer_state": True}),
    (2, {"partitions": 1, "microbatches": 2, "ddp": True, "sharded_data_parallel_degree": 2}),
    (2, {"partitions": 1, "microbatches": 2, "ddp": True, "tensor_parallel_degree": 2}),
    (4, {"partitions": 2, "microbatches": 2, "ddp": True, "tensor_parallel_degree": 2}),
    (4, {"partitions": 2, "microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, "prescaled_batch": True}),
    (2, {"partitions": 2, "microbatches": 4, "bf16": True}),
    (2, {"partitions": 1, "microbatches": 2, "ddp": True, "tensor_parallel_degree": 2, "bf16": True}),
]
#: Relative difference of losses from those of one process in float64. The loss of causal models is computed in float32.
#: bfloat16 rounds by up to 2**-9; the mean over tokens differs by less, since most errors cancel.
TOLERANCE, BF16_TOLERANCE = 1e-4, 2.0**-9
#: Models that divide their loss by the number of labels, and models whose loss is the mean over labels.
TASKS = ["causal", "llama", "masked", "translation"]


def example(torch: Any, number: int) -> dict[str, Any]:
    """One example of a data set. The last labels are ignored; how many depends on its number."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(4, WORDS, (LENGTH,), generator=generator)
    labels = ids.clone()
    labels[LENGTH - number % (LENGTH - 2) :] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def make(task: str) -> Any:
    """The model of a task."""
    import transformers

    if task != "llama":
        return models(transformers)[task]()
    sizes = {**TINY, "vocab_size": WORDS, "num_key_value_heads": 2, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def train(task: str, folder: str, ranks: int, wrap: Any) -> dict[str, Any]:
    """Trains a model and saves it to the folder; returns losses and gradient norms by step, and the loss of the
    evaluation.
    """
    import torch
    import transformers

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, number: int) -> dict[str, Any]:
            return example(torch, number)

    transformers.set_seed(5)
    with wrap():
        model = make(task)
    if not json.loads(os.environ.get("SM_HP_MP_PARAMETERS", "{}")).get("bf16"):
        model.double()
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH // ranks,
        per_device_eval_batch_size=BATCH // ranks,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=0.5,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        seed=3,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **({"use_cpu": True} if ranks == 1 and not os.environ.get("SM_HP_MP_PARAMETERS") else {}),
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), eval_dataset=Data())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder)
    return {"losses": losses, "evaluated": evaluated, "norms": norms(trainer)}


def norms(trainer: Any) -> list[float]:
    """Returns the norms of gradients, by step."""
    return [float(each["grad_norm"]) for each in trainer.state.log_history if "grad_norm" in each]


def alone(work: Path) -> None:
    """Trains in one process."""
    import contextlib

    for task in TASKS:
        (work / f"{task}.json").write_text(json.dumps(train(task, str(work / task), 1, contextlib.nullcontext)))


def rank(work: Path) -> None:
    """Trains in a job and compares with one process."""
    from smdistributed.modelparallel.torch.integrations import enable_trainer

    enable_trainer()
    import torch
    import transformers
    from safetensors.torch import load_file

    import smdistributed.modelparallel.torch as smp

    assert transformers.__version__ == NEW
    for task in TASKS:
        if not smp.is_initialized():
            smp.init()
        if smp.state.cfg.bf16 and task == "translation":
            # T5 computes its loss in bfloat16, whose rounding depends on the microbatches.
            continue
        ranks = smp.rdp_size() if smp.state.cfg.prescaled_batch else smp.dp_size()
        is_bf16, folder = smp.state.cfg.bf16, work / f"{task}-job"
        tolerance = BF16_TOLERANCE if is_bf16 else TOLERANCE
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = train(task, str(folder), ranks, lambda: smp.tensor_parallelism(smp.tp_size() > 1))
        warned = [str(each.message) for each in caught if "different numbers of labels" in str(each.message)]
        smp.barrier()
        expected = json.loads((work / f"{task}.json").read_text())
        assert not warned, warned
        for key in ("losses", "evaluated") if is_bf16 else expected:
            torch.testing.assert_close(
                found[key],
                expected[key],
                rtol=tolerance,
                atol=0.0,
                msg=lambda text, at=f"{task}, {key}": f"{at}: {text}",
            )
        weights, other = load_file(folder / "model.safetensors"), load_file(work / task / "model.safetensors")
        # A job writes a tied weight under both names.
        assert weights.keys() >= other.keys(), other.keys() - weights.keys()
        for name in () if is_bf16 else other:
            torch.testing.assert_close(
                weights[name], other[name], rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}"
            )
        smp.barrier()
        if smp.rank() == 0:
            print(
                f"{task}: {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}, {expected['losses'][-1]:.4f} in one process",
                flush=True,
            )
        smp.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    """The command line of the launcher, of the single process, and of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where packages are installed")
    parser.add_argument("--layouts", type=int, nargs="*", default=range(len(LAYOUTS)))
    parser.add_argument("--alone", type=Path, help="used internally")
    parser.add_argument("--work", type=Path, help="used internally")
    parser.add_argument("--mp_parameters", help="added by the launcher for the Trainer; ignored here")
    arguments = parser.parse_args()
    if arguments.alone is not None:
        alone(arguments.alone)
        return
    if arguments.work is not None:
        rank(arguments.work)
        return
    folder = arguments.folder / f"transformers-{NEW}"
    install(folder, VERSIONS[NEW])
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "USE_TF": "0", "USE_FLAX": "0"}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        subprocess.run([sys.executable, __file__, "--alone", name], env=environment, check=True, timeout=900)
        for number in arguments.layouts:
            processes, parameters = LAYOUTS[number]
            print(parameters, flush=True)
            distribution = {
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
                "mpi": {"enabled": True, "processes_per_host": processes},
            }
            (work / "config.json").write_text(json.dumps(distribution))
            command = [sys.executable, "-m", "smdistributed", "-n", str(processes)]
            command += ["--config", str(work / "config.json"), __file__, "--work", name]
            subprocess.run(command, env=environment, check=True, timeout=900)


if __name__ == "__main__":
    main()
