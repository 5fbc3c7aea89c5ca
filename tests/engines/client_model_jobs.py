"""Libraries that divide models, over the backend ``smddp``: torchtitan and TorchRec (``make test-clients``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from clients import both, needs_libraries

pytestmark = pytest.mark.timeout(400)


@needs_libraries("torchtitan")
@pytest.mark.parametrize(("shards", "tensor"), [(2, 1), (1, 2)], ids=["FSDP", "tensor parallelism"])
def test_torchtitan_parallelizes_a_llama(shards, tensor, tmp_path):
    """torchtitan divides the world's mesh by its own code, with groups of the backend `fake` for sizes of 1."""
    script = f"""
        import torch._utils
        # Where there is no accelerator torchtitan takes CUDA.
        torch._utils._get_available_device_type = lambda: "cpu"
        import torch.distributed as dist
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs
        from torchtitan.models.llama3.infra.parallelize import parallelize_llama

        job = JobConfig()
        job.training.seq_len = 16
        job.training.mixed_precision_param = "float32"
        job.activation_checkpoint.mode = "none"
        job.parallelism.disable_loss_parallel = True
        torch.manual_seed(0)
        model = Transformer(TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, max_seq_len=32))
        with torch.no_grad():
            model.init_weights()
        data_rank, data_size = (rank // {tensor}, {shards}) if size > 1 else (0, 1)
        if size > 1:
            import smdistributed.dataparallel.torch.torch_smddp
            dist.init_process_group("smddp")
            sizes = dict(dp_replicate=1, dp_shard={shards}, cp=1, tp={tensor}, pp=1, ep=1, etp=1)
            model = parallelize_llama(model, ParallelDims(**sizes, world_size=size), job)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(0, 64, (4, 17), generator=generator).chunk(data_size)[data_rank]
            optimizer.zero_grad()
            outputs = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            # torchtitan adds up the gradients of shards: its trainer divides the loss by the tokens of all ranks.
            (loss / (4 * 16)).backward()
            optimizer.step()
        own = sum(getattr(each, "to_local", each.detach)().numel() for each in model.parameters())
        whole = [getattr(each.data, "full_tensor", each.data.clone)() for each in model.parameters()]
        write(own=own, weights=[float(number) for each in whole for number in each.flatten()])
    """
    two, one = both(tmp_path, script)
    assert all(each["own"] < one["own"] for each in two)


@needs_libraries("torchrec", "fbgemm_gpu")
def test_torchrec_divides_embeddings(tmp_path):
    """One table on rank 1, the rows of another one on both: its all-to-all of keys, lengths and rows, forward and backward."""
    script = """
        import torch.distributed as dist
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                tables = [
                    EmbeddingBagConfig(name="readers", embedding_dim=8, num_embeddings=20, feature_names=["reader"]),
                    EmbeddingBagConfig(name="articles", embedding_dim=8, num_embeddings=30, feature_names=["article"]),
                ]
                self.bags = EmbeddingBagCollection(device=torch.device("cpu"), tables=tables)
                self.over = torch.nn.Linear(16, 1)
            def forward(self, features):
                return self.over(self.bags(features).values())

        torch.manual_seed(0)
        model = Model()
        # TorchRec initializes new tables with other random numbers.
        tables = {name: bag.weight.detach().clone() for name, bag in model.bags.embedding_bags.items()}
        if size > 1:
            import smdistributed.dataparallel.torch.torch_smddp
            dist.init_process_group("smddp")
            places = {"readers": table_wise(rank=1), "articles": row_wise()}
            plan = construct_module_sharding_plan(
                model.bags, places, local_size=size, world_size=size, device_type="cpu")
            model = DistributedModelParallel(
                model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
                plan=ShardingPlan(plan={"bags": plan}), sharders=[EmbeddingBagCollectionSharder()])
            for name, sharded in model.state_dict().items():
                if "embedding_bags" in name:
                    for shard in sharded.local_shards():
                        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                        shard.tensor.detach().copy_(tables[name.split(".")[-2]][first : first + rows])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(5)
        losses = []
        for _ in range(4):
            lengths = torch.randint(0, 4, (2, 8), generator=generator)
            ids = [torch.randint(0, rows, (int(each.sum()),), generator=generator) for rows, each in zip((20, 30), lengths)]
            mine = [values.split(each.tolist()) for values, each in zip(ids, lengths)]
            own = slice(rank * 8 // size, (rank + 1) * 8 // size)
            features = KeyedJaggedTensor(
                keys=["reader", "article"], lengths=lengths[:, own].flatten(),
                values=torch.cat([each for values in mine for each in values[own]]))
            loss = model(features).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            if size > 1:
                dist.all_reduce(mean)
            losses.append(float(mean) / size)
        write(weights=weights(model.over if size == 1 else model.module.over), losses=losses,
              parameters=sum(each.numel() for each in model.parameters()))
    """
    two, one = both(tmp_path, script)
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"] == pytest.approx(one["losses"], abs=2e-6)
    assert all(each["parameters"] < one["parameters"] for each in two)
