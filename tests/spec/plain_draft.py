"""A DSpark draft in numpy, written from its equations, a row and a head at a time.

Reads the tensors of a published file by their names; shares no code with nanok3.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def rms(x: F64, weight: F64, eps: float) -> F64:
    return weight * x / math.sqrt(float((x * x).mean()) + eps)


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return e / e.sum()


def swish(x: F64) -> F64:
    return x / (1 + np.exp(-x))


class PlainDraft:
    """`raw` is a config.json, `tensors` the file's; embedding and head may be the target's."""

    def __init__(
        self, raw: dict[str, Any], tensors: dict[str, F64], embed: F64, lm_head: F64
    ) -> None:
        self.is_mla = raw["architectures"] == ["K3DSparkModel"]
        self.top = raw
        self.raw = raw if self.is_mla else raw["transformer_layer_config"]
        self.t = tensors
        self.embed = embed if self.is_mla else tensors["embed_tokens.weight"]
        self.lm_head = lm_head if self.is_mla else tensors["lm_head.weight"]
        self.eps = self.raw["rms_norm_eps"]
        names = ("context_proj", "context_norm", "final_norm")
        self.names = names if self.is_mla else ("fc", "hidden_norm", "norm")

    # ---- rotary positions ----

    def frequencies(self) -> list[float]:
        theta = self.raw["rope_theta"]
        dim = self.raw["qk_rope_head_dim" if self.is_mla else "head_dim"]
        plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        if not self.is_mla:
            return plain
        yarn = self.raw["rope_parameters"]
        original = yarn["original_max_position_embeddings"]

        def where(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(where(yarn["beta_fast"])), 0)
        high = min(math.ceil(where(yarn["beta_slow"])), dim - 1)
        out = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            out.append(f / yarn["factor"] * ramp + f * (1 - ramp))
        return out

    def rope(self, x: F64, position: int) -> F64:
        out = x.copy()
        half = len(x) // 2
        for i, f in enumerate(self.frequencies()):
            a, b = (2 * i, 2 * i + 1) if self.is_mla else (i, i + half)
            c, s = math.cos(position * f), math.sin(position * f)
            out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
        return out

    # ---- what a row gives to attention: (key of each head, value of each head) ----

    def key_values(self, layer: str, x: F64, position: int) -> tuple[F64, F64]:
        r, attn = self.raw, f"{layer}self_attn."
        heads = r["num_attention_heads"]
        if self.is_mla:
            rank, nope = r["kv_lora_rank"], r["qk_nope_head_dim"]
            both = self.t[f"{attn}kv_a_proj_with_mqa.weight"] @ x
            latent = rms(both[:rank], self.t[f"{attn}kv_a_layernorm.weight"], self.eps)
            turned = self.rope(both[rank:], position)
            parts = (self.t[f"{attn}kv_b_proj.weight"] @ latent).reshape(heads, -1)
            keys = np.stack([np.concatenate([p[:nope], turned]) for p in parts])
            return keys, parts[:, nope:]
        groups = r["num_key_value_heads"]
        k = (self.t[f"{attn}k_proj.weight"] @ x).reshape(groups, -1)
        v = (self.t[f"{attn}v_proj.weight"] @ x).reshape(groups, -1)
        norm = self.t[f"{attn}k_norm.weight"]
        k = np.stack([self.rope(rms(one, norm, self.eps), position) for one in k])
        owner = [h * groups // heads for h in range(heads)]
        return k[owner], v[owner]

    def queries(self, layer: str, x: F64, position: int) -> F64:
        r, attn = self.raw, f"{layer}self_attn."
        heads = r["num_attention_heads"]
        if self.is_mla:
            nope = r["qk_nope_head_dim"]
            norm = self.t[f"{attn}q_a_layernorm.weight"]
            low = rms(self.t[f"{attn}q_a_proj.weight"] @ x, norm, self.eps)
            q = (self.t[f"{attn}q_b_proj.weight"] @ low).reshape(heads, -1)
            return np.stack([np.concatenate([h[:nope], self.rope(h[nope:], position)]) for h in q])
        q = (self.t[f"{attn}q_proj.weight"] @ x).reshape(heads, -1)
        norm = self.t[f"{attn}q_norm.weight"]
        return np.stack([self.rope(rms(h, norm, self.eps), position) for h in q])

    def scale(self) -> float:
        r = self.raw
        if not self.is_mla:
            return float(r["head_dim"]) ** -0.5
        yarn = r["rope_parameters"]
        sharper = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
        return float(r["qk_nope_head_dim"] + r["qk_rope_head_dim"]) ** -0.5 * sharper**2

    # ---- the window ----

    def window(self, taps: F64, anchor: int, num_rows: int) -> tuple[F64, F64]:
        """taps [S, n * C] of all tokens before -> (hidden [Q, C], base logits [Q, V])."""
        r, position = self.raw, len(taps)
        proj, proj_norm, final_norm = (self.t[f"{n}.weight"] for n in self.names)
        context = [rms(proj @ row, proj_norm, self.eps) for row in taps]
        ids = [anchor] + [self.top["mask_token_id"]] * (num_rows - 1)
        h = [self.embed[i].copy() for i in ids]
        for i in range(r["num_hidden_layers"]):
            layer = f"layers.{i}."
            sliding = not self.is_mla and r["layer_types"][i] == "sliding_attention"
            first = max(0, position - r["sliding_window"]) if sliding else 0
            seen = [self.key_values(layer, context[s], s) for s in range(first, position)]
            norm = self.t[f"{layer}input_layernorm.weight"]
            u = [rms(row, norm, self.eps) for row in h]
            own = [self.key_values(layer, row, position + j) for j, row in enumerate(u)]
            for j, row in enumerate(u):
                q = self.queries(layer, row, position + j)
                pairs = seen + (own[: j + 1] if sliding else own)
                heads = []
                for n in range(len(q)):
                    scores = np.array([float(q[n] @ k[n]) for k, _ in pairs]) * self.scale()
                    p = softmax(scores)
                    heads.append(sum(w * v[n] for w, (_, v) in zip(p, pairs, strict=True)))
                h[j] = h[j] + self.t[f"{layer}self_attn.o_proj.weight"] @ np.concatenate(heads)
            norm = self.t[f"{layer}post_attention_layernorm.weight"]
            gate, up, down = (self.t[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            for j in range(num_rows):
                x = rms(h[j], norm, self.eps)
                h[j] = h[j] + down @ (swish(gate @ x) * (up @ x))
        hidden = np.stack([rms(row, final_norm, self.eps) for row in h])
        return hidden, hidden @ self.lm_head.T

    def biased(self, base: F64, before: int) -> F64:
        w1, w2 = (self.t[f"markov_head.markov_{n}.weight"] for n in ("w1", "w2"))
        return base + w2 @ w1[before]

    def confidence(self, hidden: F64, before: int) -> float:
        features = np.concatenate([hidden, self.t["markov_head.markov_w1.weight"][before]])
        z = (
            self.t["confidence_head.proj.weight"][0] @ features
            + self.t["confidence_head.proj.bias"][0]
        )
        return float(1 / (1 + np.exp(-z)))
