"""A language model of bytes on the sources of Python's own library, with layers that several ranks share.

smdrun -n 2 examples/tensor_parallel_gpt.py
smdrun -n 4 examples/tensor_parallel_gpt.py --partitions 2              # and a pipeline
smdrun -n 4 examples/tensor_parallel_gpt.py --optimize speed --prescaled  # and two replicas
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--degree", type=int, default=2, help="ranks that share a layer")
parser.add_argument("--partitions", type=int, default=1)
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--optimize", default="memory", choices=("memory", "speed"))
parser.add_argument("--prescaled", action="store_true", help="all ranks of a tensor-parallel group get the same batch")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--batch", type=int, default=16, help="sequences for each data-parallel rank and step")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

smp.init(
    {
        "tensor_parallel_degree": options.degree,
        "partitions": options.partitions,
        "microbatches": options.microbatches if options.partitions > 1 else 1,
        "optimize": options.optimize,
        "prescaled_batch": options.prescaled,
        "ddp": True,
    }
)
torch.manual_seed(0)

model = smp.nn.DistributedTransformerLMHead(
    num_layers=options.layers,
    num_attention_heads=4,
    attention_head_size=options.width // 4,
    hidden_size=options.width,
    intermediate_size=4 * options.width,
    vocab_size=256,
    num_positions=options.length,
    attention_dropout_prob=0.0,
    hidden_dropout_prob=0.0,
    causal_mask_size=options.length,
    use_normal_initialization=True,
    pre_layernorm=True,
    post_layernorm=False,
)
model = smp.DistributedModel(model)


@smp.step
def train_step(model, ids):
    loss, _ = model((ids, None, None, None, ids))
    model.backward(loss)
    return loss


paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

# The ranks of a tensor-parallel group share one batch, or each has its own.
reader = smp.rdp_rank() if options.prescaled else smp.dp_rank()
count = options.batch * options.degree if options.prescaled else options.batch
generator = torch.Generator().manual_seed(reader)
optimizer = None
began = time.perf_counter()
for step in range(options.steps):
    starts = torch.randint(len(text) - options.length, (count, 1), generator=generator)
    ids = text[starts + torch.arange(options.length)].long().to(device)
    loss = train_step(model, ids).reduce_mean()
    if optimizer is None:
        # Created after the first step, which partitions the model: then a rank knows its local parameters.
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.local_parameters(), lr=2e-3))
    smp.clip_grad_norm_(model.local_parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack(smp.allgather(loss.detach().cpu(), smp.DP_GROUP)).mean()
    if smp.rank() == 0 and (step % 10 == 0 or step == options.steps - 1):
        print(f"step {step}: {mean / 0.6931:.3f} bits a byte")

held = sum(parameter.numel() for parameter in model.local_parameters())
whole = sum(tensor.numel() for name, tensor in model.state_dict().items() if name != "lm_head.weight")
if smp.rank() == 0:
    seconds = time.perf_counter() - began
    print(f"rank 0 holds {held} of {whole} parameters; {options.steps / seconds:.1f} steps a second")
