"""Train k3-mini, the small K3 that ships with the project, on one GPU, in pieces of a few minutes.

    python scripts/mini_data.py DATA                       # once, on any machine
    python scripts/train_mini.py DATA OUT --seconds 560 --of 1120 --state k3-mini.pt
    python scripts/train_mini.py DATA OUT --seconds 560 --of 1120 --state k3-mini.pt   # goes on

The model is `nanok3.model.forward` in the `TRAIN` reading: there is no second description. The
parameters are the fields of `nanok3.weight_table.table` in float32; the forward pass sees them as
they will be stored (bf16, experts in MXFP4, both straight-through), so the saved file loses
nothing. Matrices are trained with Muon, the rest with Adam; the schedule follows the clock (`--of`
seconds in all). The routers' correction biases follow the load, without a loss term.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from nanok3 import model, weight_table
from nanok3.cache import Cache
from nanok3.config import ModelConfig, load_config
from nanok3.ops import TRAIN, Fresh, Ops
from nanok3.reference import attn_res, experts, kda, mla, mxfp4
from nanok3.reference.router import route_value
from nanok3.step import Step, buffer_dtypes, widths, with_parts
from nanok3.weights import build

MODEL_DIR = Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini"
ROW = 1024  # tokens of a training row
PROMPT_WEIGHT = 0.1  # of the loss on what the assistant does not say
SHARD_BYTES = 8 << 20


# ---- parameters ----


def initial(field: weight_table.Field, config: ModelConfig, generator: torch.Generator) -> Tensor:
    """A fresh parameter; linear layers at 1 / sqrt(inputs), those that add to a stream smaller."""
    kind, shape = field.name.rpartition(".")[2], field.shape

    def normal(std: float) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    if kind in ("norm", "q_norm", "kv_norm", "o_norm"):
        return torch.ones(shape)
    if kind in ("score", "bias"):
        return torch.zeros(shape)
    if kind == "A_log":
        return torch.full(shape, 0.3)
    if kind == "dt_bias":  # log-decays from about -0.01 to -1.3 a token
        return torch.rand(shape, generator=generator) * 5.0 - 6.0
    if kind == "conv":
        taps = normal(0.2)
        taps[:, -1] += 0.6
        return taps
    if kind == "embed":
        return normal(0.3)
    small = 0.4 if kind in ("o_proj", "down", "shared_down", "latent_up") else 1.0
    return normal(small / math.sqrt(shape[-1]))


def as_stored(field: weight_table.Field, parameter: Tensor, quantize: bool = True) -> Tensor:
    """What the checkpoint will hold, in the dtype of the forward pass; gradients pass straight."""
    if field.stored == "F32":
        return parameter
    if field.kind == "product":
        return parameter.to(torch.bfloat16).float()
    if field.kind == "experts" and quantize:
        with torch.no_grad():
            rounded = mxfp4.dequantize(*mxfp4.quantize(parameter), torch.float32)
        parameter = parameter + (rounded - parameter).detach()
    return parameter.to(torch.bfloat16)


# ---- forward ----


def fuse() -> None:
    """Compiles the value functions of the heavy ops: the same text, three times the speed."""
    for module, name in (
        (kda, "kda_value"),
        (attn_res, "attn_res_value"),
        (experts, "experts_grouped"),
        (mla, "mla_expanded_value"),
    ):
        setattr(module, name, torch.compile(getattr(module, name), dynamic=False))
    torch._dynamo.config.cache_size_limit = 64


def forward(config: ModelConfig, fields: dict[str, Tensor], ids: Tensor, ops: Ops) -> Tensor:
    """ids [R, Q] -> logits [R * Q, V] f32."""
    device, (num_reqs, num_rows) = ids.device, ids.shape
    kda = config.linear_attn_config
    total = ids.numel()
    rows = torch.arange(total, device=device)
    step = Step(
        input_ids=ids.reshape(-1),
        positions=rows % num_rows,
        slot_mapping=rows,
        block_table=torch.arange(num_reqs, device=device).unsqueeze(1),
        state_slots=torch.arange(num_reqs, device=device),
        logit_rows=rows,
        block_size=num_rows,
    )
    bf16, special = torch.bfloat16, buffer_dtypes(torch.bfloat16)
    buffers: dict[str, Any] = {name: Fresh(special.get(name, bf16)) for name in widths(config)}
    buffers["streams"] = [Fresh(bf16) for _ in range(config.num_res_blocks)]
    conv = (num_reqs, kda.short_conv_kernel_size - 1, 3 * kda.width)
    state = (num_reqs, kda.num_heads, kda.head_dim, kda.head_dim)
    latent = (total, config.latent_width)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> Any:
        return [Fresh(dtype, torch.zeros(shape, dtype=dtype, device=device)) for _ in range(count)]

    cache = Cache(
        conv_state=zeros(conv, bf16, len(config.kda_layer_ids)),
        state=zeros(state, torch.float32, len(config.kda_layer_ids)),
        latent=zeros(latent, bf16, len(config.mla_layer_ids)),
    )
    buf = with_parts(buffers)
    model.forward(config, build(config, fields.__getitem__), cache, step, buf, ops)
    return buf.logits.value


class LoadBalance:
    """A route op that also counts what was chosen, and the bias update that follows from it."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self.names = [
            f"layers.{i}.moe.bias" for i in range(config.num_hidden_layers) if config.is_moe(i)
        ]
        self.counts = torch.zeros(len(self.names), config.num_experts, device=device)
        self.layer = 0

    def route(self, logits: Any, w: Any, *, out: tuple[Any, Any]) -> None:
        ids, chosen = route_value(logits[:], w)
        out[0].copy_(ids)
        out[1].copy_(chosen)
        flat = ids.reshape(-1)
        self.counts[self.layer].index_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
        self.layer = (self.layer + 1) % len(self.names)

    @torch.no_grad()
    def update(self, parameters: dict[str, Tensor], rate: float) -> float:
        """Moves each bias towards even loads; returns the largest load over the mean."""
        load = self.counts / self.counts.mean(-1, keepdim=True)
        for name, row in zip(self.names, load, strict=True):
            bias = parameters[name]
            bias += rate * torch.sign(1.0 - row)
            bias -= bias.mean()
        self.counts.zero_()
        return float(load.max())


