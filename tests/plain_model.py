"""Kimi K3 once more, in float64 numpy from the tensors of a checkpoint: one request, no cache.

Written from the published formulas, token by token and head by head, by the official names; it
shares no code with nanok3 and is as slow as it looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

F64 = NDArray[np.float64]
ROOT = "language_model.model."


def sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(np.asarray(x) / 2))


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor of a directory's shards by name, floats as float64."""
    tensors = {}
    for file in path.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            tensors[name] = wide.numpy()
    return tensors


def mxfp4(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> F64:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = np.zeros((rows, columns))
    for i in range(columns):
        nibble = packed[:, i // 2] >> (4 * (i % 2)) & 0xF
        size = table[nibble & 7] * 2.0 ** (scale[:, i // 32].astype(int) - 127)
        out[:, i] = np.where(nibble >= 8, -size, size)
    return out


@dataclass
class PlainModel:
    text: Mapping[str, Any]  # text_config of config.json
    tensors: Mapping[str, NDArray[Any]]
    experts: dict[str, F64] = field(default_factory=dict)  # decoded so far

    def logits(self, ids: list[int]) -> F64:
        """[T, V]."""
        c = self.text
        num_layers, size = c["num_hidden_layers"], c["attn_res_block_size"]
        kda_layers = c["linear_attn_config"]["kda_layers"]
        p = [self.tensors[f"{ROOT}embed_tokens.weight"][i] for i in ids]
        snapshots: list[list[F64]] = []
        for i in range(num_layers):
            layer = f"{ROOT}layers.{i}."
            x = self.mixed(snapshots, p, f"{layer}self_attention_res")
            x = [self.rms(row, f"{layer}input_layernorm.weight") for row in x]
            attention = self.kda if i + 1 in kda_layers else self.mla
            y = attention(f"{layer}self_attn.", x)
            if i % size == 0:
                snapshots.append(p)
                p = y
            else:
                p = [a + b for a, b in zip(p, y, strict=True)]
            x = self.mixed(snapshots, p, f"{layer}mlp_res")
            x = [self.rms(row, f"{layer}post_attention_layernorm.weight") for row in x]
            if i < c["first_k_dense_replace"]:
                z = [self.mlp(f"{layer}mlp.", row) for row in x]
            else:
                z = [self.latent_moe(f"{layer}block_sparse_moe.", row) for row in x]
            p = [a + b for a, b in zip(p, z, strict=True)]
        h = self.mixed(snapshots, p, f"{ROOT}output_attn_res")
        head = self.tensors["language_model.lm_head.weight"]
        return np.stack([head @ self.rms(row, f"{ROOT}norm.weight") for row in h])

    def mixed(self, snapshots: list[list[F64]], p: list[F64], name: str) -> list[F64]:
        norm, proj = self.tensors[f"{name}_norm.weight"], self.tensors[f"{name}_proj.weight"][0]
        out = []
        for t in range(len(p)):
            sources = [*(s[t] for s in snapshots), p[t]]
            eps = self.text["rms_norm_eps"]
            a = [proj @ (norm * v / np.sqrt(np.mean(v * v) + eps)) for v in sources]
            e = np.exp(np.array(a) - max(a))
            out.append(sum(w * v for w, v in zip(e / e.sum(), sources, strict=True)))
        return out

    def rms(self, x: F64, name: str) -> F64:
        return self.tensors[name] * x / np.sqrt(np.mean(x * x) + self.text["rms_norm_eps"])

    def of(self, prefix: str, name: str) -> F64:
        return self.tensors[f"{prefix}{name}.weight"]

    def situ(self, gate: F64, up: F64) -> F64:
        beta, linear = self.text["activation_situ_beta"], self.text["activation_situ_linear_beta"]
        return beta * np.tanh(gate / beta) * sigmoid(gate) * linear * np.tanh(up / linear)

    def mlp(self, name: str, x: F64) -> F64:
        act = self.situ(self.of(name, "gate_proj") @ x, self.of(name, "up_proj") @ x)
        return self.of(name, "down_proj") @ act

    def kda(self, name: str, xs: list[F64]) -> list[F64]:
        c = self.text["linear_attn_config"]
        heads, dim, taps = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]
        decay_rate, dt_bias = np.exp(self.tensors[f"{name}A_log"]), self.tensors[f"{name}dt_bias"]
        state = np.zeros((heads, dim, dim))
        history: dict[str, list[F64]] = {"q": [], "k": [], "v": []}
        out = []
        for x in xs:
            conved = {}
            for part, rows in history.items():
                rows.append(self.of(name, f"{part}_proj") @ x)
                weight, y = self.of(name, f"{part}_conv1d"), np.zeros(heads * dim)
                for tap in range(taps):
                    at = len(rows) - taps + tap  # the last tap is the current row
                    if at >= 0:
                        y += weight[:, 0, tap] * rows[at]
                conved[part] = (y * sigmoid(y)).reshape(heads, dim)
            f = (self.of(name, "f_b_proj") @ (self.of(name, "f_a_proj") @ x)).reshape(heads, dim)
            beta = sigmoid(self.of(name, "b_proj") @ x)
            gate = sigmoid(self.of(name, "g_proj") @ x).reshape(heads, dim)
            o = np.zeros((heads, dim))
            for h in range(heads):
                q, k, v = (conved[part][h] for part in "qkv")
                q = q / np.sqrt(q @ q + 1e-6) * dim**-0.5
                k = k / np.sqrt(k @ k + 1e-6)
                g = f[h] + dt_bias[h * dim : (h + 1) * dim]
                log_decay = c["gate_lower_bound"] * sigmoid(decay_rate[h] * g)
                s = np.exp(log_decay)[:, None] * state[h]
                state[h] = s + beta[h] * np.outer(k, v - k @ s)
                o[h] = q @ state[h]
                size = np.sqrt(np.mean(o[h] * o[h]) + self.text["rms_norm_eps"])
                o[h] = o[h] / size * self.of(name, "o_norm") * gate[h]
            out.append(self.of(name, "o_proj") @ o.reshape(-1))
        return out

    def mla(self, name: str, xs: list[F64]) -> list[F64]:
        c = self.text
        heads, rank, nope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_nope_head_dim"]
        keys: list[F64] = []  # [H, Dn + Dr] of each token
        values: list[F64] = []  # [H, Dv]
        out = []
        for x in xs:
            c_q = self.rms(self.of(name, "q_a_proj") @ x, f"{name}q_a_layernorm.weight")
            q = (self.of(name, "q_b_proj") @ c_q).reshape(heads, -1)
            kv = self.of(name, "kv_a_proj_with_mqa") @ x
            latent = self.rms(kv[:rank], f"{name}kv_a_layernorm.weight")
            expanded = (self.of(name, "kv_b_proj") @ latent).reshape(heads, -1)
            shared = np.tile(kv[rank:], (heads, 1))
            keys.append(np.concatenate([expanded[:, :nope], shared], axis=1))
            values.append(expanded[:, nope:])
            o = []
            for h in range(heads):
                scores = np.array([q[h] @ key[h] for key in keys]) * q.shape[1] ** -0.5
                e = np.exp(scores - scores.max())
                o.append(sum(w * v[h] for w, v in zip(e / e.sum(), values, strict=True)))
            gate = sigmoid(self.of(name, "g_proj") @ x)
            out.append(self.of(name, "o_proj") @ (np.concatenate(o) * gate))
        return out

    def latent_moe(self, name: str, x: F64) -> F64:
        c = self.text
        scores = sigmoid(self.of(name, "gate") @ x)
        pick = scores + self.tensors[f"{name}gate.e_score_correction_bias"]
        groups = pick.reshape(c["num_expert_group"], -1)
        if len(groups) > 1:
            rank = np.sort(groups, axis=1)[:, -2:].sum(1)
            groups[np.argsort(-rank, kind="stable")[c["topk_group"] :]] = -np.inf
        chosen = np.argsort(-groups.reshape(-1), kind="stable")[: c["num_experts_per_token"]]
        weights = scores[chosen]
        if c["moe_renormalize"]:
            weights = weights / (weights.sum() + 1e-20)
        z = self.of(name, "routed_expert_down_proj") @ x
        r = np.zeros(len(z))
        for e, weight in zip(chosen, weights * c["routed_scaling_factor"], strict=True):
            w1, w2, w3 = (self.expert(f"{name}experts.{e}.w{i}") for i in (1, 2, 3))
            r += weight * (w2 @ self.situ(w1 @ z, w3 @ z))
        if c["latent_moe_use_norm"]:
            r = self.rms(r, f"{name}routed_expert_norm.weight")
        return self.of(name, "routed_expert_up_proj") @ r + self.mlp(f"{name}shared_experts.", x)

    def expert(self, name: str) -> F64:
        if name not in self.experts:
            packed, scale = (self.tensors[f"{name}.weight_{p}"] for p in ("packed", "scale"))
            self.experts[name] = mxfp4(packed, scale)
        return self.experts[name]
