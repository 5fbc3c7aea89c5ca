"""Client libraries over the backend ``smddp``, each with two ranks and compared with one process: ``make test-clients``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

import torch
from clients import both, needs_libraries, run

from support.launchers import free_port, needs

pytestmark = [pytest.mark.timeout(300), needs_libraries("accelerate")]
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, {torch.cuda.device_count()} are here"
)
VISIBLE_GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")


ACCELERATE = """
import accelerate
if size > 1:
    import smdistributed.dataparallel.torch.torch_smddp
    from accelerate import InitProcessGroupKwargs
    handlers = [InitProcessGroupKwargs(backend="smddp")]
else:
    handlers = []
accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=handlers)
model = make_model()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8 // size)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for _ in range(2):
    for x, y in data:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
seen = accelerator.gather(torch.tensor([accelerator.process_index]))
backend = torch.distributed.get_backend() if size > 1 else None
write(weights=weights(accelerator.unwrap_model(model)), backend=backend, seen=seen.tolist())
accelerator.end_training()
"""


def test_accelerate(tmp_path):
    two, one = both(tmp_path, ACCELERATE)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]
    assert [each["seen"] for each in two] == [[0, 1]] * 2
    assert one["seen"] == [0]


@needs_two_gpus
def test_the_sagemaker_branch_of_accelerate(tmp_path):
    """In a container of SageMaker, accelerate itself imports the backend and takes it; for GPUs only."""
    script = ACCELERATE.replace("    import smdistributed.dataparallel.torch.torch_smddp\n", "")
    script = script.replace('[InitProcessGroupKwargs(backend="smddp")]', "[]").replace("cpu=True, ", "")
    script = script.replace("process_index])", "process_index], device=accelerator.device)")
    container = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
        "CUDA_VISIBLE_DEVICES": VISIBLE_GPUS,
    }
    two = run(tmp_path, script, **container)
    (one,) = run(tmp_path, script, ranks=1, CUDA_VISIBLE_DEVICES=VISIBLE_GPUS)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]
    assert [each["seen"] for each in two] == [[0, 1]] * 2
    assert two[0]["weights"] == two[1]["weights"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-5)


def accelerate_launch(*options):
    """The command `accelerate launch` with two processes."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    return [*words, *map(str, options)]


def test_the_command_accelerate_launch(tmp_path):
    """It starts the processes as torchrun does; `cpu=True` of the script overrides the kind of the devices."""
    launched = run(tmp_path, ACCELERATE, launcher=accelerate_launch("--multi_gpu"))
    (one,) = run(tmp_path, ACCELERATE, ranks=1)
    assert [each["backend"] for each in launched] == ["smddp", "smddp"]
    assert [each["seen"] for each in launched] == [[0, 1]] * 2
    assert launched[0]["weights"] == launched[1]["weights"]
    assert launched[0]["weights"] == pytest.approx(one["weights"], abs=2e-6)


