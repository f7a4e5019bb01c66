"""Model FLOPs a token, and the peak they are compared with (model FLOPs utilisation, MFU).

    FLOPs per token (forward + backward) = 6 N + 12 L d T            (PaLM, arXiv 2204.02311, appendix B)

N counts the parameters that multiply a token: all but the input embedding table, which is only looked up; a table that
is tied to the output head multiplies there, and counts once. Of mixture-of-experts weights, the share that one token
uses counts. L layers, d = heads * head_dim, T sequence length. The causal half of attention is not subtracted.
"""

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense tensor-core peaks in TFLOP/s from the vendors' data sheets: (name as the driver reports it, {dtype: peak}).
# The first name found in the device's name counts, so longer names come first. float32 is the TF32 / matrix-core mode.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", {"half": 2500.0, "tf32": 1250.0, "float32": 80.0}),
    ("B200", {"half": 2250.0, "tf32": 1100.0, "float32": 75.0}),
    ("GH200", {"half": 989.4, "tf32": 494.7, "float32": 67.0}),
    ("H200", {"half": 989.4, "tf32": 494.7, "float32": 67.0}),
    ("H100 NVL", {"half": 835.5, "tf32": 417.5, "float32": 60.0}),
    ("H100 PCIe", {"half": 756.0, "tf32": 378.0, "float32": 51.0}),
    ("H100", {"half": 989.4, "tf32": 494.7, "float32": 67.0}),
    ("A100", {"half": 312.0, "tf32": 156.0, "float32": 19.5}),
    ("A10G", {"half": 70.0, "tf32": 35.0, "float32": 31.5}),
    ("L40S", {"half": 362.0, "tf32": 183.0, "float32": 91.6}),
    ("L4", {"half": 121.0, "tf32": 60.0, "float32": 30.3}),
    ("RTX 5090", {"half": 209.5, "tf32": 104.8, "float32": 104.8}),
    ("RTX 4090", {"half": 165.2, "tf32": 82.6, "float32": 82.6}),
    ("RTX 3090", {"half": 71.0, "tf32": 35.6, "float32": 35.6}),
    ("V100", {"half": 125.0, "tf32": 15.7, "float32": 15.7}),
    ("T4", {"half": 65.0, "tf32": 8.1, "float32": 8.1}),
    ("MI355X", {"half": 2500.0, "tf32": 157.3, "float32": 157.3}),
    ("MI325X", {"half": 1307.4, "tf32": 653.7, "float32": 163.4}),
    ("MI300X", {"half": 1307.4, "tf32": 653.7, "float32": 163.4}),
    ("MI250X", {"half": 383.0, "tf32": 95.7, "float32": 95.7}),
)


def matmul_parameters(model: "PreTrainedModel") -> int:
    """N of the module docstring, whole-model (not a shard's) count."""
    config = model.config
    expert_share = 1.0
    num_experts = next(
        (
            getattr(config, name)
            for name in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(config, name, None)
        ),
        None,
    )
    if num_experts and getattr(config, "num_experts_per_tok", None):
        expert_share = config.num_experts_per_tok / num_experts
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and not tied:
            continue
        total += parameter.numel() * (expert_share if ".experts." in name else 1.0)
    return round(total)


def flops_per_token(model: "PreTrainedModel", sequence_length: int, num_matmul_parameters: int | None = None) -> float:
    """FLOPs of forward and backward for one token in a sequence of `sequence_length` tokens."""
    config = model.config.get_text_config()
    n = matmul_parameters(model) if num_matmul_parameters is None else num_matmul_parameters
    heads = getattr(config, "num_attention_heads", 0) or 0
    width = heads * (getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))
    return 6.0 * n + 12.0 * config.num_hidden_layers * width * sequence_length


def measured_peak(dtype: torch.dtype, *, size: int = 1024, seconds: float = 0.15) -> float:
    """FLOP/s of the best of a few square matrix products on this CPU with torch's present number of threads."""
    a = torch.randn(size, size).to(dtype)
    b = torch.randn(size, size).to(dtype)
    torch.mm(a, b)  # the first call packs and compiles
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of one device for matrix products in `dtype`: from data sheets, on a CPU measured.

    Returns None for an accelerator that is not in the table: MFU is then not logged.
    """
    if device.type == "cpu":
        return measured_peak(dtype)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    kind = "half" if dtype in (torch.float16, torch.bfloat16) else "float32"
    if kind == "float32" and torch.get_float32_matmul_precision() != "highest":
        kind = "tf32"
    return next((peaks[kind] * 1e12 for known, peaks in _PEAKS if known in name), None)
