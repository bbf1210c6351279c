"""One CuTe DSL kernel a file: header, device, host, reference, read downwards.

A kernel knows tensors and integers, not the model. Its launcher checks shapes, its tile functions
are what the persistent kernel will call too. Nothing here is imported on a CPU path.
"""
