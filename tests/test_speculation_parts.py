"""A draft's matrices as `gemv` has them, and steps that a GPU cannot take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compare import check_equal
from drafts import draft_weights, tiny_inferact, tiny_redhat
from tiny import TINY, tiny_weights

from nanok3.config import EngineConfig
from nanok3.draft_packing import pack_draft
from nanok3.kernels.gemv_layout import unpack_gemv
from nanok3.packing import Packed
from nanok3.spec.config import draft_config
from nanok3.speculation import step_problems

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


def test_steps_that_are_too_large_for_a_gpu_are_refused() -> None:
    c = draft_config(DRAFTS["inferact"])
    for most, num_drafts, is_refused in ((8, None, False), (9, None, True), (9, 3, False)):
        settings = EngineConfig(device="cuda", max_num_reqs=most, num_drafts=num_drafts)
        assert bool(step_problems(settings, c)) == is_refused
        assert not step_problems(replace(settings, device="cpu"), c)
    (problem,) = step_problems(EngineConfig(device="cuda", max_num_reqs=9), c)
    assert "at most 8 requests" in problem
