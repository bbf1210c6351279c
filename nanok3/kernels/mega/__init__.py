"""The persistent kernel: the text of the model, traced into one launch.

Read `sizes` (what is computed with, and how the work is cut), `role` (what a warp has: the ring,
the hand-offs between CTAs), then an op each in `linear`, `attn_res`, `kda`, `mla`, `route` and
`experts`, and last `kernel`, which traces a text by loader and compute warps.
"""
