"""Chunked cross-entropy against torch's, in value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from fulgurite.lightning_modules import token_loss
from fulgurite.lightning_modules.token_loss import shift_targets, token_cross_entropy


def example(dtype, rows=37, vocab=101):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::5] = -100
    return logits, targets


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
)
@pytest.mark.parametrize("chunk_rows", [1, 8, 1000])
def test_value_and_gradient_equal_the_plain_formula(monkeypatch, chunk_rows, dtype, tolerance, z_loss):
    monkeypatch.setitem(token_loss._CHUNK_ELEMENTS, "cpu", 101 * chunk_rows)
    logits, targets = example(dtype)
    loss, z = token_cross_entropy(logits, targets, z_loss=z_loss)
    (gradient,) = torch.autograd.grad(loss * 0.125, logits)

    exact = logits.detach().double().requires_grad_()
    exact_z = torch.logsumexp(exact, -1).square()[targets != -100].sum()
    exact_loss = F.cross_entropy(exact, targets, reduction="sum") + z_loss * exact_z
    (exact_gradient,) = torch.autograd.grad(exact_loss * 0.125, exact)
    assert loss.item() == pytest.approx(exact_loss.item(), rel=1e-5)
    assert z.item() == pytest.approx(exact_z.item(), rel=1e-5)
    # One rounding to the logits' dtype, relative to the largest gradient of the formula.
    assert (gradient.double() - exact_gradient).abs().max() <= tolerance * exact_gradient.abs().max()
    assert gradient.dtype == dtype
    assert gradient[::5].abs().max() == 0  # ignored rows


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [0.0, -1e4]], requires_grad=True)
    loss, _ = token_cross_entropy(logits, torch.tensor([1, 0]))
    loss.backward()
    assert loss.item() == 1e4
    assert logits.grad.tolist() == [[1.0, -1.0], [0.0, 0.0]]


def test_all_rows_ignored_gives_zero_and_no_nan():
    logits = torch.randn(4, 7, requires_grad=True)
    loss, _ = token_cross_entropy(logits, torch.full((4,), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().max() == 0


def test_shift_aligns_each_position_with_the_next_label():
    labels = torch.tensor([[5, 6, 7], [8, -100, 9]])
    assert shift_targets(labels).tolist() == [[6, 7, -100], [-100, 9, -100]]


def test_no_float32_copy_of_all_logits_is_made():
    """Peak memory of forward and backward: the gradient in the logits' dtype and a chunk, not 12 bytes a logit."""
    logits = torch.randn(4096, 4096).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(4096, (4096,))

    def peak(function):
        # A peak of the allocator, reconstructed from the profiler's trace of allocations and frees.
        with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
            function().backward()
        held = peak_bytes = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak_bytes = max(peak_bytes, held)
        logits.grad = None
        return peak_bytes / logits.numel()

    ours = peak(lambda: token_cross_entropy(logits, targets)[0])
    plain = peak(lambda: F.cross_entropy(logits.float(), targets, reduction="sum"))
    assert ours < 3.0  # bytes a logit: 2 for the gradient, the rest chunks and per-row numbers
    assert plain > 9.0
