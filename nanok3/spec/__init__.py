"""Speculative decoding with a DSpark draft: its config and weights, its forward pass, acceptance.

`config` and `draft_weights` read the published formats, `draft` and `draft_ops` are the forward
pass, `propose` draws drafts from it, `verify` decides which of them stand, `budget` how many are
worth verifying. Requests and steps are for the engine.
"""
