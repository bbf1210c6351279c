"""Runs the PTX of a compiled kernel on the CPU, so that kernels are tested where there is no GPU.

`instructions` reads PTX, `machine` runs a grid and checks what a GPU does not, `launch` lets a
kernel's own launcher run on it. Time is not modelled, and nothing here knows what a kernel is for.
"""
