"""A Llama of bytes on the sources of Python's own library; parameters, gradients and optimizer states are sharded.

smdrun -n 4 examples/sharded_llama.py --degree 4
smdrun -n 4 examples/sharded_llama.py --degree 2 --precision bf16      # two sharding groups, in bfloat16
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--degree", type=int, default=2, help="ranks that hold one model together")
parser.add_argument("--precision", default="fp32", choices=("fp32", "fp16", "bf16"))
parser.add_argument("--microbatches", type=int, default=2)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--batch", type=int, default=8, help="sequences for each replica and step")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

config = {
    "ddp": True,
    "sharded_data_parallel_degree": options.degree,
    "sdp_param_persistence_threshold": 1000,
    "sdp_gradient_clipping": 1.0,
    "microbatches": options.microbatches,
}
if options.precision != "fp32":
    config[options.precision] = True
smp.init(config)
if torch.cuda.is_available():
    torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda", smp.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)

# Layers are allocated one after the other, and each rank keeps only its shard.
with smp.delay_param_initialization():
    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=options.width,
            intermediate_size=3 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=options.length,
        )
    )
model = smp.DistributedModel(module)
scales = {"dynamic_loss_scale": True, "init_scale": 2.0**16} if options.precision == "fp16" else {}
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), **scales)


@smp.step
def train_step(model, tokens):
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
generator = torch.Generator().manual_seed(smp.dp_rank())
start = time.perf_counter()
for step in range(options.steps):
    places = torch.randint(len(text) - options.length - 1, (options.batch,), generator=generator)
    tokens = torch.stack([text[place : place + options.length + 1] for place in places.tolist()]).long().to(device)
    optimizer.zero_grad()
    loss = train_step(model, tokens).reduce_mean()
    # Also clips gradients.
    optimizer.step()
    if smp.rank() == 0 and (step % 20 == 0 or step == options.steps - 1):
        print(f"step {step}: loss {float(loss):.3f}, {time.perf_counter() - start:.1f} s", flush=True)

own = sum(parameter.numel() for parameter in model.parameters())
whole = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
print(f"rank {smp.rank()} keeps {own} of {whole} parameters", flush=True)
