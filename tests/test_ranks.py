"""The exchanges of the text: ranks that run it in step give what one rank gives.

And one rank of many, alone, writes its own columns and leaves the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compare import check_close, check_equal
from session import Session
from tiny import random_fields, tiny_config
from torch import Tensor
from virtual_ranks import VirtualRanks

from nanok3.checkpoint import Checkpoint
from nanok3.config import WHOLE, ModelConfig, Shard, load_config
from nanok3.ops import DECODE, PREFILL, REFERENCE, Ops
from nanok3.weight_table import Filler, expected_tensors, to_checkpoint
from nanok3.weights import Weights, build

SPLITS = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128)
IDS = torch.randint(0, 512, (2, 23), generator=torch.Generator().manual_seed(0)).tolist()


def weights_of(config: ModelConfig, dtype: torch.dtype, shard: Shard) -> Weights:
    filler = Filler(config, dtype, "cpu", shard)
    for name, tensor in to_checkpoint(config, random_fields(config, 1)):
        filler.take(name, tensor)
    return build(config, filler.finish().__getitem__, shard)


def logits_of(config: ModelConfig, dtype: torch.dtype, shard: Shard, ops: Ops) -> list[Tensor]:
    """A prompt, two decode rows: logits, then what is cached."""
    session = Session(config, weights_of(config, dtype, shard), dtype, num_reqs=2, shard=shard)
    logits = [session.feed([row[:21] for row in IDS], ops)]
    logits += [session.feed([[row[i]] for row in IDS], ops) for i in (21, 22)]
    return [torch.cat(logits, dim=1), *session.cached()]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ops", [PREFILL, REFERENCE], ids=["prefill", "rows"])
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_ranks_in_step_give_the_whole_models_logits(
    size: int, ops: Ops, dtype: torch.dtype, limit: float
) -> None:
    right = logits_of(SPLITS, dtype, WHOLE, ops)
    ranks = VirtualRanks(size)
    got = ranks.run(lambda shard: logits_of(SPLITS, dtype, shard, ranks.ops(shard, ops)))
    for rank, (logits, state, conv_state, latent) in enumerate(got):
        check_close(logits, right[0], limit, f"logits of rank {rank}")
        check_equal(logits, got[0][0], "all ranks have the same bits")
        heads = Shard(rank, size).slice(4)
        check_close(state, right[1][:, :, heads], limit, "states of its heads")
        assert conv_state.shape[-1] * size == right[2].shape[-1]
        check_close(latent, right[3], limit, "latents")


def test_k3_mini_over_four_ranks() -> None:
    """A trained model; in float64, for in float32 near ties of its router flip."""
    path = Path(__file__).parent.parent / "nanok3" / "models" / "k3_mini"
    config = load_config(path)
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(config)})
    ids = torch.randint(0, config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(3))

    def logits(shard: Shard, ops: Ops) -> Tensor:
        filler = Filler(config, torch.float64, "cpu", shard)
        checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)
        weights = build(config, filler.finish().__getitem__, shard)
        session = Session(config, weights, torch.float64, shard=shard)
        return torch.cat([session.feed(part.tolist(), ops)[0] for part in ids.split(1, dim=1)])

    right = logits(WHOLE, DECODE)
    ranks = VirtualRanks(4)
    for rank, got in enumerate(ranks.run(lambda shard: logits(shard, ranks.ops(shard, DECODE)))):
        check_close(got, right, 1e-10, f"rank {rank}")


VARIANTS = {
    "dense": {"first_k_dense_replace": 7},
    "latent not normalised": {"latent_moe_use_norm": False},
    "groups": {"num_expert_group": 4, "topk_group": 2},
}


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_variants(changes: dict[str, int]) -> None:
    config = tiny_config(num_heads=4, num_attention_heads=4, moe_intermediate_size=128, **changes)
    right = logits_of(config, torch.float64, WHOLE, PREFILL)[0]
    ranks = VirtualRanks(4)
    got = ranks.run(
        lambda shard: logits_of(config, torch.float64, shard, ranks.ops(shard, PREFILL))
    )
    check_close(got[3][0], right, 1e-11)


def test_one_rank_alone_keeps_what_it_has_of_its_peers() -> None:
    """Every op writes this rank's columns; the others are what the caller put there."""
    shard = Shard(1, 4)
    session = Session(
        SPLITS, weights_of(SPLITS, torch.float64, shard), torch.float64, num_reqs=2, shard=shard
    )
    session.poison = 0.25
    logits = session.feed([row[:3] for row in IDS], PREFILL)
    own = logits[..., shard.slice(512)]
    others = logits.clone()
    others[..., shard.slice(512)] = 0.25
    assert own.isfinite().all() and (own != 0.25).all()
    check_equal(others, torch.full_like(others, 0.25))
