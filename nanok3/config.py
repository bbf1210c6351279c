"""What a K3 checkpoint's config.json says, as frozen records nested as published.

Every field that the model's arithmetic depends on is read or refused by its JSON path; none has a
default: `config_rules.py` has the tables. `Shard` is one rank's part of a model,
`GenerationDefaults` what the checkpoint proposes for sampling, `EngineConfig` the engine's own
settings. Nothing here knows torch or files of weights.
"""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from nanok3.config_check import ConfigError as ConfigError
from nanok3.config_check import checked_fields
from nanok3.config_rules import PROPOSALS, is_int, show

MAX_SLOTS = 2**31 - 1
MEGA_ROWS = 8  # of a step that is one launch, at most
STEP_ROWS = 64  # of a step of kernels, at most (kernels/route.py)


@dataclass(frozen=True)
class LinearAttnConfig:
    """KDA, the linear attention of most layers."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float
    full_attn_layers: tuple[int, ...]  # 1-based, as published
    kda_layers: tuple[int, ...]  # 1-based, as published

    @property
    def width(self) -> int:
        """Channels of q, of k, of v and of the gate."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """`text_config` of a K3 config.json; the names are the published ones."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttnConfig
    activation_situ_beta: float
    activation_situ_linear_beta: float
    rms_norm_eps: float
    attn_res_block_size: int
    first_k_dense_replace: int
    num_experts: int
    num_experts_per_token: int
    num_expert_group: int
    topk_group: int
    moe_intermediate_size: int
    moe_renormalize: bool
    routed_expert_hidden_size: int
    routed_scaling_factor: float
    latent_moe_use_norm: bool
    num_shared_experts: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int

    @classmethod
    def from_dict(cls, raw: object) -> ModelConfig:
        """The record of a parsed config.json; ConfigError lists all that cannot be run."""
        values = checked_fields(raw)
        linear = LinearAttnConfig(**{f.name: values[f.name] for f in fields(LinearAttnConfig)})
        values["linear_attn_config"] = linear
        return cls(**{f.name: values[f.name] for f in fields(cls)})

    def is_kda(self, layer: int) -> bool:
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @cached_property
    def kda_layer_ids(self) -> tuple[int, ...]:
        """0-based layers with KDA; a layer's place in this list is its row in the state cache."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_kda(i))

    @cached_property
    def mla_layer_ids(self) -> tuple[int, ...]:
        """0-based layers with MLA; a layer's place in this list is its row in the latent cache."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_kda(i))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Values cached per token and MLA layer: the normalised latent and the shared key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def num_res_blocks(self) -> int:
        """AttnRes streams of a token: the embedding and one running sum a block of layers."""
        return -(-self.num_hidden_layers // self.attn_res_block_size) + 1


K3 = ModelConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=93,
    num_attention_heads=96,
    intermediate_size=33792,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    linear_attn_config=LinearAttnConfig(
        num_heads=96,
        head_dim=128,
        short_conv_kernel_size=4,
        gate_lower_bound=-5.0,
        full_attn_layers=(*range(4, 93, 4), 93),
        kda_layers=tuple(layer for layer in range(1, 92) if layer % 4),
    ),
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    rms_norm_eps=1e-5,
    attn_res_block_size=12,
    first_k_dense_replace=1,
    num_experts=896,
    num_experts_per_token=16,
    num_expert_group=1,
    topk_group=1,
    moe_intermediate_size=3072,
    moe_renormalize=True,
    routed_expert_hidden_size=3584,
    routed_scaling_factor=1.0,
    latent_moe_use_norm=True,
    num_shared_experts=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=1048576,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)


