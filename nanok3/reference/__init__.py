"""The specification: every op of the model in plain torch, torch only; a file opens with formulas.

`<op>_ref(..., out=...)` writes into the buffers it is given what it computes in float32 (float64
for float64 inputs) and rounds where the model rounds; the longer ones have an `<op>_value(...)`
that returns new tensors. Other forms of an op stand beside it and are tested against it. The
reference is the CPU engine, the training code and every test's right answer.
"""
