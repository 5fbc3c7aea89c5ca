"""The Trainer of transformers with model parallelism: it trains, saves and resumes.

`make test-trainer` runs this file with two versions: 4.40.2, which public scripts pin, and with `enable_trainer` the
version that other tests use. Packages that are not installed go into a folder of their own. The file starts itself
again with `smdrun` as the script of a job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = "4.40.2", "5.23.0"


class Version(NamedTuple):
    """Packages to install without their dependencies, the dependencies that are needed beside PyTorch and numpy, and
    variables of the job.
    """

    packages: list[str]
    needed: list[str]
    variables: dict[str, str]


VERSIONS = {
    OLD: Version(
        [f"transformers=={OLD}", "tokenizers==0.19.1", "huggingface-hub==0.23.5", "accelerate==0.30.1"],
        ["requests", "psutil", "pyyaml", "regex", "tqdm", "packaging", "filelock", "fsspec", "safetensors"],
        # The Trainer writes random states as a pickle, which PyTorch 2.6 and newer do not load by default.
        {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
    # `make test-trainer` has installed transformers itself.
    NEW: Version(["accelerate==1.15.0"], ["psutil", "pyyaml"], {}),
}
WORDS, LENGTH, STEPS = 64, 12, 8
TINY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def install(folder: Path, version: Version) -> None:
    """Installs the packages into `folder`, once."""
    stamp = folder / ".installed"
    wanted = "\n".join(version.packages + version.needed)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--target", str(folder)]
    # Without their dependencies, since PyTorch is installed.
    subprocess.run([*pip, "--upgrade", *version.needed], check=True)
    subprocess.run([*pip, "--upgrade", "--no-deps", *version.packages], check=True)
    stamp.write_text(wanted)


class Feature(NamedTuple):
    """A configuration, the number of processes that it needs, and further arguments of the training and of the loss
    scale.

    On CPUs, the old Trainer rejects 16-bit training without a backend of its own, though the model handles it. So a
    backend is named.
    """

    parameters: dict[str, Any]
    processes: int = 2
    options: dict[str, Any] | None = None
    scale: dict[str, Any] | None = None


#: Large enough to overflow in the first steps, and to grow again.
SCALE = {"dynamic_loss_scale": True, "init_scale": 2.0**17, "scale_window": 2}
#: Configurations in addition to a pipeline of two partitions.
FEATURES: dict[str, Feature] = {
    "states": Feature({"ddp": True, "shard_optimizer_state": True}),
    "sharded": Feature({"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    "tensors": Feature({"ddp": True, "partitions": 2, "tensor_parallel_degree": 2}, 4),
    "fp16": Feature({"partitions": 2, "fp16": True}, options={"half_precision_backend": "cuda_amp"}, scale=SCALE),
    "bf16": Feature({"partitions": 2, "bf16": True}),
    "states pipelines": Feature({"ddp": True, "partitions": 2, "shard_optimizer_state": True}, 4),
    "sharded pipelines": Feature(
        {"ddp": True, "partitions": 2, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}, 4
    ),
    "states tensors": Feature({"ddp": True, "tensor_parallel_degree": 2, "shard_optimizer_state": True}),
    "sharded tensors": Feature(
        {"ddp": True, "tensor_parallel_degree": 2, "sharded_data_parallel_degree": 2, "bf16": True}
    ),
    "bf16 tensors": Feature({"ddp": True, "partitions": 2, "tensor_parallel_degree": 2, "bf16": True}, 4),
    "fp16 sharded": Feature(
        {"ddp": True, "sharded_data_parallel_degree": 2, "fp16": True}, 2,
        {"half_precision_backend": "cuda_amp"}, {**SCALE, "init_scale": 2.0**14},
    ),
    "fp16 states": Feature(
        {"ddp": True, "partitions": 2, "shard_optimizer_state": True, "fp16": True}, 4,
        {"half_precision_backend": "cuda_amp"}, {**SCALE, "init_scale": 2.0**14},
    ),
    # Small enough to overflow only in the step in which the callback below causes it.
    "fp16 tensors": Feature(
        {"ddp": True, "partitions": 2, "tensor_parallel_degree": 2, "fp16": True}, 4,
        {"half_precision_backend": "cuda_amp"}, {**SCALE, "init_scale": 2.0**14},
    ),
}  # fmt: skip


def launch(folder: Path, version: str, tasks: list[str], feature: Feature) -> None:
    """Runs the tasks with a configuration.

    Raises:
        subprocess.CalledProcessError: The job failed.
    """
    parameters = {"microbatches": 2, **feature.parameters}
    distribution = {
        "smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}},
        "mpi": {"enabled": True, "processes_per_host": feature.processes},
    }
    with tempfile.TemporaryDirectory() as work:
        config = Path(work) / "config.json"
        config.write_text(json.dumps(distribution))
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "USE_TF": "0", "USE_FLAX": "0", **VERSIONS[version].variables}
        command = [sys.executable, "-m", "smdistributed", "-n", str(feature.processes), "--config", str(config)]
        command += [__file__, "--work", work, "--versions", version, "--tasks", *tasks]
        command += ["--options", json.dumps(feature.options or {}), "--scale", json.dumps(feature.scale or {})]
        subprocess.run(command, env={**os.environ, **own}, check=True, timeout=1800)


# The code of a rank.


def models(transformers: Any) -> dict[str, Any]:
    """For each task, a function that makes its model."""
    gpt2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    t5 = {
        "vocab_size": WORDS,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    t5 |= {"decoder_start_token_id": 0, "use_cache": False}
    text = {"vocab_size": WORDS, "max_position_embeddings": 40, "num_labels": 3, **TINY, **QUIET}
    image = {"image_size": 16, "patch_size": 4, "num_labels": 3, **TINY, **QUIET}
    grouped = {"num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False, **TINY}
    return {
        "causal": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "translation": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "classification": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**text)),
        "answers": lambda: transformers.BertForQuestionAnswering(transformers.BertConfig(**{**text, "num_labels": 2})),
        "masked": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**text)),
        "tokens": lambda: transformers.BertForTokenClassification(transformers.BertConfig(**text)),
        "images": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**image)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**grouped)),
        "experts": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**{**grouped, "num_local_experts": 3})
        ),
    }


def item(torch: Any, task: str, number: int) -> dict[str, Any]:
    """One example of a data set."""
    generator = torch.Generator().manual_seed(number)
    # Uses an eighth of the vocabulary only, which all tasks learn quickly.
    ids = torch.randint(4, WORDS // 8 + 4, (LENGTH,), generator=generator)
    if task == "images":
        return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": ids[0] % 3}
    labels = {
        "classification": {"labels": ids[0] % 3},
        "answers": {"start_positions": ids[0] % LENGTH, "end_positions": ids[1] % LENGTH},
        "tokens": {"labels": ids % 3},
        "translation": {"labels": ids[:8]},
    }.get(task, {"labels": ids})
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}


#: Options of each task in addition to the common ones.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"gradient_accumulation_steps": 2},
    "translation": {"save_safetensors": False},
    "classification": {"evaluation_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True},
    "answers": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "masked": {"optim": "adafactor", "max_grad_norm": 0.0},
    "tokens": {"weight_decay": 0.1, "label_smoothing_factor": 0.0, "save_total_limit": 2},
    "images": {"optim": "sgd"},
    "llama": {"adam_beta2": 0.95},
    "experts": {},
}
#: Tasks that run with every feature: a decoder, an encoder with a decoder, grouped heads with gated layers, and experts.
#: Tensor parallelism replaces each by other modules.
TASKS_OF_FEATURES = ["causal", "translation", "llama", "experts"]


def _on_cpu(arguments: Any) -> Any:
    import torch

    import smdistributed.modelparallel.torch as smp

    arguments.distributed_state, arguments._n_gpu, arguments.local_rank = None, 1, smp.local_rank()
    return torch.device("cpu")


def rename_options(options: dict[str, Any], version: str) -> dict[str, Any]:
    """Renames options for a version of the Trainer; since version 5, it writes safetensors only."""
    if version == OLD:
        return options
    names = {"evaluation_strategy": "eval_strategy", "save_safetensors": None, "half_precision_backend": None}
    return {names.get(key, key): value for key, value in options.items() if names.get(key, key) is not None}


def overflowing(transformers: Any) -> Any:
    """Makes a callback that sets a gradient of the last rank to infinity in one step, and records loss scales and
    skipped steps.
    """
    import smdistributed.modelparallel.torch as smp

    class Overflow(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.scales: dict[int, tuple[float, bool]] = {}
            self._hook = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == STEPS - 3 and smp.rank() == smp.size() - 1:
                parameter = next(each for each in smp.state.model.local_parameters() if each.requires_grad)
                self._hook = parameter.register_hook(lambda gradient: gradient * float("inf"))

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            optimizer = smp.state.optimizer
            self.scales[state.global_step] = (optimizer.loss_scale, optimizer.overflow)
            if self._hook is not None:
                self._hook.remove()
                self._hook = None

    return Overflow()


def check_scales(smp: Any, scales: dict[int, tuple[float, bool]], is_first: bool) -> None:
    """Checks that all ranks skip the same steps and that the scale follows."""
    assert all(each == scales for each in smp.allgather(scales, smp.WORLD)), scales
    assert scales[STEPS - 2][1], scales
    assert not scales[STEPS][1], scales
    if is_first:
        # No step was skipped right before the overflow, and the overflow halves the scale.
        assert not scales[STEPS - 3][1], scales
        assert scales[STEPS - 2][0] == scales[STEPS - 3][0] / 2, scales


def rank(work: Path, version: str, tasks: list[str], more: dict[str, Any], scale: dict[str, Any]) -> None:
    """Trains each model without interruption, and again from the checkpoint after half of the steps."""
    if version != OLD or scale:
        from smdistributed.modelparallel.torch.integrations import enable_trainer

        enable_trainer(**scale)
    import torch
    import transformers

    import smdistributed.modelparallel.torch as smp

    assert transformers.__version__ == version
    make = models(transformers)

    if version == OLD and not torch.cuda.is_available():
        # For model parallelism, the Trainer accepts CUDA devices only.
        transformers.TrainingArguments._setup_devices = property(_on_cpu)

    class Data(torch.utils.data.Dataset):
        def __init__(self, task: str) -> None:
            self._task = task

        def __len__(self) -> int:
            return 64

        def __getitem__(self, number: int) -> dict[str, Any]:
            return item(torch, self._task, number)

    def train(task: str, resume: str | None) -> tuple[list[float], float]:
        if not smp.is_initialized():
            smp.init()
        transformers.set_seed(5)
        options = {"per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": STEPS // 2, "logging_steps": 1}
        options |= {"learning_rate": 0.01, "report_to": [], "seed": 3, "dataloader_pin_memory": False}
        options |= {"disable_tqdm": True, **OPTIONS[task], **more}
        callback = overflowing(transformers)
        with smp.tensor_parallelism(smp.tp_size() > 1):
            model = make[task]()
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(str(work / task), **rename_options(options, version)),
            train_dataset=Data(task),
            eval_dataset=Data(task),
            callbacks=[callback] if scale else [],
        )
        trainer.train(resume_from_checkpoint=resume)
        if scale:
            check_scales(smp, callback.scales, resume is None)
            scales.append(callback.scales)
        found = {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}
        predicted = trainer.predict(Data(task))
        evaluated = predicted.metrics["test_loss"]
        # Data-parallel ranks get different examples; each example is used once in an epoch and once in the evaluation.
        examples = STEPS * trainer.args.gradient_accumulation_steps * 4 * smp.dp_size()
        assert trainer.state.epoch == examples / len(Data(task)), (task, trainer.state.epoch)
        if task == "causal":
            data = Data(task)
            labels = torch.stack([data[number]["labels"] for number in range(len(data))])
            assert (predicted.label_ids == labels.numpy()).all()
            assert predicted.predictions.shape == (len(labels), LENGTH, WORDS)
        trainer.save_model(str(work / f"{task}-{resume is None}"))
        smp.barrier()
        smp.shutdown()
        return [found[step] for step in sorted(found)], evaluated

    def split_file(folder: Path) -> None:
        """Splits a checkpoint's file of weights into two files with an index."""
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        names = [sorted(weights)[::2], sorted(weights)[1::2]]
        for number, part in enumerate(names):
            save_file({name: weights[name] for name in part}, folder / f"{number}.safetensors", {"format": "pt"})
        files = {name: f"{number}.safetensors" for number, part in enumerate(names) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        (folder / "model.safetensors").unlink()

    scales: list[dict[int, tuple[float, bool]]] = []
    for task in tasks:
        scales.clear()
        expected, last = train(task, None)
        if task == "images" and version != OLD and int(os.environ["RANK"]) == 0:
            split_file(work / task / f"checkpoint-{STEPS // 2}")
        resumed, again = train(task, str(work / task / f"checkpoint-{STEPS // 2}"))
        assert len(expected) == len(resumed) == STEPS, (task, expected, resumed)
        assert resumed == expected, (task, expected, resumed)
        assert expected[-1] < expected[0], (task, expected)
        assert again == last, (task, last, again)
        if scale:
            whole, half = scales
            assert half.items() <= whole.items(), (whole, half)
            assert len(half) == STEPS // 2
        # Plain transformers must read the saved model.
        plain = make[task]().from_pretrained(work / f"{task}-True")
        assert all(torch.isfinite(parameter).all() for parameter in plain.parameters())
        if int(os.environ["RANK"]) == 0:
            print(
                f"{task}: {expected[0]:.4f} to {expected[-1]:.4f}, equal when resumed; evaluated {last:.4f}", flush=True
            )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    """The command line of both: the launcher, and the ranks that it starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", nargs="+", choices=list(VERSIONS), default=list(VERSIONS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where packages are installed")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--tasks", nargs="+", default=list(OPTIONS))
    parser.add_argument("--features", nargs="*", choices=list(FEATURES), default=list(FEATURES))
    parser.add_argument("--work", type=Path, help="used internally")
    parser.add_argument("--options", type=json.loads, help="used internally")
    parser.add_argument("--scale", type=json.loads, help="used internally")
    parser.add_argument("--mp_parameters", help="added by the launcher for the Trainer; ignored here")
    arguments = parser.parse_args()
    if arguments.work is not None:
        rank(arguments.work, arguments.versions[0], arguments.tasks, arguments.options, arguments.scale)
        return
    for version in arguments.versions:
        folder = arguments.folder / f"transformers-{version}"
        install(folder, VERSIONS[version])
        for processes in arguments.processes:
            feature = Feature({"partitions": 2, "ddp": processes > 2}, processes)
            launch(folder, version, arguments.tasks, feature)
        for name in arguments.features:
            tasks = [*TASKS_OF_FEATURES, "images"] if name == "tensors" else TASKS_OF_FEATURES
            launch(folder, version, [task for task in tasks if task in arguments.tasks], FEATURES[name])


if __name__ == "__main__":
    main()