TP_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Shard:
    """Which part of a model's split tensors one of `size` ranks holds."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        assert self.size in TP_SIZES and 0 <= self.rank < self.size, f"no such shard: {self}"

    def local(self, n: int) -> int:
        """How many of the n entries of a split axis are this rank's."""
        assert n % self.size == 0, f"{n} entries do not split over {self.size} ranks"
        return n // self.size

    def slice(self, n: int) -> builtins.slice:
        """Which of the n entries of a split axis are this rank's."""
        count = self.local(n)
        return builtins.slice(self.rank * count, (self.rank + 1) * count)

    def problems(self, config: ModelConfig) -> list[str]:
        """Reasons, one a line, why this model cannot be split so; empty if it can."""
        c, linear = config, config.linear_attn_config
        split = (
            ("vocab_size", c.vocab_size, 1),
            ("hidden_size", c.hidden_size, 1),
            ("num_attention_heads", c.num_attention_heads, 1),
            ("linear_attn_config.num_heads", linear.num_heads, 1),
            ("intermediate_size", c.intermediate_size, 1),
            ("num_experts", c.num_experts, 1),
            ("moe_intermediate_size", c.moe_intermediate_size, 32),  # the groups of a scale
            ("routed_expert_hidden_size", c.routed_expert_hidden_size, 1),
        )
        return [
            f"text_config.{name}: expected a multiple of {self.size * unit}, as {self.size} ranks "
            f"split it{f' in groups of {unit}' if unit > 1 else ''}, found {value}"
            for name, value, unit in split
            if value % (self.size * unit)
        ]


