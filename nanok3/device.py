"""Whether a device can run this: asked before anything is loaded, answered in sentences."""

from __future__ import annotations

from importlib.util import find_spec

import torch

LEAST_TORCH = (2, 11)
CAPABILITIES = {(9, 0), (10, 0), (10, 3)}  # Hopper, and the Blackwells that the kernels compile for
SPARE_BYTES = 2 << 30  # CUDA context, compiled kernels, captured graphs


def device_problems(device: str, dtype: str, needed_bytes: int, what: str = "") -> list[str]:
    """Reasons why `device` cannot hold and run the model; none for a CPU.

    what: of what the bytes consist, for the sentence that refuses them."""
    if not device.startswith("cuda"):
        return []
    if dtype != "bfloat16":
        return [f"dtype {dtype}: on a GPU only bfloat16 runs; leave --dtype out"]
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < LEAST_TORCH:
        return [f"torch {torch.__version__}: 2.11 or later is needed on a GPU"]
    if torch.version.cuda is None:
        return [
            f"torch {torch.__version__} is built without CUDA; install a CUDA build, or use cpu"
        ]
    if not torch.cuda.is_available():
        return ["no GPU with a working NVIDIA driver was found; install the driver, or use cpu"]
    if find_spec("cutlass") is None:
        return ["nvidia-cutlass-dsl is not installed; install nanok3[gpu], or use cpu"]
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return [f"{device}: only {torch.cuda.device_count()} GPUs are here, counted from cuda:0"]
    problems = []
    capability = torch.cuda.get_device_capability(index)
    if capability not in CAPABILITIES:
        name = torch.cuda.get_device_name(index)
        problems.append(
            f"{name} has compute capability {capability[0]}.{capability[1]}; "
            "9.0 (Hopper), 10.0 or 10.3 (Blackwell) is needed"
        )
    free, total = torch.cuda.mem_get_info(index)
    if needed_bytes + SPARE_BYTES > free:
        problems.append(
            f"{device} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free, but "
            f"{(needed_bytes + SPARE_BYTES) / 1e9:.1f} GB are needed{what}"
        )
    return problems
