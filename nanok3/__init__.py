"""nanok3: a compact from-scratch inference engine for Kimi K3.

The public Python interface is `nanok3.engine.Engine`: `load`, `generate` (and `stream`), `logits`.
"""
