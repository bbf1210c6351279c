"""The specification: every op of the model in plain torch, one file an op, torch only.

`<op>_value(...)` returns new tensors, computed in float32 (float64 for float64 inputs) and rounded
where the model rounds; `<op>_ref(..., out=...)` writes them into the buffers it is given. The
reference is the CPU engine, the training code and every test's right answer.
"""