WHOLE = Shard(0, 1)


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json proposes; None, or no id, where it proposes nothing."""

    temperature: float | None = None  # 0 where do_sample is false
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: tuple[int, ...] = ()  # written as one id or as a list

    @property
    def sampling(self) -> dict[str, float]:
        """What is proposed for sampling, by the names of `SamplingParams`."""
        values = {name: getattr(self, name) for name in PROPOSALS}
        return {name: value for name, value in values.items() if value is not None}


def default_dtype(device: str) -> str:
    """The dtype of activations where nobody names one."""
    return "bfloat16" if device.startswith("cuda") else "float32"


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs a model; what cannot be run is told by `problems`."""

    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    dtype: str = "float32"  # of activations: "float32", "bfloat16" or "float64"
    max_num_reqs: int = 8  # requests that run at once
    block_size: int = 64  # tokens of a KV-cache block
    num_blocks: int | None = None  # KV-cache blocks; None: 4096 tokens for each of max_num_reqs
    max_context: int | None = None  # tokens of prompt and reply; None: what the blocks can hold
    prefill_chunk: int = 256  # prompt tokens of a request in one step, at most
    num_snapshots: int = 16  # beginnings of prompts, prompts and replies kept to go on from
    gpus: int = 1  # ranks that share the model: processes, on a CPU too
    num_drafts: int | None = None  # of a draft model, a step; None: as many as it has rows for
    acceptance: str = "block"  # of drafts: "block" or "standard"
    # Tokens a step below which a request stops drafting for a while. 2.5: k3-mini with its draft on
    # one thread of an AMD EPYC, 2026-12-01 (`nanok3 bench decode --draft` measures it).
    break_even: float = 2.5
    adaptive_drafts: bool = False  # verify only drafts that pay, by costs measured at the start
    strict: bool = False  # rows one by one: a request's bits do not depend on its company
    ops: str = "auto"  # of decode on a GPU: "mega" (one launch a step), "chain", or the faster one
    debug: bool = False  # check owners before each step, poison what was freed

    def blocks_for(self, context: int) -> int:
        """Blocks that give every request `context` tokens, each snapshot its part-full block."""
        return self.max_num_reqs * -(-context // self.block_size) + self.num_snapshots

    def problems(self, model_config: ModelConfig) -> list[str]:
        """Reasons, one a line, why this engine cannot run this model; empty if it can."""
        longest = model_config.max_position_embeddings
        num_slots = (self.num_blocks or 1) * self.block_size
        refusals = (
            (
                re.fullmatch(r"cpu|cuda(:\d+)?", self.device) is None,
                f"device: expected cpu, cuda or cuda:N, found {self.device!r}",
            ),
            (
                self.dtype not in ("float32", "bfloat16", "float64"),
                f"dtype: expected float32, bfloat16 or float64, found {self.dtype!r}",
            ),
            (
                self.gpus not in TP_SIZES,
                f"gpus: expected {', '.join(map(str, TP_SIZES))}, found {self.gpus}",
            ),
            (
                self.gpus > 1 and self.device != "cpu",
                f"gpus: ranks exchange on a CPU only so far, so expected 1, found {self.gpus}",
            ),
            (
                self.max_num_reqs < 1,
                f"max_num_reqs: expected at least 1, found {self.max_num_reqs}",
            ),
            (
                self.ops not in ("auto", "mega", "chain"),
                f"ops: expected auto, mega or chain, found {self.ops!r}",
            ),
            (
                self.ops in ("mega", "chain") and self.device == "cpu",
                f"ops: {self.ops} runs on a GPU only; leave it out, or name device cuda",
            ),
            (
                self.ops == "mega" and self.max_num_reqs > MEGA_ROWS and not self.strict,
                f"ops: mega takes steps of up to {MEGA_ROWS} requests, max_num_reqs is "
                f"{self.max_num_reqs}; lower it (--requests), or take auto",
            ),
            (
                self.num_snapshots < 0,
                f"num_snapshots: expected at least 0, found {self.num_snapshots}",
            ),
            (
                self.prefill_chunk < 1,
                f"prefill_chunk: expected at least 1 token, found {self.prefill_chunk}",
            ),
            (
                not 1 <= self.block_size <= longest,
                f"block_size: expected 1 to {longest} tokens, the longest context of this model, "
                f"found {self.block_size}",
            ),
            (
                self.num_blocks is not None and self.num_blocks < 1,
                f"num_blocks: expected at least 1, found {self.num_blocks}",
            ),
            (
                self.max_context is not None and not 1 <= self.max_context <= longest,
                f"max_context: expected 1 to {longest} tokens, the longest context of this model, "
                f"found {self.max_context}",
            ),
            (
                self.num_drafts is not None and self.num_drafts < 0,
                f"num_drafts: expected at least 0, found {self.num_drafts}",
            ),
            (
                self.adaptive_drafts and self.gpus > 1,
                "adaptive_drafts: each rank would measure other costs; leave it out, or gpus at 1",
            ),
            (
                self.acceptance not in ("block", "standard"),
                f"acceptance: expected block or standard, found {self.acceptance!r}",
            ),
            (
                num_slots > MAX_SLOTS,
                f"num_blocks: {self.num_blocks} blocks of {self.block_size} tokens are more than "
                f"the {MAX_SLOTS} slots that a 32-bit slot number can name",
            ),
        )
        return [reason for refused, reason in refusals if refused]


def load_config(model_dir: Path) -> ModelConfig:
    """The model that config.json of a checkpoint describes; ConfigError if it cannot be run."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError([f"{path}: no such file; name a directory with a K3 checkpoint"])
    try:
        return ModelConfig.from_dict(read_json(path))
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error


def load_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """What generation_config.json of a checkpoint proposes; nothing where there is none."""
    path = model_dir / "generation_config.json"
    if not path.is_file():
        return GenerationDefaults()
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: expected an object, found {show(raw)}"])
    proposed = {name: raw[name] for name in PROPOSALS if raw.get(name) is not None}
    problems = [
        f"{name}: expected {PROPOSALS[name].expected}, found {show(value)}"
        for name, value in proposed.items()
        if not PROPOSALS[name].accepts(value)
    ]
    do_sample, eos = raw.get("do_sample"), raw.get("eos_token_id")
    if not isinstance(do_sample, bool | None):
        problems.append(f"do_sample: expected true or false, found {show(do_sample)}")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(is_int(token) and token >= 0 for token in eos_ids):
        problems.append(f"eos_token_id: expected a token id or a list of them, found {show(eos)}")
    if problems:
        raise ConfigError([f"generation_config.json: {problem}" for problem in problems])
    if do_sample is False:
        proposed["temperature"] = 0
    values = {name: PROPOSALS[name].convert(value) for name, value in proposed.items()}
    return GenerationDefaults(**values, eos_token_id=tuple(eos_ids))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError([f"{path}: expected a JSON file, found {error}"]) from error
