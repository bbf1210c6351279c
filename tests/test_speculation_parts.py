"""A draft's matrices as `gemv` has them, and a plan of what a draft takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare import check_equal
from drafts import draft_weights, tiny_inferact, tiny_redhat
from engines import make_engine
from tiny import TINY, tiny_weights

from nanok3.config import EngineConfig
from nanok3.draft_packing import pack_draft
from nanok3.kernels.gemv_layout import unpack_gemv
from nanok3.packing import Packed
from nanok3.spec.config import draft_config
from nanok3.spec_loop import SpecLoop
from nanok3.speculation import draft_bytes, tensor_bytes
from nanok3.step import without_parts

DRAFTS = {"inferact": tiny_inferact(kv_lora_rank=32, markov_rank=32), "redhat": tiny_redhat()}


@pytest.mark.parametrize("name", DRAFTS)
def test_packed_matrices_are_the_matrices(name: str) -> None:
    c = draft_config(DRAFTS[name])
    target = tiny_weights(TINY, 5, torch.bfloat16)
    w = draft_weights(c, 3, target, torch.bfloat16)
    packed = pack_draft(w)
    pairs = [(w.context_proj, packed.context_proj), (w.markov.w2, packed.markov.w2)]
    pairs += [(w.lm_head, packed.lm_head)]
    for a, b in zip(w.layers, packed.layers, strict=True):
        names = ("q_a", "q", "kv", "o_proj", "gate_up", "down")
        pairs += [(getattr(a, n), getattr(b, n)) for n in names]
        assert a.attn is b.attn
    kinds = set()
    for dense, other in pairs:
        if dense is None:
            assert other is None
            continue
        kinds.add(isinstance(other, Packed))
        if isinstance(other, Packed):
            rows, k = dense.shape
            assert (other.shape.rows, other.shape.k) == (rows, k) and k % 32 == 0
            out = torch.empty(other.tensor.numel(), dtype=torch.bfloat16)
            check_equal(unpack_gemv(other.tensor, out=out)[:rows], dense)
        else:
            assert other is dense and dense.shape[1] % 32
    assert kinds == {False, True}, "widths of both kinds"
    assert packed.lm_head.shape.finish == "f32"
    if isinstance(packed.markov.w2, Packed):
        assert packed.markov.w2.shape.finish == "f32"
    shared = replace(w, lm_head=packed.lm_head)
    assert pack_draft(shared).lm_head is packed.lm_head


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("num_drafts", [None, 3])
def test_a_plan_is_what_a_draft_takes(name: str, num_drafts: int | None) -> None:
    settings = EngineConfig(
        block_size=4, num_blocks=200, prefill_chunk=16, max_num_reqs=3, num_drafts=num_drafts
    )
    engine = make_engine(
        draft=DRAFTS[name], max_num_reqs=3, num_drafts=num_drafts, strict=False, debug=False
    )
    plain = make_engine(max_num_reqs=3, strict=False, debug=False)
    c = draft_config(DRAFTS[name])
    planned = draft_bytes(TINY, c, settings, 200, torch.float32)
    loop = engine._runner.loop
    assert isinstance(loop, SpecLoop)
    assert planned["draft pages"] == loop.drafter.cache.nbytes
    buffers = [without_parts(e._runner._buffers) for e in (engine, plain)]
    target = without_parts(loop.target._buffers)
    taken = (loop.drafter._buffers, loop.target.records, target, loop.state)
    taps = tensor_bytes(buffers[0]) - tensor_bytes(buffers[1])
    assert planned["draft workspace"] == tensor_bytes(taken) + taps
    on_gpu = draft_bytes(TINY, c, replace(settings, device="cuda"), 200, torch.bfloat16)
    assert on_gpu["draft pages"] * 2 == planned["draft pages"]
    assert on_gpu["draft weights"] > 0 and on_gpu["draft workspace"] > 0
    packed = pack_draft(draft_weights(c, 3, tiny_weights(TINY, 5, torch.bfloat16), torch.bfloat16))
    if c.owns_vocab:
        assert on_gpu["draft weights"] == tensor_bytes(packed)
