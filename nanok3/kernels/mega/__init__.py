"""The persistent kernel: the text of the model, traced into one launch.

Read `sizes` (what is computed with, and how the work is cut), `role` (what a warp has: the ring,
the hand-offs between CTAs), then an op each in `linear`, `attn_res`, `kda`, `mla`, `route` and
`experts`, then `ops`, what each line of the text is to a loader and to a compute warp, and last
`kernel`, which traces the text for both. `fields` is the table of weights, `launch` the host side.
"""
