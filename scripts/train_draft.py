"""Train k3-mini's DSpark draft on one GPU, in a few minutes.

    python scripts/mini_data.py DATA --tokens 30M          # once, on any machine
    python scripts/train_draft.py DATA OUT --seconds 230

The draft is `nanok3.spec.draft` and its target `nanok3.model.forward`, the texts that are served;
only attention has another form here, which shares a sequence's context among its anchors. Hidden
states are made on the fly: the target runs once over a batch of dialogues and gives the taps of
every token and its distribution after it. At random anchors the draft runs a window over the
context before the anchor. Loss of row i, with the tokens of the dialogue as those before it:

    exp(-i / 4) (0.1 cross entropy + 0.9 |p - q|_1 + 1.0 BCE(c, sum min(p, q)))

p the target's distribution, q the draft's, c its confidence. OUT gets the files in Inferact's
layout and `training.json` with the rates at which drafts stand on held-out dialogues.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from train_mini import MODEL_DIR, Muon, rate_at

from nanok3 import model
from nanok3.cache import allocate_cache
from nanok3.checkpoint import Checkpoint
from nanok3.config import ModelConfig, load_config
from nanok3.ops import PREFILL, TRAIN, Fresh
from nanok3.reference.draft import confidence_logits, markov_value
from nanok3.reference.draft_attention import DraftMLAWeights, rows_of, softmax
from nanok3.reference.numerics import acc
from nanok3.reference.rope import rotate
from nanok3.spec import draft
from nanok3.spec.config import DraftConfig, draft_config
from nanok3.spec.draft import DraftBuffers, Window, widths
from nanok3.spec.draft_weights import (
    EMBED,
    DraftWeights,
    build_draft,
    draft_table,
    draft_to_checkpoint,
    load_draft,
)
from nanok3.step import Step, allocate_buffers
from nanok3.weight_table import Field, Filler, expected_tensors
from nanok3.weights import Weights, build

ROW = 512  # tokens of a training row, the beginning of a dialogue
SAID_SHARE = 0.85  # of the anchors are before or among the assistant's tokens


def config_json(target: ModelConfig) -> dict[str, Any]:
    """The draft's config.json, in Inferact's format."""
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "torch_dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 480,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 96,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": 50000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": target.max_position_embeddings // 4,
            "rope_theta": 50000.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "num_target_layers": 5,
        "target_hidden_size": target.hidden_size,
        "target_num_hidden_layers": target.num_hidden_layers,
        "target_layer_ids": [1, 3, 5, 6, 7],
        "mask_token_id": target.vocab_size - 3,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "tie_word_embeddings": False,
    }


# ---- the target ----


def load_target(path: Path, dtype: torch.dtype, device: str) -> tuple[ModelConfig, Weights]:
    config = load_config(path)
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(config)})
    filler = Filler(config, dtype, device)
    checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)
    return config, build(config, filler.finish().__getitem__)


class Target:
    """The frozen model over whole rows: taps of every token, logits after it."""

    def __init__(self, path: Path, taps: tuple[int, ...], num_rows: int, device: str) -> None:
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.config, self.weights = load_target(path, self.dtype, device)
        self.taps, self.device = taps, device
        total = num_rows * ROW
        self.cache = allocate_cache(self.config, num_rows, num_rows, ROW, self.dtype, device)
        self.buffers = allocate_buffers(
            self.config, total, total, self.dtype, device, num_taps=len(taps)
        )

    @torch.no_grad()
    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [R, ROW] -> taps [R * ROW, n * C], logits [R * ROW, V]; valid until the next."""
        rows = torch.arange(ids.numel(), device=self.device)
        self.cache.conv_state.zero_()
        self.cache.state.zero_()
        step = Step(
            input_ids=ids.reshape(-1),
            positions=rows % ROW,
            slot_mapping=rows,
            block_table=torch.arange(len(ids), device=self.device).unsqueeze(1),
            state_slots=torch.arange(len(ids), device=self.device),
            logit_rows=rows,
            block_size=ROW,
        )
        ops = TRAIN if self.device == "cuda" else PREFILL
        model.forward(
            self.config, self.weights, self.cache, step, self.buffers, ops, taps=self.taps
        )
        return self.buffers.taps, self.buffers.logits


# ---- the draft, for training ----