# ---- optimiser ----


def orthogonalize(m: Tensor) -> Tensor:
    """[N, rows, columns] -> the nearest matrices with singular values near 1 (Newton-Schulz)."""
    tall = m.shape[-2] > m.shape[-1]
    x = (m.transpose(-1, -2) if tall else m).to(torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon:
    """Momentum whose update is orthogonalised; scaled to the root mean square of an Adam step."""

    def __init__(self, parameters: list[Tensor], momentum: float = 0.95) -> None:
        self.groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in parameters:
            self.groups[tuple(p.shape)].append(p)
        self.momentum = momentum
        self.state = {
            s: torch.zeros(len(g), *s, device=g[0].device) for s, g in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        for shape, group in self.groups.items():
            grads = torch.stack([p.grad for p in group])  # type: ignore[misc]
            buffer = self.state[shape].lerp_(grads, 1 - self.momentum)
            update = grads.lerp(buffer, self.momentum).reshape(-1, *shape[-2:])
            update = orthogonalize(update) * (0.2 * math.sqrt(max(shape[-2:])))
            for p, u in zip(group, update.reshape(len(group), *shape), strict=True):
                p.mul_(1 - rate * decay).sub_(u, alpha=rate)


# ---- data ----


class Data:
    """Rows of ROW + 1 tokens, with the weight of each token's loss."""

    def __init__(self, folder: Path, device: str, prefix: str = "") -> None:
        packed = np.load(folder / f"{prefix}data.npz")

        def load(name: str, dtype: Any) -> Tensor:
            return torch.from_numpy(packed[name].astype(dtype)).to(device)

        self.text = load("text", np.int16)
        self.dialogue = load("dialogue", np.int16)
        self.mask = load("mask", np.uint8)
        starts = load("starts", np.int64)
        self.starts = starts[starts < len(self.dialogue) - ROW - 1]
        self.offsets = torch.arange(ROW + 1, device=device)

    def batch(self, num_rows: int, text_share: float) -> tuple[Tensor, Tensor]:
        """-> ids [R, ROW + 1] i64, weights [R, ROW] of the token that follows each."""
        device = self.text.device
        num_text = round(num_rows * text_share)
        at = torch.randint(len(self.text) - ROW - 1, (num_text, 1), device=device)
        ids = [self.text[at + self.offsets].long()]
        weights = [torch.ones(num_text, ROW, device=device)]
        pick = torch.randint(len(self.starts), (num_rows - num_text,), device=device)
        index = self.starts[pick].unsqueeze(1) + self.offsets
        ids.append(self.dialogue[index].long())
        weights.append(self.mask[index[:, 1:]].float() * (1 - PROMPT_WEIGHT) + PROMPT_WEIGHT)
        return torch.cat(ids), torch.cat(weights)


# ---- training ----


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    return cross_entropy(logits, ids[:, 1:].reshape(-1), reduction="none").view(len(ids), ROW)


@torch.no_grad()
def held_out(
    config: ModelConfig,
    table: dict[str, weight_table.Field],
    parameters: dict[str, Tensor],
    data: Data,
) -> dict[str, float]:
    """Loss a token on held-out rows: text, and what the assistant says, with and without MXFP4."""
    torch.manual_seed(0)
    rows = [data.batch(16, 0.5) for _ in range(8)]
    result = {}
    for label, quantize in (("", True), ("_unquantised", False)):
        fields = {n: as_stored(table[n], p, quantize) for n, p in parameters.items()}
        sums = torch.zeros(4, device=data.text.device)
        for ids, weight in rows:
            loss = losses(forward(config, fields, ids[:, :-1], TRAIN), ids)
            said = (weight[8:] > 0.5).float()
            sums += torch.stack(
                [
                    loss[:8].sum(),
                    torch.tensor(loss[:8].numel()).to(sums),
                    (loss[8:] * said).sum(),
                    said.sum(),
                ]
            )
        result[f"text{label}"] = float(sums[0] / sums[1])
        result[f"said{label}"] = float(sums[2] / sums[3])
    return result


def rate_at(progress: float, peak: float) -> float:
    """Warm up over 1 %, hold to 55 %, then down to nothing."""
    if progress < 0.01:
        return peak * (progress / 0.01)
    return peak * min(1.0, max(0.0, (1.0 - progress) / 0.45))


def text_share_at(progress: float) -> float:
    """A third text at first, nearly all dialogues at the end: there is far less text."""
    return 0.33 - 0.27 * min(1.0, progress / 0.6)


def save(config: ModelConfig, fields: dict[str, Tensor], folder: Path) -> None:
    """The official layout: shards of a few MB and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, tensor in weight_table.to_checkpoint(
        config, {n: f.float().cpu() for n, f in fields.items()}
    ):
        size += tensor.nbytes
        total += tensor.nbytes
        if size > SHARD_BYTES:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    weight_map = {}
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0))


def train(args: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        fuse()
    device, config = args.device, load_config(MODEL_DIR)
    table = {field.name: field for field in weight_table.table(config)}
    generator = torch.Generator().manual_seed(1)
    parameters = {n: initial(f, config, generator).to(device) for n, f in table.items()}
    balance = LoadBalance(config, device)
    for name, p in parameters.items():
        p.requires_grad_(name not in balance.names)
    ops = replace(TRAIN, route=balance.route)
    muon_names = [
        n
        for n, p in parameters.items()
        if p.dim() >= 2 and n not in ("embed", "lm_head") and "conv" not in n
    ]
    muon = Muon([parameters[n] for n in muon_names])
    rest = [p for n, p in parameters.items() if p.requires_grad and n not in muon_names]
    adam = torch.optim.AdamW(
        rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
    )
    step, before, history = 0, 0.0, []
    state_file = Path(args.state)
    if state_file.exists():
        saved = torch.load(state_file, map_location=device)
        for name, p in parameters.items():
            p.data.copy_(saved["parameters"][name])
        muon.state, step, before = saved["muon"], saved["step"], saved["elapsed"]
        history = saved["history"]
        adam.load_state_dict(saved["adam"])
    torch.manual_seed(1000 + step)
    data, test = Data(args.data, device), Data(args.data, device, "heldout_")

    start = time.monotonic()
    elapsed = 0.0
    while elapsed < args.seconds:
        progress = min(1.0, (before + elapsed) / args.of)
        ids, weight = data.batch(args.rows, text_share_at(progress))
        fields = {n: as_stored(table[n], p) for n, p in parameters.items()}
        loss = losses(forward(config, fields, ids[:, :-1], ops), ids)
        ((loss * weight).sum() / weight.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in parameters.values() if p.grad is not None], 1.0
        )
        rate = rate_at(progress, args.rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate, 0.02)
        for p in parameters.values():
            p.grad = None
        worst = balance.update(parameters, 0.002 * rate / args.rate)
        step += 1
        elapsed = time.monotonic() - start
        if step % 50 == 0 or step < 4:
            said = float((loss.detach() * (weight > 0.5)).sum() / (weight > 0.5).sum())
            history.append([step, round(before + elapsed, 1), round(said, 4)])
            tokens = step * args.rows * ROW
            print(
                f"step {step} {before + elapsed:.0f} s {tokens / 1e6:.0f} M tokens loss {said:.3f} "
                f"norm {float(norm):.2f} load {worst:.2f} rate {rate:.5f} "
                f"{torch.cuda.max_memory_allocated() / 1e9 if device == 'cuda' else 0:.0f} GB",
                flush=True,
            )
    with torch.compiler.set_stance("force_eager"):  # other shapes, not worth compiling
        result = held_out(config, table, parameters, test)
    print("held out", {k: round(v, 4) for k, v in result.items()})
    args.out.mkdir(parents=True, exist_ok=True)
    stored = {n: p.detach() for n, p in parameters.items()}
    save(config, stored, args.out)
    summary = {
        "steps": step,
        "tokens": step * args.rows * ROW,
        "seconds": round(before + elapsed),
        **result,
    }
    (args.out / "training.json").write_text(json.dumps({**summary, "history": history}))
    torch.save(
        {
            "parameters": stored,
            "muon": muon.state,
            "adam": adam.state_dict(),
            "step": step,
            "elapsed": before + elapsed,
            "history": history,
        },
        state_file,
    )


def main(run: Callable[[argparse.Namespace], None] = train) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder made by mini_data.py")
    parser.add_argument("out", type=Path, help="where the checkpoint goes")
    parser.add_argument("--seconds", type=float, required=True, help="of this run")
    parser.add_argument("--of", type=float, required=True, help="seconds of all runs together")
    parser.add_argument("--state", default="k3-mini.pt", help="to go on from, and to leave behind")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
