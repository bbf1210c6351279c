"""The whole model: against the published code's golden logits and against a plain numpy model.

Decode and prefill readings, cuts of a prompt and company of other requests must not change what
comes out, nor what is left in the caches.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import check_bf16, check_close
from numpy.typing import NDArray
from plain_model import PlainModel, read_tensors
from session import Session
from tiny import make_checkpoint, raw_config, tiny_config, tiny_weights

from nanok3 import model
from nanok3.checkpoint import Checkpoint
from nanok3.config import ModelConfig, load_config
from nanok3.ops import DECODE, PREFILL, REFERENCE, Ops
from nanok3.step import Step, allocate_buffers
from nanok3.weight_table import Filler, expected_tensors
from nanok3.weights import Weights, build

DATA = Path(__file__).parent / "data"
LENGTHS = (1, 7, 70, 200)
Load = Callable[[torch.dtype], tuple[ModelConfig, Weights]]


def load(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, Weights]:
    config = load_config(path)
    checkpoint = Checkpoint.open(path, {"mxfp4": expected_tensors(config)})
    filler = Filler(config, dtype, "cpu")
    checkpoint.load(checkpoint.in_file_order(checkpoint.specs), filler.take)
    return config, build(config, filler.finish().__getitem__)


# ---- golden: what the published code computes ----


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Load:
    path = tmp_path_factory.mktemp("golden")
    script = DATA / "make_golden_k3.py"
    subprocess.run([sys.executable, script, "golden", path], check=True)
    expected = np.load(DATA / "golden_expected.npz")
    fingerprint = (path / "fingerprint.txt").read_text()
    assert str(expected["fingerprint"]) in fingerprint, "these are not the weights of the logits"
    return lambda dtype: load(path, dtype)


@pytest.fixture(scope="module")
def expected() -> dict[str, NDArray[Any]]:
    return dict(np.load(DATA / "golden_expected.npz"))


def relative(actual: torch.Tensor, right: NDArray[Any]) -> float:
    wide = torch.from_numpy(right).double()
    return float((actual.double() - wide).norm() / wide.norm())


def greedy(session: Session, ids: list[int], first: Ops, then: Ops, count: int) -> list[int]:
    """The prompt with one reading, then ids one by one with another."""
    out = [int(session.feed([ids], first)[0, -1].argmax())]
    while len(out) < count:
        out.append(int(session.feed([[out[-1]]], then)[0, -1].argmax()))
    return out


@pytest.mark.parametrize("ops, then", [(PREFILL, DECODE), (REFERENCE, REFERENCE)])
def test_golden_float32(
    golden: Load, expected: dict[str, NDArray[Any]], ops: Ops, then: Ops
) -> None:
    config, weights = golden(torch.float32)
    for n in LENGTHS:
        ids = expected[f"ids_{n}"].tolist()
        logits = Session(config, weights, torch.float32).feed([ids], ops)[0]
        right = expected[f"last_logits_{n}"]
        distance = relative(logits[-1], right)
        print(f"{n} tokens: relative distance {distance:.2e}")
        assert distance <= expected["tol_fp32_rel_l2"]
        check_close(logits[-1], right, float(expected["tol_fp32_max_abs"]) / np.abs(right).max())
        sure = torch.from_numpy(expected[f"argmax_gap_{n}"] > expected["tol_fp32_argmax_gap"])
        assert sure.float().mean() > 0.9
        same = logits.argmax(-1) == torch.from_numpy(expected[f"argmax_{n}"])
        assert same[sure].all()
        session = Session(config, weights, torch.float32)
        assert greedy(session, ids, ops, then, 24) == expected[f"greedy_{n}"].tolist()


def test_golden_float64(golden: Load, expected: dict[str, NDArray[Any]]) -> None:
    config, weights = golden(torch.float64)
    for n in (7, 70):
        ids = expected[f"ids_{n}"].tolist()
        for ops in (PREFILL, REFERENCE):
            logits = Session(config, weights, torch.float64).feed([ids], ops)[0]
            assert relative(logits[-1], expected[f"last_logits_{n}"]) <= 1e-7


def test_golden_bf16(golden: Load, expected: dict[str, NDArray[Any]]) -> None:
    """Along the published greedy ids: the same id wherever the best two are far enough apart."""
    config, weights = golden(torch.bfloat16)
    for n in LENGTHS:
        session = Session(config, weights, torch.bfloat16)
        logits = session.feed([expected[f"ids_{n}"].tolist()], PREFILL)[0, -1]
        assert relative(logits, expected[f"last_logits_{n}"]) <= expected["tol_bf16_last_rel_l2"]
        gaps = expected[f"greedy_gap_{n}"]
        for token, gap in zip(expected[f"greedy_{n}"].tolist(), gaps, strict=True):
            assert gap <= expected["tol_bf16_greedy_gap"] or int(logits.argmax()) == token
            logits = session.feed([[token]], REFERENCE)[0, -1]


# ---- a plain model ----

IDS = [7, 300, 41, 41, 0, 511, 256, 99, 12]
VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "groups": {"num_expert_group": 4, "topk_group": 2},
    "no renormalising, scaled": {"moe_renormalize": False, "routed_scaling_factor": 2.5},
    "latent not normalised": {"latent_moe_use_norm": False},
    "all layers sparse": {"first_k_dense_replace": 0},
    "two dense layers": {"first_k_dense_replace": 2},
    "all layers dense": {"first_k_dense_replace": 7},
    "blocks of one": {"attn_res_block_size": 1},
    "one block": {"attn_res_block_size": 12},
    "activation": {"activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0},
    "eps": {"rms_norm_eps": 1e-2},
    "weak decay": {"gate_lower_bound": -0.3},
    "decay beyond chunks": {"gate_lower_bound": -100.0},
    "two taps": {"short_conv_kernel_size": 2},
    "one tap": {"short_conv_kernel_size": 1},
    "as many heads as channels": {"num_heads": 8, "head_dim": 8},
    "KDA only": {"kda_layers": (1, 2, 3, 4, 5, 6, 7), "full_attn_layers": ()},
    "MLA only": {"full_attn_layers": (7, 6, 5, 4, 3, 2, 1), "kda_layers": ()},
    "one shared expert, wide latent": {"num_shared_experts": 1, "routed_expert_hidden_size": 96},
    "every expert": {"num_experts_per_token": 12},
    "896 experts": {
        "num_experts": 896,
        "num_experts_per_token": 16,
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "kda_layers": (1, 2),
        "full_attn_layers": (3,),
    },
}


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_variants_of_the_family(changes: dict[str, Any], tmp_path: Path) -> None:
    """From the files of a checkpoint: names, packing, formulas and options at once."""
    config = tiny_config(**changes)
    make_checkpoint(tmp_path, config, seed=1)
    plain = PlainModel(raw_config(config)["text_config"], read_tensors(tmp_path))
    right = plain.logits(IDS)
    weights = load(tmp_path, torch.float64)[1]
    for ops in (PREFILL, REFERENCE):
        logits = Session(config, weights, torch.float64).feed([IDS], ops)[0]
        check_close(logits, right, 1e-10)


def test_float32_and_bf16_are_as_close_as_they_should_be() -> None:
    """With every expert chosen, so that no near-tie of the router turns rounding into a jump."""
    config = tiny_config(num_experts_per_token=12)
    ids = torch.randint(0, 512, (4, 30), generator=torch.Generator().manual_seed(0)).tolist()

    def run(dtype: torch.dtype, ops: Ops) -> torch.Tensor:
        weights = tiny_weights(config, 3, dtype)
        return Session(config, weights, dtype, num_reqs=4).feed(ids, ops)

    right = run(torch.float64, PREFILL)
    check_close(run(torch.float32, PREFILL), right, 1e-5)
    prefill, decode = run(torch.bfloat16, PREFILL), run(torch.bfloat16, REFERENCE)
    assert relative(prefill.flatten(), right.flatten().numpy()) < 0.1
    check_bf16(prefill, decode, right)  # they differ by rounding: neither is twice the other
    check_bf16(decode, prefill, right)


# ---- one token's logits, however they are reached ----


@pytest.mark.parametrize(
    "cuts, ops",
    [
        ([1] * 70, [REFERENCE]),
        ([1] * 70, [DECODE]),
        ([70], [REFERENCE]),
        ([64, 1, 5], [PREFILL, REFERENCE]),
        ([1, 2, 3, 57, 7], [PREFILL]),  # shorter than the convolution, over a block of 8
        ([8, 8, 8, 8, 38], [REFERENCE, PREFILL]),  # at block borders
    ],
)
def test_cuts_and_readings_agree(cuts: list[int], ops: list[Ops]) -> None:
    config = tiny_config()
    weights = tiny_weights(config, 0, torch.float64)
    ids = torch.randint(0, 512, (2, 70), generator=torch.Generator().manual_seed(1)).tolist()
    whole = Session(config, weights, torch.float64, num_reqs=2)
    right = whole.feed(ids, PREFILL)
    cut = Session(config, weights, torch.float64, num_reqs=2)
    start, pieces = 0, []
    for i, count in enumerate(cuts):
        piece = [row[start : start + count] for row in ids]
        pieces.append(cut.feed(piece, ops[i % len(ops)]))
        start += count
    check_close(torch.cat(pieces, dim=1), right, 1e-10, "logits")
    names = ("states", "convolution windows", "latents")
    for name, got, expected in zip(names, cut.cached(), whole.cached(), strict=True):
        check_close(got, expected, 1e-10, name)


@pytest.mark.parametrize("ops", [PREFILL, REFERENCE], ids=["prefill", "decode"])
def test_company_does_not_matter(ops: Ops) -> None:
    config = tiny_config()
    weights = tiny_weights(config, 0, torch.float64)
    ids = torch.randint(0, 512, (3, 20), generator=torch.Generator().manual_seed(2)).tolist()
    together = Session(config, weights, torch.float64, num_reqs=3).feed(ids, ops)
    for r in range(3):
        alone = Session(config, weights, torch.float64).feed([ids[r]], ops)[0]
        check_close(together[r], alone, 1e-11)


def test_nothing_is_written_outside_the_requests() -> None:
    """Trash slot 0 and slots of nobody stay NaN; every latent row of nobody too."""
    config = tiny_config()
    session = Session(config, tiny_weights(config, 0), torch.float32, num_reqs=2)
    for ops in (PREFILL, REFERENCE):
        session.feed([[1, 2, 3], [4, 5, 6]], ops)
    cache = session.cache
    assert cache.state[:, [0, 3]].isnan().all() and cache.conv_state[:, [0, 3]].isnan().all()
    for written in session.cached():
        assert written.isfinite().all()
    assert int((~cache.latent.isnan().any(-1)).sum()) == len(config.mla_layer_ids) * 2 * 6


def test_only_the_wanted_rows_have_logits() -> None:
    config = tiny_config()
    weights = tiny_weights(config, 0)
    session = Session(config, weights, torch.float32, block_size=16)
    right = Session(config, weights, torch.float32).feed([[5, 6, 7, 8]], PREFILL)[0]
    rows = torch.tensor([3, 1])
    positions = torch.arange(4)
    table = session.block_table[:, :1]
    step = Step(
        torch.tensor([5, 6, 7, 8]),
        positions,
        table[0] * 16 + positions,
        table,
        session.slots,
        rows,
        16,
    )
    buf = allocate_buffers(config, 4, 2, torch.float32, "cpu")
    model.forward(config, weights, session.cache, step, buf, PREFILL)
    check_close(buf.logits, right[rows], 1e-6)