def shared_attention(
    q: Any,
    kv: Any,
    w: DraftMLAWeights,
    cache: Any,
    block_table: Tensor,
    positions: Tensor,
    anchors: Tensor,
    block_size: int,
    causal: bool,
    window: int | None,
    *,
    out: Any,
) -> None:
    """`draft_attention_ref` where requests come in groups of equal size that share a block, a
    training row: the block is not copied for each of them. `block_table` [rows, 1]."""
    assert not causal and window is None, "k3-mini's draft sees everything"
    num_seqs, num_reqs = len(block_table), len(anchors)
    rank, heads, dim = w.kv_norm.shape[0], w.kv_b.shape[0], w.nope_dim
    own = rows_of(kv, w, positions).to(q.dtype).unflatten(0, (num_reqs, -1))  # [R, Q, W]
    num_rows = own.shape[1]
    context = cache[:].unflatten(0, (num_seqs, block_size))  # [N, S, W]
    x = acc(q[:]).unflatten(-1, (heads, -1))
    turned = rotate(x[..., dim:], positions, w.rope)
    latent = torch.einsum("thn,hnl->thl", x[..., :dim], acc(w.kv_b[:, :dim]))
    latent = (torch.cat([latent, turned], dim=-1) * w.softmax_scale).to(q.dtype)
    grouped = latent.unflatten(0, (num_seqs, -1)).transpose(1, 2)  # [N, H, A * Q, W]
    far = acc(grouped @ context.unsqueeze(1).transpose(-1, -2))  # [N, H, A * Q, S]
    seen = torch.arange(block_size, device=anchors.device) < anchors.unsqueeze(-1)  # [R, S]
    seen = seen.repeat_interleave(num_rows, 0).unflatten(0, (num_seqs, -1)).unsqueeze(1)
    single = latent.unflatten(0, (num_reqs, -1)).transpose(1, 2)  # [R, H, Q, W]
    near = acc(single @ own.unsqueeze(1).transpose(-1, -2))  # [R, H, Q, Q]
    near = near.unflatten(0, (num_seqs, -1)).transpose(1, 2).flatten(2, 3)  # [N, H, A * Q, Q]
    visible = torch.cat([seen, torch.ones_like(near[:1, :1], dtype=torch.bool).expand(
        num_seqs, 1, -1, -1)], dim=-1)  # fmt: skip
    p = softmax(torch.cat([far, near], dim=-1), visible).to(q.dtype)
    mixed = p[..., :block_size] @ context.unsqueeze(1)[..., :rank]  # [N, H, A * Q, L]
    p_own = p[..., block_size:].unflatten(2, (-1, num_rows)).transpose(1, 2).flatten(0, 1)
    mixed_own = p_own @ own.unsqueeze(1)[..., :rank]  # [R, H, Q, L]
    mixed_own = mixed_own.unflatten(0, (num_seqs, -1)).transpose(1, 2).flatten(2, 3)
    value = w.kv_b[:, dim:].to(q.dtype)
    out.copy_(torch.einsum("nhql,hvl->nqhv", mixed + mixed_own, value).flatten(0, 1).flatten(1))


OPS = replace(draft.REFERENCE, attention=shared_attention)


