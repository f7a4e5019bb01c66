"""Summed token cross-entropy from half-precision logits without a float32 copy of all of them.

`log_softmax(logits.float())` keeps two float32 tensors of the logits' shape until backward and makes a third there: for
a vocabulary of 128k that is 12 bytes a logit beside the 2 of the logits themselves. Here only chunks of rows are ever
float32; backward recomputes the softmax of each chunk from the saved logits and writes the gradient in the logits'
dtype, so the extra memory is one tensor of the logits' own size (the gradient) and one float a row.

Shapes: N rows (tokens), V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
# Elements of a float32 chunk: on a CPU it should stay in the second-level cache, on a GPU it should fill the chip.
_CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV: Tensor, targets_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        N, V = logits_NV.shape
        chunk = max(1, _CHUNK_ELEMENTS.get(logits_NV.device.type, 2**24) // V)
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        lse_N = torch.empty(N, dtype=dtype, device=logits_NV.device)
        for start in range(0, N, chunk):
            rows = slice(start, start + chunk)
            torch.logsumexp(logits_NV[rows].to(dtype), dim=-1, out=lse_N[rows])
        valid_N = targets_N != IGNORE_INDEX
        safe_targets_N = targets_N.clamp(min=0)
        picked_N = logits_NV.gather(1, safe_targets_N[:, None]).squeeze(1).to(dtype)
        nll = torch.where(valid_N, lse_N - picked_N, 0.0).sum()
        z = torch.where(valid_N, lse_N.square(), 0.0).sum()
        ctx.save_for_backward(logits_NV, safe_targets_N, valid_N, lse_N)
        ctx.z_loss, ctx.chunk = z_loss, chunk
        ctx.mark_non_differentiable(z)
        return nll + z_loss * z if z_loss else nll, z

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _grad_z: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # d loss / d logits = softmax * (1 + 2 * z_loss * lse) - onehot(target), 0 where the target is ignored
        logits_NV, targets_N, valid_N, lse_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        scale_N = torch.where(valid_N, grad_loss.to(lse_N.dtype), 0.0)
        for start in range(0, logits_NV.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            lse = lse_N[rows, None]
            scale = scale_N[rows, None]
            probs = torch.sub(logits_NV[rows], lse).exp_()  # wide by promotion; the logits stay as they are
            probs.mul_(scale * (1.0 + 2.0 * ctx.z_loss * lse) if ctx.z_loss else scale)
            probs.scatter_add_(1, targets_N[rows, None], -scale)
            grad_NV[rows] = probs
        return grad_NV, None, None


def shift_targets(labels: Tensor) -> Tensor:
    """Targets (B, T) of the logits at each position: the next position's label, and `IGNORE_INDEX` at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def token_cross_entropy(logits: Tensor, targets: Tensor, *, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum over target tokens of `-log softmax(logits)[target] + z_loss * logsumexp(logits)**2`.

    Args:
        logits: (..., V), any floating dtype; position i predicts `targets[i]` (see `shift_targets`).
        targets: (...) int64, `IGNORE_INDEX` where there is no target.
        z_loss: coefficient of the squared log-partition (PaLM, arXiv 2204.02311, section 5; there 1e-4).

    Returns:
        `(loss_sum, z_sum)`: scalars in float32 (float64 for float64 logits), in nats; `z_sum` is the sum of
        `logsumexp**2`, without gradient.
    """
    return _TokenCrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), z_loss)