@needs("mpirun")
def test_the_command_accelerate_launch_with_mpirun(tmp_path):
    """What accelerate does with several processes on CPUs."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    # accelerate counts ranks by the variables of Open MPI, and the script reads those of torchrun.
    script = 'import os\nos.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]\nos.environ["WORLD_SIZE"] = "2"\n'
    launched = run(
        tmp_path,
        ACCELERATE,
        first=script,
        launcher=accelerate_launch("--cpu", "--mpirun_hostfile", hostfile),
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        # accelerate asks for a socket for each process.
        OMPI_MCA_rmaps_base_oversubscribe="1",
        OMPI_MCA_hwloc_base_binding_policy="none",
    )
    assert [each["backend"] for each in launched] == ["smddp", "smddp"]
    assert [each["seen"] for each in launched] == [[0, 1]] * 2
    assert launched[0]["weights"] == launched[1]["weights"]


def test_trainer_of_transformers(tmp_path):
    script = """
        if size > 1:
            import smdistributed.dataparallel.torch.torch_smddp
        from transformers import Trainer, TrainingArguments

        class Regression(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = make_model()
            def forward(self, x, labels=None):
                output = self.layers(x)
                return {"loss": torch.nn.functional.mse_loss(output, labels), "logits": output}

        more = {"ddp_backend": "smddp"} if size > 1 else {}
        arguments = TrainingArguments(
            output_dir=os.path.join(os.environ["WORK"], "out"), use_cpu=True, per_device_train_batch_size=8 // size,
            num_train_epochs=2, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", report_to=[], seed=3,
            save_strategy="no", max_grad_norm=0.0, **more,
        )
        data = [{"x": x, "labels": y} for x, y in zip(inputs, targets)]
        trainer = Trainer(model=Regression(), args=arguments, train_dataset=data)
        trainer._get_train_sampler = lambda *a, **k: torch.utils.data.SequentialSampler(data)
        trainer.train()
        backend = torch.distributed.get_backend() if size > 1 else None
        write(weights=weights(trainer.model), backend=backend, steps=trainer.state.global_step)
    """
    two, one = both(tmp_path, script)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]
    assert two[0]["steps"] == one["steps"] == 4


LIGHTNING = """
import lightning
if size > 1:
    import smdistributed.dataparallel.torch.torch_smddp
from lightning.pytorch.strategies import DDPStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = make_model()
    def training_step(self, batch, number):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

strategy = DDPStrategy(process_group_backend="smddp") if size > 1 else "auto"
data = torch.utils.data.TensorDataset(inputs, targets)
sampler = torch.utils.data.DistributedSampler(data, size, rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=8 // size, sampler=sampler)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=size, strategy=strategy, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)
module = Module()
trainer.fit(module, loader)
write(weights=weights(module), backend=torch.distributed.get_backend() if size > 1 else None)
"""


def test_lightning(tmp_path):
    two, _ = both(tmp_path, LIGHTNING)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]


def test_the_model_parallel_strategy_of_lightning(tmp_path):
    """PyTorch's own tensor parallelism, over this library's backend."""
    script = LIGHTNING.replace(
        "    def training_step",
        """    def configure_model(self):
        if size > 1:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
            parallelize_module(self.layers, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    def training_step""",
    ).replace("DDPStrategy(", "ModelParallelStrategy(tensor_parallel_size=2, data_parallel_size=1, ")
    script = script.replace("import DDPStrategy", "import ModelParallelStrategy")
    # Both ranks have all data.
    script = script.replace("(data, size, rank, shuffle", "(data, 1, 0, shuffle").replace("8 // size", "8")
    script = script.replace(
        "write(weights=weights(module)",
        """whole = [getattr(each.data, "full_tensor", each.data.clone)() for each in module.parameters()]
write(weights=[float(number) for each in whole for number in each.flatten()]""",
    )
    two, _ = both(tmp_path, script)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]


def test_fully_sharded_parameters_of_lightning(tmp_path):
    """FSDP2, which also trains on CPUs; `FSDPStrategy` is FSDP1."""
    script = LIGHTNING.replace(
        "    def training_step",
        """    def configure_model(self):
        if size > 1:
            from torch.distributed.fsdp import fully_shard
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.layers[0], self.layers[2], self.layers):
                fully_shard(layer, mesh=mesh)
    def training_step""",
    ).replace("DDPStrategy(", "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, ")
    script = script.replace("import DDPStrategy", "import ModelParallelStrategy")
    script = script.replace(
        "write(weights=weights(module)",
        """shards = sum(getattr(each, "to_local", each.detach)().numel() for each in module.parameters())
whole = [getattr(each.data, "full_tensor", each.data.clone)() for each in module.parameters()]
write(shards=shards, weights=[float(number) for each in whole for number in each.flatten()]""",
    )
    two, one = both(tmp_path, script)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]
    assert sum(each["shards"] for each in two) == one["shards"]
    assert max(each["shards"] for each in two) < one["shards"]


@needs_two_gpus
def test_the_fsdp_strategy_of_lightning(tmp_path):
    """FSDP1 of PyTorch, which refuses CPUs as Lightning's strategy does."""
    script = LIGHTNING.replace(
        "    def training_step",
        """    def on_train_end(self):
        # Rank 0 gets the whole state.
        state = self.trainer.strategy.lightning_module_state_dict()
        self.whole = [float(number) for name in sorted(state) for number in state[name].flatten()]
        self.shard = sum(each.numel() for each in self.trainer.model.parameters())
    def training_step""",
    ).replace("DDPStrategy(", "FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type='full', ")
    script = script.replace("import DDPStrategy", "import FSDPStrategy").replace(
        'accelerator="cpu"', 'accelerator="gpu"'
    )
    script = script.replace("weights=weights(module)", "weights=module.whole, shard=module.shard")
    two = run(tmp_path, script, CUDA_VISIBLE_DEVICES=VISIBLE_GPUS)
    (one,) = run(tmp_path, script, ranks=1, CUDA_VISIBLE_DEVICES=VISIBLE_GPUS)
    assert [each["backend"] for each in two] == ["smddp", "smddp"]
    assert max(each["shard"] for each in two) < one["shard"]
    assert two[0]["weights"] == pytest.approx(one["weights"], abs=1e-5)


def test_tensor_parallelism_of_smp_in_a_module_of_lightning(tmp_path):
    """Lightning starts no processes and wraps nothing: each rank has one device, and the module calls a step function."""
    script = """
        import lightning
        import smdistributed.modelparallel.torch as smp
        smp.init({"tensor_parallel_degree": size, "ddp": size > 1, "prescaled_batch": True, "microbatches": 2})

        @smp.step
        def train(model, x, y):
            loss = torch.nn.functional.mse_loss(model(x), y)
            model.backward(loss)
            return loss

        class Module(lightning.LightningModule):
            automatic_optimization = False
            def __init__(self):
                super().__init__()
                with smp.tensor_parallelism():
                    layers = make_model()
                self.layers = smp.DistributedModel(layers)
            def training_step(self, batch, number):
                # That of Lightning passes a closure, which `smp.DistributedOptimizer` refuses.
                optimizer = self.optimizers(use_pl_optimizer=False)
                loss = train(self.layers, *batch).reduce_mean()
                optimizer.step()
                optimizer.zero_grad()
                return loss
            def configure_optimizers(self):
                return smp.DistributedOptimizer(torch.optim.SGD(self.layers.parameters(), lr=0.1))

        data = torch.utils.data.TensorDataset(inputs, targets)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, strategy="auto", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
        divided = sum(module.layers.is_distributed_parameter(each) for each in module.layers.parameters())
        whole = module.layers.state_dict()
        write(weights=[float(number) for each in whole.values() for number in each.flatten()], divided=divided)
    """
    two, one = both(tmp_path, script)
    assert [each["divided"] for each in two] == [2, 2]
    assert one["divided"] == 0


def test_distributed_checkpoint(tmp_path):
    script = """
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, StateDictOptions
        folder = os.path.join(os.environ["WORK"], "checkpoint")
        full = StateDictOptions(full_state_dict=True)
        if size > 1:
            import smdistributed.dataparallel.torch.torch_smddp
            dist.init_process_group("smddp")
            mesh = init_device_mesh("cpu", (size,))
            model = fully_shard(make_model(), mesh=mesh)
            before = [number for each in get_model_state_dict(model, options=full).values() for number in each.flatten().tolist()]
            dcp.save(get_model_state_dict(model), checkpoint_id=folder)
            other = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)), mesh=mesh)
            state = get_model_state_dict(other)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(other, state)
            loaded = [parameter.full_tensor() for parameter in other.parameters()]
            write(weights=[float(number) for each in loaded for number in each.detach().flatten()], shards=len(
                [name for name in os.listdir(folder) if name.endswith(".distcp")]))
            dist.destroy_process_group()
        else:
            # One process reads what the two have written.
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
            state = model.state_dict()
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state)
            assert weights(model) == weights(make_model())
            write(weights=weights(model))
    """
    two, _ = both(tmp_path, script)
    assert [each["shards"] for each in two] == [2, 2]


def test_zero_redundancy_optimizer(tmp_path):
    script = """
        import torch.distributed as dist
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = make_model()
        if size > 1:
            import smdistributed.dataparallel.torch.torch_smddp
            dist.init_process_group("smddp")
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        else:
            wrapped, optimizer = model, torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(inputs[rank::size]), targets[rank::size]).backward()
            optimizer.step()
        states = sum(len(each) for each in (optimizer.optim if size > 1 else optimizer).state.values())
        write(weights=weights(model), states=states)
    """
    two, one = both(tmp_path, script)
    # Each rank has a part of the states.
    assert sum(each["states"] for each in two) == one["states"]
    assert all(each["states"] for each in two)


def test_sparse_all_to_all_with_gradients(tmp_path):
    """As TorchRec divides embeddings: each rank looks rows of its table up for the other one, numbers of rows differ."""
    script = """
        import torch.distributed as dist
        from torch.distributed.nn.functional import all_to_all_single
        import smdistributed.dataparallel.torch.torch_smddp
        if size > 1:
            dist.init_process_group("smddp")
        torch.manual_seed(0)
        full = torch.randn(10, 4)
        bags = {0: [0, 7, 7, 2], 1: [9, 1, 3, 8, 5, 0]}
        if size > 1:
            table = torch.nn.Parameter(full[rank * 5 : rank * 5 + 5].clone())
            wanted = [torch.tensor([row - 5 * to for row in bags[rank] if row // 5 == to]) for to in range(size)]
            sends = torch.tensor([len(each) for each in wanted])
            receives = torch.empty_like(sends)
            dist.all_to_all_single(receives, sends)
            asked = torch.empty(int(receives.sum()), dtype=torch.int64)
            dist.all_to_all_single(asked, torch.cat(wanted), receives.tolist(), sends.tolist())
            rows = torch.empty(len(bags[rank]), 4)
            rows = all_to_all_single(rows, table[asked], sends.tolist(), receives.tolist())
            loss = rows.square().sum() * (rank + 1)
            loss.backward()
            both_parts = [torch.empty(5, 4) for _ in range(size)]
            dist.all_gather(both_parts, table.grad)
            gradient = torch.cat(both_parts)
            dist.destroy_process_group()
        else:
            table = torch.nn.Parameter(full)
            sum((table[torch.tensor(bag)].square().sum() * (each + 1) for each, bag in bags.items())).backward()
            gradient = table.grad
        write(weights=gradient.flatten().tolist())
    """
    both(tmp_path, script)