def window_rows(
    c: DraftConfig, w: DraftWeights, taps: Tensor, ids: Tensor, anchors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """taps [N * ROW, n * C], ids [N, ROW], anchors [N, A] -> hidden [N * A * Q, C], logits."""
    device = ids.device
    special = {"logits": torch.float32}
    buf: Any = DraftBuffers(**{name: Fresh(special.get(name, dtype)) for name in widths(c)})
    total = ids.numel()
    empty = torch.zeros(total, c.attention.cache_width, dtype=dtype, device=device)
    cache: Any = [Fresh(dtype, empty) for _ in c.layers]
    slots = torch.arange(total, device=device)
    draft.keep_context(w, taps, slots % ROW, slots, cache, buf, OPS)
    flat = anchors.flatten()
    tokens = torch.full((len(flat), c.block_size), c.mask_token_id, device=device)
    tokens[:, 0] = ids.gather(1, anchors).flatten()
    step = Window(
        input_ids=tokens.flatten(),
        positions=(flat[:, None] + torch.arange(c.block_size, device=device)).flatten(),
        anchors=flat,
        block_table=torch.arange(len(ids), device=device).unsqueeze(1),
        rows=torch.arange(tokens.numel(), device=device),
        block_size=ROW,
    )
    draft.window(c, w, cache, step, buf, OPS)
    return buf.x.value, buf.logits.value


@torch.no_grad()
def initial(field: Field, generator: torch.Generator) -> Tensor:
    kind, shape = field.name.rpartition(".")[2], field.shape
    if kind.endswith("norm"):
        return torch.ones(shape)
    if kind in ("w2", "bias"):
        return torch.zeros(shape)
    if kind == "weight":  # of the confidence
        return torch.zeros(shape)
    scale = 0.3 if kind in ("o_proj", "down") else 1.0
    return torch.randn(shape, generator=generator) * (scale / math.sqrt(shape[-1]))


# ---- data ----


class Dialogues:
    """Rows of ROW + Q tokens from where a dialogue begins, and which are the assistant's."""

    def __init__(self, folder: Path, device: str, ahead: int, prefix: str = "") -> None:
        packed = np.load(folder / f"{prefix}data.npz")
        self.ids = torch.from_numpy(packed["dialogue"].astype(np.int16)).to(device)
        self.said = torch.from_numpy(packed["mask"]).to(device)
        starts = torch.from_numpy(packed["starts"]).to(device)
        lengths = torch.diff(starts, append=torch.tensor([len(self.ids)], device=device))
        fits = starts < len(self.ids) - ROW - 1
        self.starts, self.lengths = starts[fits], lengths[fits]
        self.ahead = ahead
        self.offsets = torch.arange(ROW, device=device)

    def batch(self, num_rows: int, per_row: int) -> tuple[Tensor, Tensor, Tensor]:
        """-> ids [N, ROW], anchors [N, A] with `ahead` tokens after each in ids, and how many of
        those tokens are of the anchor's own dialogue [N, A]."""
        device = self.ids.device
        pick = torch.randint(len(self.starts), (num_rows,), device=device)
        index = self.starts[pick].unsqueeze(1) + self.offsets
        ids, said = self.ids[index].long(), self.said[index]
        end = self.lengths[pick].clamp(max=ROW).unsqueeze(1)  # tokens of the dialogue in the row
        inside = self.offsets < (end - 1).clamp(min=1, max=ROW - self.ahead)
        weight = torch.full_like(inside, 1 - SAID_SHARE, dtype=torch.float32)
        following = torch.cat([said[:, 1:], said[:, -1:]], 1)  # the assistant says the next token
        weight = weight.masked_fill(following > 0, SAID_SHARE).masked_fill(~inside, 0.0)
        anchors = torch.multinomial(weight, per_row, replacement=True)
        return ids, anchors, (end - 1 - anchors).clamp(min=0, max=self.ahead)


# ---- training ----


def targets(ids: Tensor, anchors: Tensor, logits: Tensor, ahead: int) -> tuple[Tensor, ...]:
    """Token before each window row and after it [N * A, Q], target's logits after it [N*A*Q, V]."""
    index = anchors.unsqueeze(-1) + torch.arange(ahead, device=ids.device)  # [N, A, Q]
    flat = index.flatten(1)
    before = ids.gather(1, flat).view(-1, ahead)
    after = ids.gather(1, (flat + 1).clamp(max=ROW - 1)).view(-1, ahead)
    rows = (torch.arange(len(ids), device=ids.device).unsqueeze(1) * ROW + flat).flatten()
    return before, after, logits[rows]


def row_losses(
    w: DraftWeights, hidden: Tensor, base: Tensor, before: Tensor, after: Tensor, theirs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> loss [N * A, Q], chance that a draft stands there [N * A, Q], whether argmaxes agree."""
    ahead = before.shape[1]
    features = w.markov.w1[before.flatten()]
    logits = markov_value(base, w.markov, before.flatten())
    p, q = theirs.softmax(-1), logits.softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)
    sure = confidence_logits(hidden, w.confidence, features)
    loss = (
        0.1 * cross_entropy(logits, after.flatten(), reduction="none")
        + 0.9 * (p - q).abs().sum(-1)
        + binary_cross_entropy_with_logits(sure, overlap.detach().clamp(0, 1), reduction="none")
    )
    same = theirs.argmax(-1) == logits.argmax(-1)
    return loss.view(-1, ahead), overlap.detach().view(-1, ahead), same.view(-1, ahead)


def as_served(parameters: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Rounded as the file will hold them; gradients pass straight."""
    return {n: p + (p.bfloat16().float() - p).detach() for n, p in parameters.items()} if (
        dtype == torch.float32
    ) else {n: p.to(dtype) for n, p in parameters.items()}  # fmt: skip


@torch.no_grad()
def held_out(
    c: DraftConfig, parameters: dict[str, Tensor], target: Target, data: Dialogues, num_rows: int
) -> dict[str, Any]:
    """Rates of the first i drafts standing, with the dialogue's own tokens before each."""
    torch.manual_seed(0)
    w = build_draft(
        c, as_served(parameters, target.dtype).__getitem__, target.weights.embed,
        target.weights.lm_head,
    )  # fmt: skip
    chances, greedy, conditional = [], [], []
    for _ in range(8):
        ids, anchors, num_real = data.batch(num_rows, 32)
        taps, logits = target.run(ids)
        hidden, base = window_rows(c, w, taps, ids, anchors, target.dtype)
        before, after, theirs = targets(ids, anchors, logits, c.block_size)
        _, overlap, same = row_losses(w, hidden, base, before, after, theirs)
        whole = (num_real.flatten() == c.block_size).nonzero().squeeze(-1)
        chances.append(overlap[whole].cumprod(-1))
        conditional.append(overlap[whole])
        greedy.append(same[whole].float().cumprod(-1))
    one, zero = torch.cat(chances).mean(0), torch.cat(greedy).mean(0)

    def rounded(values: Tensor) -> list[float]:
        return [round(v, 4) for v in values.tolist()]

    return {
        "stands_t1": rounded(one),
        "length_t1": round(1 + float(one.sum()), 3),
        "stands_t0": rounded(zero),
        "length_t0": round(1 + float(zero.sum()), 3),
        "overlap": rounded(torch.cat(conditional).mean(0)),
    }


def save(c: DraftConfig, raw: dict[str, Any], parameters: dict[str, Tensor], embed: Tensor,
         folder: Path) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    tensors = draft_to_checkpoint(c, parameters) | {EMBED: embed.to(torch.bfloat16)}
    tensors = {name: tensor.cpu() for name, tensor in sorted(tensors.items())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def train(args: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    raw = config_json(load_config(args.model))
    c = draft_config(raw)
    if problems := c.problems(load_config(args.model)):
        raise SystemExit("\n".join(problems))
    target = Target(args.model, c.taps, args.rows, args.device)
    embed, lm_head = target.weights.embed, target.weights.lm_head
    fields = {field.name: field for field in draft_table(c)}
    generator = torch.Generator().manual_seed(1)
    parameters = {n: initial(f, generator).to(args.device) for n, f in fields.items()}
    if args.start is not None:
        parameters = load_draft(args.start, c, torch.float32, args.device)
    for p in parameters.values():
        p.requires_grad_(True)
    rest = ("markov.w1", "markov.w2", "confidence.weight")
    muon_names = [n for n, p in parameters.items() if p.dim() >= 2 and n not in rest]
    muon = Muon([parameters[n] for n in muon_names])
    adam = torch.optim.AdamW(
        [p for n, p in parameters.items() if n not in muon_names],
        lr=1.0, betas=(0.9, 0.95), weight_decay=0.0,
    )  # fmt: skip
    data = Dialogues(args.data, args.device, c.block_size)
    test = Dialogues(args.data, args.device, c.block_size, "heldout_")
    decay = torch.exp(-torch.arange(c.block_size, device=args.device) / 4)
    torch.manual_seed(1)
    start, elapsed, step = time.monotonic(), 0.0, 0
    history: list[list[float]] = []
    while elapsed < args.seconds:
        ids, anchors, num_real = data.batch(args.rows, args.anchors)
        taps, logits = target.run(ids)
        w = build_draft(c, as_served(parameters, target.dtype).__getitem__, embed, lm_head)
        hidden, base = window_rows(c, w, taps, ids, anchors, target.dtype)
        before, after, theirs = targets(ids, anchors, logits, c.block_size)
        loss, overlap, _ = row_losses(w, hidden, base, before, after, theirs)
        real = torch.arange(c.block_size, device=args.device) < num_real.view(-1, 1)
        weight = real * decay
        ((loss * weight).sum() / weight.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        rate = rate_at(elapsed / args.seconds, args.rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        muon.step(rate, 0.01)
        for p in parameters.values():
            p.grad = None
        step += 1
        elapsed = time.monotonic() - start
        if step % 100 == 0 or step < 4:
            mean = (overlap * real).sum(0) / real.sum(0).clamp(min=1)
            seen = (loss.detach() * weight).sum() / weight.sum()
            history.append([step, round(elapsed, 1), round(float(seen), 4)])
            print(
                f"step {step} {elapsed:.0f} s loss {float(seen):.3f} norm {float(norm):.2f} "
                f"overlap {' '.join(f'{m:.3f}' for m in mean.tolist())} rate {rate:.5f}",
                flush=True,
            )
    result = held_out(c, parameters, target, test, args.rows)
    print("held out", json.dumps(result), flush=True)
    save(c, raw, parameters, embed.table, args.out)
    summary = {
        "steps": step,
        "windows": step * args.rows * args.anchors,
        "seconds": round(elapsed),
        "rate": args.rate,
        **result,
    }
    (args.out / "training.json").write_text(json.dumps({**summary, "history": history}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder made by mini_data.py")
    parser.add_argument("out", type=Path, help="where the draft goes")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="the target")
    parser.add_argument("--start", type=Path, help="a draft to go on from")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--anchors", type=int, default=48, help="windows a row")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--device", default="cuda")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
